"""Rows of tokens, and integers as rows of digits, least significant first.

Tokens and digits are integers [batch, width]; lengths and places are integers [batch].
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import pad

from loopinterp.core.errors import check_integer, need
from loopinterp.tasks.sampling import check_length, inside

if TYPE_CHECKING:
    from torch import Tensor


def join(parts: Sequence[tuple[Tensor, Tensor]], *, width: int, fill: int) -> Tensor:
    """Concatenate the parts (values, counts) of each row."""
    values = torch.cat([part for part, _ in parts], dim=1)
    keep = torch.cat([inside(length, part.shape[1]) for part, length in parts], dim=1)
    return pack(values, keep, width=width, fill=fill)


def pack(values: Tensor, keep: Tensor, *, width: int, fill: int) -> Tensor:
    """The kept values of each row without gaps; ``fill`` up to the width."""
    # Other values go to one more column, which is dropped.
    at = torch.where(keep, keep.cumsum(dim=1) - 1, width)
    out = values.new_full((len(values), width + 1), fill)
    return out.scatter_(1, at, values)[:, :width]


def put(rows: Tensor, values: Tensor, start: Tensor, length: Tensor) -> Tensor:
    """The rows with ``length`` values written over them from ``start`` on."""
    width = rows.shape[1]
    at = start[:, None] + torch.arange(values.shape[1], device=rows.device)  # [batch, longest]
    # Values that do not count, or are beyond the row's end, go to one more column: dropped.
    at = torch.where(inside(length, values.shape[1]) & (at < width), at, width)
    return pad(rows, (0, 1)).scatter_(1, at, values)[:, :width]


def cut(rows: Tensor, start: Tensor, length: Tensor) -> Tensor:
    """``length`` columns of each row from ``start`` on, then zeros."""
    column = torch.arange(int(length.max()), device=rows.device)
    # [batch, longest]
    values = rows.gather(1, (start[:, None] + column).clamp(max=rows.shape[1] - 1))
    return values.masked_fill(~inside(length, len(column)), 0)


def places(marks: Tensor, most: int) -> Tensor:
    """Columns of each row's first ``most`` marks [batch, most]; 0 for missing ones."""
    column = torch.arange(marks.shape[1], device=marks.device)
    at = torch.where(marks, marks.cumsum(dim=1) - 1, most).clamp(max=most)
    # Marks beyond the first ``most`` go to one more column, which is dropped.
    columns = column.new_zeros((len(marks), most + 1))
    return columns.scatter_(1, at, column.expand_as(at))[:, :most]


