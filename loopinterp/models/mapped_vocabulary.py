"""A looped model behind the vocabulary of a task."""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from loopinterp.errors import InputError
from loopinterp.models.foreign_model import ForeignModel, takes_loop
from loopinterp.models.looped_model import bind, need_model
from loopinterp.models.model_description import device_of, said_of
from loopinterp.models.run_inputs import TOKEN_TYPES, check_tokens
from loopinterp.short_repr import say

if TYPE_CHECKING:
    from jaxtyping import Float, Integer
    from torch import Tensor

    from loopinterp.models.looped_model import Iteration, LoopedModel
    from loopinterp.models.run_length import LoopRule


class WithVocabulary(nn.Module):
    """A looped model that reads a task's tokens, and answers in its classes.

    Args:
        model: Any looped model, with a vocabulary of its own.
        tokens: The model's token for each token of the task, from 0 on; as they are if None.
        answers: The model's output for each answer class of the task; as they are if None.

    Raises:
        InputError: If the model is none, or a list is no list of integers from 0 on; once it is
            run, if the model has no such token or output.

    Example:
        >>> from loopinterp.models import LoopedTransformer, LoopedTransformerConfig
        >>> config = LoopedTransformerConfig(d_model=8, n_heads=2, d_vocab=100, d_vocab_out=100)
        >>> model = WithVocabulary(LoopedTransformer(config), tokens=[48, 49, 2], answers=[48, 49])
        >>> model.readout(model.embed(torch.tensor([[2, 0, 1]]))).shape
        torch.Size([1, 3, 2])
    """

    tokens: Tensor | None
    answers: Tensor | None

    def __init__(
        self,
        model: LoopedModel | Any,
        *,
        tokens: Sequence[int] | None = None,
        answers: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        need_model(model)
        self.model = model
        for name, numbers in (("tokens", tokens), ("answers", answers)):
            table = None if numbers is None else _table(name, numbers)
            self.register_buffer(name, None if table is None else table.to(device_of(model)))
            if name == "answers" and table is not None:
                self._last_answer = int(table.max())  # once, as devices are slow to say

    def __repr__(self) -> str:
        shown = {"model": self.model, "tokens": self.tokens, "answers": self.answers}
        return say(type(self).__name__, shown.items())

    @property
    def device(self) -> torch.device:
        """Where the model lies."""
        return device_of(self.model)

    @property
    def reach(self) -> int | None:
        """That of the model."""
        return getattr(self.model, "reach", None)

    @property
    def causal(self) -> bool | None:
        """Whether the model sees no later positions, where it says so."""
        return said_of(self.model, "causal")

    @property
    def reach_before(self) -> int | None:
        """That of the model."""
        return getattr(self.model, "reach_before", 0)

    @property
    def local_step(self) -> bool:
        """That of the model."""
        return getattr(self.model, "local_step", True)

    @property
    def n_ctx(self) -> int | None:
        """The positions that the model has room for, where it says so."""
        return said_of(self.model, "n_ctx")

    @property
    def d_vocab(self) -> int | None:
        """Tokens that the task has, where that is known."""
        return said_of(self.model, "d_vocab") if self.tokens is None else len(self.tokens)

    @property
    def d_features(self) -> int | None:
        """That of the model, which has it where it reads no tokens."""
        return said_of(self.model, "d_features")

    @property
    def d_vocab_out(self) -> int | None:
        """Answer classes that the task has, where that is known."""
        return said_of(self.model, "d_vocab_out") if self.answers is None else len(self.answers)

    @property
    def loop_rule(self) -> LoopRule | None:
        """That of the model: how many loops it was made for, where that is known."""
        return getattr(self.model, "loop_rule", None)

    def embed(self, inputs: Integer[Tensor, "batch pos"]) -> Float[Tensor, "batch pos d_model"]:
        """The model's, of its own tokens."""
        own = self._own(inputs)
        with self._naming_tokens(own):
            return self.model.embed(own)

    def initial_state(
        self, e: Float[Tensor, "batch pos d_model"]
    ) -> Float[Tensor, "batch pos d_model"]:
        """The model's."""
        return self.model.initial_state(e)

    @property
    def takes_loop(self) -> bool:
        """Whether the model's step takes the index of the loop."""
        return takes_loop(self.model)

    def step(
        self,
        h: Float[Tensor, "batch pos d_model"],
        e: Float[Tensor, "batch pos d_model"],
        loop: int | None = None,
    ) -> Float[Tensor, "batch pos d_model"]:
        """The model's."""
        return ForeignModel(self.model).step(h, e, loop)

    def readout(
        self, h: Float[Tensor, "batch pos d_model"]
    ) -> Float[Tensor, "batch pos d_vocab_out"]:
        """The model's, at the answers of the task."""
        return self._answers(self.model.readout(h))

    def bind(self, inputs: Integer[Tensor, "batch pos"]) -> Iteration:
        """The model's, which may know more of its input than the four methods pass on."""
        tokens = self._own(inputs)
        with self._naming_tokens(tokens):
            own = bind(self.model, tokens)
        return dataclasses.replace(own, readout=lambda h: self._answers(own.readout(h)))

    def _own(self, inputs: Tensor) -> Tensor:
        if self.tokens is None:
            # An embedding of PyTorch looks up int32 and int64 only.
            return inputs.long() if getattr(inputs, "dtype", None) in TOKEN_TYPES else inputs
        check_tokens(inputs, len(self.tokens), "Map every token of the task, or use its sampler.")
        return self.tokens[inputs.long()]

    @contextmanager
    def _naming_tokens(self, own: Tensor) -> Iterator[None]:
        """Say by which map a model finds no token, or that it has no room for so many positions."""
        try:
            yield
        except IndexError as error:
            if self._knows_each(own):
                raise InputError(
                    "inputs",
                    expected="as many positions as the model has places for",
                    given=f"{own.shape[1]} positions",
                    fix=f"Shorten the input: embedding it, the model says {str(error)!r}.",
                ) from error
            raise InputError(
                "tokens",
                expected="tokens of the model's own vocabulary",
                given="the task's as they are" if self.tokens is None else _spelled(self.tokens),
                fix=f"Check the map: looking them up, the model says {str(error)!r}.",
            ) from error

    def _knows_each(self, own: Tensor) -> bool:
        """Whether the model embeds each token of an input where it stands alone."""
        try:
            self.model.embed(own.unique()[:, None])
        except IndexError:
            return False
        return own.shape[1] > 1

    def _answers(self, logits: Tensor) -> Tensor:
        if self.answers is None:
            return logits
        if self._last_answer >= logits.shape[-1]:
            raise InputError(
                "answers",
                expected=f"outputs of the model, from 0 to {logits.shape[-1] - 1}",
                given=_spelled(self.answers),
                fix="Pass the model's output for each answer class of the task.",
            )
        return logits[..., self.answers]


def _table(name: str, numbers: Any) -> Tensor:
    """A map as a tensor; raise unless it is one. Of answers there are two or more."""
    least = 2 if name == "answers" else 1
    try:
        table = torch.as_tensor(numbers)
    except (TypeError, ValueError, RuntimeError):  # text, None, lists of lists
        table = torch.empty(0)
    if table.dtype in TOKEN_TYPES and table.ndim == 1 and len(table) >= least and table.min() >= 0:
        return table.long()
    raise InputError(
        name,
        expected=f"a list of {least} or more of the model's own tokens, one for each of the task's",
        given=_spelled(numbers),
        fix="Pass e.g. [tokenizer.convert_tokens_to_ids(word) for word in words].",
    )


def _spelled(numbers: Any) -> str:
    return reprlib.repr(numbers.tolist() if isinstance(numbers, torch.Tensor) else numbers)
