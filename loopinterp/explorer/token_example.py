"""The batch of one example in a task's tokens, and the tokens of a text."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import pad

from loopinterp.errors import InputError
from loopinterp.tasks import Batch, FullOutput
from loopinterp.tasks.examples_in_words import until
from loopinterp.tasks.task import IGNORE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxtyping import Int
    from torch import Tensor

    from loopinterp.tasks import Task


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
    return batch_of(task, pad(inputs, (0, max(room, 1)), value=eos), n)


def length_of(task: Any, n_pos: int) -> int:
    """The least problem length that has so many positions."""
    return next((n for n in range(1, n_pos + 1) if task.n_positions(n) >= n_pos), n_pos)


def batch_of(task: Task, inputs: Int[Tensor, "1 pos"], n: int) -> Batch:
    length = torch.tensor([n])
    loops = torch.tensor([task.n_loops(n)])
    unknown = torch.full(inputs.shape, IGNORE)
    batch = Batch(inputs, unknown, length, loops, task)
    try:
        return replace(batch, targets=task.targets(inputs))
    except InputError:  # half an example, of which the task knows no answer
        return batch