def split(rows: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """The parts of each row [batch, part, longest], padded with zeros, and their lengths.

    ``ends`` [batch, part] is the column after each part; 0 for no part.
    """
    # [batch, part]: each part starts one column after the end of the part before
    start = torch.cat([torch.zeros_like(ends[:, :1]), ends[:, :-1] + 1], dim=1)
    length = (ends - start).clamp(min=0)
    longest = max(int(length.max()), 1)
    # Columns of each part, [batch, part, longest]
    at = (start[..., None] + torch.arange(longest, device=rows.device)).clamp(max=rows.shape[1] - 1)
    values = rows.gather(1, at.flatten(1)).view_as(at)
    return values.masked_fill(~inside(length, longest), 0), length


def same(symbol: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """A part of one symbol, for every row."""
    return torch.full_like(like, symbol)[:, None], torch.ones_like(like)


def read_strings(words: Sequence[str], alphabet: str) -> tuple[Tensor, Tensor]:
    """Symbols of each string, by their place in the alphabet, and the strings' lengths."""
    listed = bool(words) and not isinstance(words, str)
    fits = listed and all(word and {*word} <= {*alphabet} for word in words)
    expected = f"a list of strings of one or more symbols of {alphabet!r}"
    need(fits, "words", expected, repr(words), f"Pass e.g. [{alphabet!r}].")
    longest = max(map(len, words))
    padded = [word.ljust(longest, alphabet[0]) for word in words]
    symbols = torch.tensor([[alphabet.index(x) for x in word] for word in padded])
    return symbols, torch.tensor([len(word) for word in words])


def operand_digits(operands: Iterable[Any], *n: int) -> tuple[Tensor, ...]:
    """The ``n`` bits of the first operands, of the second, and so on."""
    columns = zip(*check_operands(operands, len(n)))
    return tuple(to_digits(column, k, base=2) for column, k in zip(columns, n))


def check_operands(operands: Iterable[Any], n: int) -> list[tuple[Any, ...]]:
    """The operands as tuples of ``n``, checked."""
    try:
        rows = [tuple(example) for example in operands]
    except TypeError:  # not a sequence, or not of sequences
        rows = []
    fits, fix = rows and {*map(len, rows)} == {n}, f"Pass e.g. [{tuple(range(3, 3 + 2 * n, 2))}]."
    need(fits, "operands", f"examples of {n} integers", reprlib.repr(operands), fix)
    return rows


def to_digits(numbers: Sequence[int], n: int, base: int) -> Tensor:
    """The ``n`` digits of each number, if they fit."""
    most = base ** check_length(n) - 1
    fix = f"It must fit in {n} digits to base {base}: pass a larger n, or a smaller number."
    integers = [check_integer("operand", x, least=0, most=most, fix=fix) for x in numbers]
    return torch.tensor([[x // base**k % base for k in range(n)] for x in integers])


def carry_over(columns: Tensor, base: int) -> Tensor:
    """Digits of numbers given as column sums, without the last carry."""
    carry = torch.zeros_like(columns[:, 0])  # [batch]
    digits = []
    for column in columns.unbind(dim=1):
        total = column + carry
        digits.append(total % base)
        carry = total // base
    return torch.stack(digits, dim=1)


def product_digits(a: Tensor, b: Tensor, base: int) -> Tensor:
    """Digits of products, as many as both factors have."""
    # Long multiplication: [batch, width] sums of columns, carried over at the end.
    columns = b.new_zeros((len(b), a.shape[1] + b.shape[1]))
    for i in range(a.shape[1]):
        columns[:, i : i + b.shape[1]] += a[:, i : i + 1] * b
    return carry_over(columns, base)


def n_significant(digits: Tensor) -> Tensor:
    """Digits of each number without leading zeros; 0 has none."""
    column = torch.arange(1, digits.shape[1] + 1, device=digits.device)
    return ((digits > 0) * column).amax(dim=1)  # place of the last digit that is not 0


def lead(digits: Tensor, n_digits: Tensor, first: Tensor) -> Tensor:
    """Numbers [..., width] with another leading digit, if they have several."""
    at = (n_digits - 1)[..., None]  # the place of the leading digit
    fresh = torch.where(at > 0, first[..., None], digits.gather(-1, at))
    return digits.scatter(-1, at, fresh)


def place_of_equals(equals: int, tokens: Tensor, task: str) -> Tensor:
    """Each row's position of its one ``=`` (token ``equals``)."""
    marks = tokens == equals
    need_form((marks.sum(dim=1) == 1).all(), task, f"one '=' (token {equals})")
    return marks.long().argmax(dim=1)


def operands_of(
    prompt: Tensor, n: Tensor, *, operator: int, base: int, task: str, n_operands: int = 2
) -> tuple[Tensor, Tensor]:
    """Digits [batch, operand, longest] and lengths [batch, operand] of each prompt's operands."""
    marks = (prompt == operator) & inside(n, prompt.shape[1])
    expected = f"{n_operands} operands, operators (token {operator}) between them"
    need_form((marks.sum(dim=1) == n_operands - 1).all(), task, expected)
    ends = torch.cat([places(marks, n_operands - 1), n[:, None]], dim=1)
    digits, n_digits = split(prompt, ends)
    expected = "a digit on both sides of each operator, and then the '='"
    need_form((n_digits > 0).all(), task, expected)
    need_form((digits < base).all(), task, f"operands of digits 0..{base - 1} alone")
    return digits, n_digits


def need_form(holds: object, task: str, expected: str, got: str = "a row without") -> None:
    fix = "Pass inputs as a batch of this task has them."
    need(holds, "inputs", f"{expected} ({task})", got, fix)
