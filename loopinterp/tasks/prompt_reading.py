"""Reading prompts: where a sign stands, the operands around it, and answers counted from there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from loopinterp.errors import InputError
from loopinterp.tasks.rows import places, split
from loopinterp.tasks.sampling import inside
from loopinterp.tasks.task import IGNORE

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor


def place_of(
    symbol: int, tokens: Int[Tensor, "batch pos"], task: str, what: str = "operator"
) -> Int[Tensor, " batch"]:
    """Where each row has its ``symbol``, of which it must have one."""
    found = tokens == symbol
    if not bool((found.sum(dim=1) == 1).all()):
        raise malformed(task, f"one {what} (token {symbol})")
    return found.long().argmax(dim=1)


def operands_of(
    prompt: Int[Tensor, "batch width"],
    n: Int[Tensor, " batch"],
    *,
    operator: int,
    base: int,
    task: str,
    n_operands: int = 2,
) -> tuple[Int[Tensor, "batch operand longest"], Int[Tensor, "batch operand"]]:
    """The digits of the operands in the first ``n`` symbols of each prompt; how many each has.

    Raises where a row has another number of operators, no digit on a side of one, or an operand
    with something else in it.
    """
    found = (prompt == operator) & inside(n, prompt.shape[1])
    if not bool((found.sum(dim=1) == n_operands - 1).all()):
        number = "one operator" if n_operands == 2 else f"{n_operands - 1} operators"
        raise malformed(task, f"{number} (token {operator})")
    ends = torch.cat([places(found, n_operands - 1), n[:, None]], dim=1)
    digits, n_digits = split(prompt, ends)
    if not bool((n_digits > 0).all()):
        raise malformed(task, "a digit on both sides of each operator, and then the '='")
    if digits.numel() and int(digits.max()) >= base:
        raise malformed(task, f"operands of digits 0..{base - 1} alone")
    return digits, n_digits


def malformed(task: str, expected: str) -> InputError:
    """The error for inputs of which a row is not what a task writes."""
    return InputError(
        f"inputs of task {task}",
        expected=f"{expected} in every row",
        given="a row without",
        fix="Pass the tokens of a batch of this task.",
    )


def answer_from(
    start: Int[Tensor, " batch"],
    answer: Int[Tensor, "batch longest"],
    length: Int[Tensor, " batch"],
    *,
    width: int,
    end: int,
) -> tuple[Int[Tensor, "batch width"], Int[Tensor, "batch width"]]:
    """Places counted from the start, and the answer from there on, closed by ``end``.

    ``IGNORE`` before the start; ``length`` says how many columns of each answer count.
    """
    place = torch.arange(width, device=start.device) - start[:, None]
    out = answer.gather(1, place.clamp(0, answer.shape[1] - 1))
    return place, out.masked_fill(place >= length[:, None], end).masked_fill(place < 0, IGNORE)
