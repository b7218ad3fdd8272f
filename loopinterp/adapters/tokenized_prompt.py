"""A prompt as a published model reads it: in the tokens of its own tokenizer, with their words."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, overload

import torch

from loopinterp.errors import InputError
from loopinterp.models.pretrained import HUB
from loopinterp.short_repr import ShortRepr

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor


class TokenWords(ShortRepr, Sequence[str]):
    """What each token of a tokenizer says, looked up when it is asked for.

    Spaces before words are left out; a token of nothing but spaces and line ends shows them as a
    program would write them, and one that is no whole text (a part of a letter) its piece.

    Args:
        tokenizer: A tokenizer of ``transformers``.
        n_tokens: Their number; a model may have room for more, which say their number.
    """

    def __init__(self, tokenizer: Any, n_tokens: int) -> None:
        self._tokenizer, self._n_tokens = tokenizer, n_tokens

    def _shown(self) -> Iterable[tuple[str, Any]]:
        return [("tokenizer", type(self._tokenizer)), ("n_tokens", self._n_tokens)]

    def __len__(self) -> int:
        return self._n_tokens

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[k] for k in range(len(self))[index]]
        token = range(len(self))[index]
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if piece is None:
            return str(token)
        text = self._tokenizer.decode([token])
        if "\ufffd" in text or not text:
            return str(piece)
        return text.strip() or repr(text)[1:-1].replace(" ", "␣")


_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def tokenize(tokenizer: Any, prompt: str, *, n_ctx: int | None = None) -> Int[Tensor, "1 pos"]:
    """The tokens of a prompt, those included that its tokenizer puts around every text.

    Args:
        tokenizer: A tokenizer of ``transformers``.
        prompt: The text.
        n_ctx: Positions at most.

    Raises:
        InputError: If it has no token, or too many, or is no text that UTF-8 can write.
    """
    if any("\ud800" <= letter <= "\udfff" for letter in prompt):
        raise InputError(
            "prompt",
            expected="text that UTF-8 can write",
            given=f"{prompt[:40]!r}, with half of a pair of surrogates or a byte of another code",
            fix="Write it in UTF-8.",
        )
    tokens = list(tokenizer(prompt)["input_ids"])
    if not tokens or (n_ctx is not None and len(tokens) > n_ctx):
        most = "" if n_ctx is None else f", at most {n_ctx}"
        raise InputError(
            "prompt",
            expected=f"a text of one token or more{most}",
            given=f"{prompt[:40]!r}, of {len(tokens)} tokens",
            fix="Write some words." if not tokens else "Shorten it.",
        )
    return torch.tensor([tokens])


def load_tokenizer(name: str, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer beside a published model, by its name or from its folder.

    Args:
        name: A folder, or ``hf:owner/name`` on the Hugging Face hub.
        trust_remote_code: Run the tokenizer's own code, where ``transformers`` has none for it.

    Raises:
        InputError: If there is none.
    """
    from transformers import AutoTokenizer

    source = published_source(name)
    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
    except Exception as error:  # whatever a damaged or missing file makes of transformers' code
        raise unreadable("tokenizer", name, error) from error


def published_source(name: str) -> str:
    """What transformers is to load: a folder that is there, or what stands behind ``hf:``.

    Transformers takes ``owner/name`` for a folder where there is one of that name. What is asked of
    the hub is then fetched first, so that no file of that folder is read, and no code of it run.

    Raises:
        InputError: If it is neither, or cannot be fetched. A path with a typing mistake in it never
            asks a hub.
    """
    if name.startswith(HUB):
        repository = name.removeprefix(HUB)
        return _fetched(name, repository) if os.path.exists(repository) else repository
    if not os.path.isdir(name):
        raise InputError(
            "model",
            expected=f"the folder of a published model, or {HUB}owner/name on the Hugging Face hub",
            given=repr(name),
            fix=f"Check the path; to ask the hub, write {HUB} before the name.",
        )
    return name


def _fetched(name: str, repository: str) -> str:
    """The folder that a model of the hub is fetched to; its pickles are left there."""
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(repository, ignore_patterns=list(_PICKLES))
    except Exception as error:  # the hub raises many kinds; all mean that it cannot be had
        raise unreadable("model", name, error) from error


def unreadable(what: str, name: str, error: Exception) -> InputError:
    """What to say where transformers could not read something."""
    said = " ".join(str(error).split())
    if "trust_remote_code" in said:
        expected = "code that transformers has, or your leave to run the code beside the weights"
        given, fix = "code of its own", "Read it, and add trust_remote_code (--trust-remote-code)."
    else:
        expected = f"a {what} that transformers can read"
        given = f"{type(error).__name__}: {said[:200]}"
        fix = "Check the name or folder, and whether it is complete."
    return InputError(f"{what} of {name}", expected=expected, given=given, fix=fix)
