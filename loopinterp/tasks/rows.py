"""Rows of tokens: joined, cut and read; integers as rows of digits, the least significant first."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import pad

from loopinterp.core.errors import InputError, check_integer
from loopinterp.tasks.sampling import check_length, inside

if TYPE_CHECKING:
    from jaxtyping import Bool, Int
    from torch import Tensor


def join(
    parts: Sequence[tuple[Int[Tensor, "batch _"], Int[Tensor, " batch"]]], *, width: int, fill: int
) -> Int[Tensor, "batch width"]:
    """The parts (values, how many of each row count) of each row, one right after the other."""
    values = torch.cat([part for part, _ in parts], dim=1)
    keep = torch.cat([inside(length, part.shape[1]) for part, length in parts], dim=1)
    return pack(values, keep, width=width, fill=fill)


def pack(
    values: Int[Tensor, "batch columns"],
    keep: Bool[Tensor, "batch columns"],
    *,
    width: int,
    fill: int,
) -> Int[Tensor, "batch width"]:
    """The kept values of each row without gaps, and ``fill`` up to the width."""
    # Values that are not kept go to one more column, which is dropped.
    at = torch.where(keep, keep.cumsum(dim=1) - 1, width)
    out = values.new_full((len(values), width + 1), fill)
    return out.scatter_(1, at, values)[:, :width]


def put(
    rows: Int[Tensor, "batch width"],
    values: Int[Tensor, "batch longest"],
    start: Int[Tensor, " batch"],
    length: Int[Tensor, " batch"],
) -> Int[Tensor, "batch width"]:
    """The rows with ``length`` of the values written over them from ``start`` on."""
    width = rows.shape[1]
    at = start[:, None] + torch.arange(values.shape[1], device=rows.device)  # [batch, longest]
    # Values that do not count, or are beyond the row's end, go to one more column: dropped.
    at = torch.where(inside(length, values.shape[1]) & (at < width), at, width)
    return pad(rows, (0, 1)).scatter_(1, at, values)[:, :width]


def cut(
    rows: Int[Tensor, "batch width"], start: Int[Tensor, " batch"], length: Int[Tensor, " batch"]
) -> Int[Tensor, "batch longest"]:
    """``length`` columns of each row from ``start`` on, then zeros."""
    longest = int(length.max())
    column = torch.arange(longest, device=rows.device)
    # [batch, longest]
    values = rows.gather(1, (start[:, None] + column).clamp(max=rows.shape[1] - 1))
    return values.masked_fill(~inside(length, longest), 0)


def places(marks: Bool[Tensor, "batch width"], most: int) -> Int[Tensor, "batch most"]:
    """Columns of the first ``most`` marks of each row; 0 where there are fewer."""
    column = torch.arange(marks.shape[1], device=marks.device)
    at = torch.where(marks, marks.cumsum(dim=1) - 1, most).clamp(max=most)
    # Marks beyond the first ``most`` go to one more column, which is dropped.
    columns = column.new_zeros((len(marks), most + 1))
    return columns.scatter_(1, at, column.expand_as(at))[:, :most]


def split(
    rows: Int[Tensor, "batch width"], ends: Int[Tensor, "batch part"]
) -> tuple[Int[Tensor, "batch part longest"], Int[Tensor, "batch part"]]:
    """The parts of each row, padded with zeros; and how long each is.

    ``ends`` is the column after each part, which belongs to none; 0 where there is no part.
    """
    # [batch, part]: each part starts one column after the end of the part before
    start = torch.cat([torch.zeros_like(ends[:, :1]), ends[:, :-1] + 1], dim=1)
    length = (ends - start).clamp(min=0)
    longest = max(int(length.max()), 1)
    # Columns of each part, [batch, part, longest]
    at = (start[..., None] + torch.arange(longest, device=rows.device)).clamp(max=rows.shape[1] - 1)
    values = rows.gather(1, at.flatten(1)).view_as(at)
    return values.masked_fill(~inside(length, longest), 0), length


def same(symbol: int, like: Int[Tensor, " batch"]) -> tuple[Tensor, Tensor]:
    """A part of one symbol, the same in every row."""
    return torch.full_like(like, symbol)[:, None], torch.ones_like(like)


def operand_digits(
    operands: Iterable[Any], *n: int, base: int = 2
) -> tuple[Int[Tensor, "example _"], ...]:
    """The digits of the first operands, of the second, and so on: ``n`` of each."""
    columns = zip(*check_operands(operands, len(n)))
    return tuple(to_digits(column, k, base) for column, k in zip(columns, n))


def check_operands(operands: Iterable[Any], n: int) -> list[tuple[Any, ...]]:
    """The operands as tuples of ``n``; raise unless they are tuples, lists or rows of arrays."""
    try:
        rows = [tuple(example) for example in operands]
    except TypeError:  # not a sequence, or not of sequences
        rows = []
    if not rows or any(len(example) != n for example in rows):
        expected, fix = f"examples of {n} integers", f"Pass e.g. [{tuple(range(3, 3 + 2 * n, 2))}]."
        raise InputError("operands", expected=expected, given=reprlib.repr(operands), fix=fix)
    return rows


def to_digits(numbers: Sequence[int], n: int, base: int) -> Int[Tensor, "number n"]:
    """The ``n`` digits of each number; an InputError names one that does not fit, or is none."""
    most = base ** check_length(n) - 1
    fix = f"It must fit in {n} digits to base {base}: pass a larger n, or a smaller number."
    integers = [check_integer("operand", x, least=0, most=most, fix=fix) for x in numbers]
    return torch.tensor([[x // base**k % base for k in range(n)] for x in integers])


def carry_over(columns: Int[Tensor, "batch width"], base: int) -> Int[Tensor, "batch width"]:
    """Digits of numbers given as column sums; the carry out of the last column is dropped."""
    carry = torch.zeros_like(columns[:, 0])  # [batch]
    digits = []
    for column in columns.unbind(dim=1):
        total = column + carry
        digits.append(total % base)
        carry = total // base
    return torch.stack(digits, dim=1)


def product_digits(
    a: Int[Tensor, "batch width_a"], b: Int[Tensor, "batch width_b"], base: int
) -> Int[Tensor, "batch width"]:
    """Digits of the products, as many as both factors together."""
    # Long multiplication: [batch, width] sums of columns, carried over at the end.
    columns = b.new_zeros((len(b), a.shape[1] + b.shape[1]))
    for i in range(a.shape[1]):
        columns[:, i : i + b.shape[1]] += a[:, i : i + 1] * b
    return carry_over(columns, base)


def n_significant(digits: Int[Tensor, "batch width"]) -> Int[Tensor, " batch"]:
    """How many digits each number has without leading zeros; 0 has none."""
    column = torch.arange(1, digits.shape[1] + 1, device=digits.device)
    return ((digits > 0) * column).amax(dim=1)  # place of the last digit that is not 0


def lead(
    digits: Int[Tensor, "*batch width"],
    n_digits: Int[Tensor, "*batch"],
    first: Int[Tensor, "*batch"],
) -> Int[Tensor, "*batch width"]:
    """Numbers of ``n_digits`` with another leading digit; those of one digit stay as they are."""
    at = (n_digits - 1)[..., None]  # the place of the leading digit
    fresh = torch.where(at > 0, first[..., None], digits.gather(-1, at))
    return digits.scatter(-1, at, fresh)


def place_of_equals(
    equals: int, tokens: Int[Tensor, "batch pos"], task: str
) -> Int[Tensor, " batch"]:
    """Where each row has its ``=`` (token ``equals``), of which it must have one."""
    marks = tokens == equals
    if not bool((marks.sum(dim=1) == 1).all()):
        raise malformed(task, f"one '=' (token {equals})")
    return marks.long().argmax(dim=1)


def operands_of(
    prompt: Int[Tensor, "batch width"],
    n: Int[Tensor, " batch"],
    *,
    operator: int,
    base: int,
    task: str,
    n_operands: int = 2,
) -> tuple[Int[Tensor, "batch operand longest"], Int[Tensor, "batch operand"]]:
    """The digits of the operands in the first ``n`` symbols of each prompt; how many each has."""
    marks = (prompt == operator) & inside(n, prompt.shape[1])
    if not bool((marks.sum(dim=1) == n_operands - 1).all()):
        raise malformed(task, f"{n_operands} operands, operators (token {operator}) between them")
    ends = torch.cat([places(marks, n_operands - 1), n[:, None]], dim=1)
    digits, n_digits = split(prompt, ends)  # [batch, operand, width], [batch, operand]
    if not bool((n_digits > 0).all()):
        raise malformed(task, "a digit on both sides of each operator, and then the '='")
    if digits.numel() and int(digits.max()) >= base:
        raise malformed(task, f"operands of digits 0..{base - 1} alone")
    return digits, n_digits


def malformed(task: str, expected: str, got: str = "a row without") -> InputError:
    """The error for inputs of which a row is not what a task writes."""
    fix = "Pass inputs as a batch of this task has them."
    return InputError("inputs", expected=f"{expected} ({task})", given=got, fix=fix)
