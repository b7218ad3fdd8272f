"""The words in which a task's tokens and answers are shown."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from loopinterp.tasks import Addition, FullOutput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

_PAIRS = ("0+0", "1+0", "0+1", "1+1", "BOS", "PAD")


def token_words(task: Any) -> list[str] | None:
    """A word for each token of a task; None where it has no words, or reads no tokens.

    Example:
        >>> from loopinterp.tasks import Addition, TokenAddition
        >>> token_words(TokenAddition())
        ['0', '1', '+', '=', 'EOS', 'BOS']
        >>> token_words(Addition())[3]
        '1+1'
    """
    d_vocab, symbols = getattr(task, "d_vocab", None), getattr(task, "symbols", None)
    if d_vocab is None:
        return None
    if isinstance(task, Addition):
        return list(_PAIRS)
    if isinstance(task, FullOutput):
        return [*task.symbols, "=", "EOS", "BOS"]
    return list(map(str, symbols)) if symbols is not None and len(symbols) == d_vocab else None


def answer_words(task: Any) -> list[str] | None:
    """A word for each class of the answers of a task; None where it is its number.

    Example:
        >>> from loopinterp.tasks import TokenAddition
        >>> answer_words(TokenAddition())
        ['0', '1', 'EOS']
    """
    if isinstance(task, FullOutput):
        return [*task.symbols[: task.n_answer_symbols], "EOS"]
    words = token_words(task)
    return words if words is not None and len(words) == task.d_vocab_out else None


def words_at(inputs: Tensor, words: Sequence[str] | None) -> list[str]:
    """What stands at each position of one input: a word for a token, or the features themselves.

    Example:
        >>> import torch
        >>> words_at(torch.tensor([0, 2]), ["a", "b"]), words_at(torch.tensor([[0.0, 1.0]]), None)
        (['a', '2'], ['0 1'])
    """
    if inputs.ndim > 1:
        return [" ".join(f"{value:g}" for value in row) for row in inputs.tolist()]
    n = 0 if words is None else len(words)
    return [str(words[t]) if words and 0 <= t < n else str(t) for t in inputs.tolist()]
