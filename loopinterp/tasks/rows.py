"""Sequences of different lengths in one tensor: putting parts one after another, and cutting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from loopinterp.tasks.sampling import inside

if TYPE_CHECKING:
    from jaxtyping import Bool, Int
    from torch import Tensor


def join(
    parts: Sequence[tuple[Int[Tensor, "batch _"], Int[Tensor, " batch"]]], *, width: int, fill: int
) -> Int[Tensor, "batch width"]:
    """The parts of each row, one right after the other, and ``fill`` up to the width.

    Args:
        parts: Values, and how many of each row count.
        width: Columns of the result, at least the longest row.
        fill: What stands after the last part.

    Example:
        >>> a, b = torch.tensor([[1, 2], [3, 0]]), torch.tensor([[7], [8]])
        >>> join([(a, torch.tensor([2, 1])), (b, torch.tensor([1, 1]))], width=4, fill=9).tolist()
        [[1, 2, 7, 9], [3, 8, 9, 9]]
    """
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
    """What is kept of each row, without gaps, and ``fill`` up to the width.

    Example:
        >>> values = torch.tensor([[1, 2, 3], [4, 5, 6]])
        >>> pack(values, values % 2 == 0, width=3, fill=0).tolist()
        [[2, 0, 0], [4, 6, 0]]
    """
    # What is not kept goes to one more column, which is dropped.
    at = torch.where(keep, keep.cumsum(dim=1) - 1, width)
    out = values.new_full((len(values), width + 1), fill)
    return out.scatter_(1, at, values)[:, :width]


def put(
    rows: Int[Tensor, "batch width"],
    values: Int[Tensor, "batch longest"],
    start: Int[Tensor, " batch"],
    length: Int[Tensor, " batch"],
) -> Int[Tensor, "batch width"]:
    """The rows with ``length`` of the values in place of what they have from ``start`` on.

    Example:
        >>> rows, values = torch.zeros(2, 4, dtype=torch.int64), torch.tensor([[1, 2], [3, 4]])
        >>> put(rows, values, torch.tensor([1, 3]), torch.tensor([1, 2])).tolist()
        [[0, 1, 0, 0], [0, 0, 0, 3]]
    """
    width = rows.shape[1]
    at = start[:, None] + torch.arange(values.shape[1], device=rows.device)
    # What does not count, or is beyond the row's end, goes to one more column, which is dropped.
    at = torch.where(inside(length, values.shape[1]) & (at < width), at, width)
    return pad(rows, (0, 1)).scatter_(1, at, values)[:, :width]


def cut(
    rows: Int[Tensor, "batch width"], start: Int[Tensor, " batch"], length: Int[Tensor, " batch"]
) -> Int[Tensor, "batch longest"]:
    """``length`` columns of each row from ``start`` on, then zeros.

    Example:
        >>> rows = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
        >>> cut(rows, torch.tensor([1, 0]), torch.tensor([3, 1])).tolist()
        [[2, 3, 4], [5, 0, 0]]
    """
    longest = int(length.max())
    column = torch.arange(longest, device=rows.device)
    values = rows.gather(1, (start[:, None] + column).clamp(max=rows.shape[1] - 1))
    return values.masked_fill(~inside(length, longest), 0)


def places(marks: Bool[Tensor, "batch width"], most: int) -> Int[Tensor, "batch most"]:
    """Columns of the first ``most`` marks of each row; 0 where there are fewer.

    Example:
        >>> places(torch.tensor([[True, False, True], [False, True, False]]), 2).tolist()
        [[0, 2], [1, 0]]
    """
    column = torch.arange(marks.shape[1], device=marks.device)
    at = torch.where(marks, marks.cumsum(dim=1) - 1, most).clamp(max=most)
    found = column.new_zeros((len(marks), most + 1))
    return found.scatter_(1, at, column.expand_as(at))[:, :most]


def split(
    rows: Int[Tensor, "batch width"], ends: Int[Tensor, "batch part"]
) -> tuple[Int[Tensor, "batch part longest"], Int[Tensor, "batch part"]]:
    """The parts of each row between its ``ends``, padded with zeros; and how long each is.

    Args:
        rows: What is split.
        ends: The column after each part, which belongs to none; 0 where there are no more parts.

    Example:
        >>> split(torch.tensor([[1, 2, 9, 3, 9]]), torch.tensor([[2, 4]]))
        (tensor([[[1, 2],
                 [3, 0]]]), tensor([[2, 1]]))
    """
    start = torch.cat([torch.zeros_like(ends[:, :1]), ends[:, :-1] + 1], dim=1)
    length = (ends - start).clamp(min=0)
    longest = max(int(length.max()), 1)
    at = (start[..., None] + torch.arange(longest, device=rows.device)).clamp(max=rows.shape[1] - 1)
    values = rows.gather(1, at.flatten(1)).view_as(at)
    return values.masked_fill(~inside(length, longest), 0), length


def same(symbol: int, like: Int[Tensor, " batch"]) -> tuple[Tensor, Tensor]:
    """A part of one symbol, the same in every row."""
    return torch.full_like(like, symbol)[:, None], torch.ones_like(like)
