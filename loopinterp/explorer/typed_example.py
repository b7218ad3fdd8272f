"""An example that is typed: in the words of a task's tokens, or as people write it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from loopinterp.errors import InputError
from loopinterp.explorer.shown_example import numbers_example, shown_example
from loopinterp.explorer.task_words import token_words
from loopinterp.explorer.token_example import batch_of, full_output, length_of, read_words
from loopinterp.tasks import Addition, Batch, FullOutput
from loopinterp.tasks.addition import BOS

if TYPE_CHECKING:
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
    return batch_of(task, torch.tensor([tokens]), length_of(task, len(tokens)))
