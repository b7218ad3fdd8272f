"""An example that is typed: in the words of a task's tokens, or as people write it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import pad

from loopinterp.errors import InputError
from loopinterp.explorer.shown_example import numbers_example, shown_example
from loopinterp.explorer.task_words import token_words
from loopinterp.tasks import Addition, Batch, FullOutput
from loopinterp.tasks.addition import BOS
from loopinterp.tasks.examples_in_words import until
from loopinterp.tasks.task import IGNORE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxtyping import Int
    from torch import Tensor

    from loopinterp.tasks import Task


def typed_example(task: Task, text: str) -> Batch:
    """The batch of one example that a text says, with the right answer where the task knows it.

    Tokens are written in the task's words, with spaces between them or without; a task with
    full-output prediction needs neither BOS nor ``=`` nor the padding after it. What ``decode``
    shows is read as it is meant (``25 * 14 = 350``, the grid of a sudoku or maze, a board), and so
    is a FEN. Where digits beyond 1 are no tokens, ``13 + 9`` and ``13*9`` mean these numbers.

    Args:
        task: The task.
        text: What is typed.

    Raises:
        InputError: what is no token of the task, or a task that reads no tokens.

    Example:
        >>> from loopinterp.tasks import Addition, TokenAddition
        >>> task = Addition()
        >>> task.decode(typed_example(task, "13 + 9")), task.decode(typed_example(task, "1+1 0+1"))
        (['01101 + 01001 = 10110 mod 2^5'], ['01 + 11 = 00 mod 2^2'])
        >>> TokenAddition().decode(typed_example(TokenAddition(), "101+011"))
        ['101 + 011 = 1000']
    """
    words = token_words(task)
    if words is None and task.d_vocab is None:
        raise InputError(
            "example",
            expected="a task that reads tokens",
            given=f"{task.name}, which reads {task.d_features} numbers a position",
            fix="Pass its inputs to explore() as a tensor.",
        )
    shown = shown_example(task, text)
    if shown is not None:
        return shown
    numbers = numbers_example(task, text)
    if isinstance(task, Addition) and numbers is not None and text.strip() not in (words or ()):
        return numbers
    try:
        tokens = read_words(text, words or [str(k) for k in range(task.d_vocab or 0)])
    except InputError:
        if numbers is None:
            raise
        return numbers
    if isinstance(task, FullOutput):
        return full_output(task, tokens)
    if isinstance(task, Addition) and tokens[0] != BOS:
        tokens = [BOS, *tokens]
    return _batch(task, torch.tensor([tokens]), _length(task, len(tokens)))


def read_words(text: str, words: Sequence[str]) -> list[int]:
    """The tokens of a text: at each place the longest word that fits, spaces left out.

    Example:
        >>> read_words("10=EOS 1", ["0", "1", "=", "EOS"])
        [1, 0, 2, 3, 1]
    """
    known = sorted(range(len(words)), key=lambda k: -len(words[k]))
    found, at = [], 0
    while at < len(text):
        if text[at].isspace():
            at += 1
            continue
        token = next((k for k in known if words[k] and text.startswith(words[k], at)), None)
        if token is None:
            shown = ", ".join(words[:12]) + (", …" if len(words) > 12 else "")
            raise InputError(
                "example",
                expected=f"words of the task: {shown}",
                given=f"{text[at : at + 12]!r} at place {at}",
                fix="Write these, with spaces between them.",
            )
        found.append(token)
        at += len(words[token])
    if not found:
        raise InputError("example", expected="a token", given="none", fix="Write one.")
    return found


def full_output(task: FullOutput, tokens: Sequence[int]) -> Batch:
    """With what such a task puts around a prompt; what is after an ``=`` is left out."""
    eos, bos = task.equals + 1, task.equals + 2
    prompt = [t for t in until(tokens, task.equals) if t < task.equals]
    n = next(k for k in range(1, len(prompt) + 2) if task.prompt_length(k) >= len(prompt))
    inputs = torch.tensor([[bos, *prompt, task.equals]])
    room = task.n_positions(n) - inputs.shape[1]
    return _batch(task, pad(inputs, (0, max(room, 1)), value=eos), n)


def _length(task: Any, n_pos: int) -> int:
    """The least problem length that has so many positions."""
    return next((n for n in range(1, n_pos + 1) if task.n_positions(n) >= n_pos), n_pos)


def _batch(task: Task, inputs: Int[Tensor, "1 pos"], n: int) -> Batch:
    length = torch.tensor([n])
    loops = torch.tensor([task.n_loops(n)])
    unknown = torch.full(inputs.shape, IGNORE)
    batch = Batch(inputs, unknown, length, loops, task)
    try:
        return replace(batch, targets=task.targets(inputs))
    except InputError:  # half an example, of which the task knows no answer
        return batch
