"""Sequences of different lengths in one tensor: putting parts one after another, and cutting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from loopinterp.tasks.sampling import inside

if TYPE_CHECKING:
    from jaxtyping import Int
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
    first, _ = parts[0]
    out = first.new_full((len(first), width + 1), fill)
    start = torch.zeros_like(parts[0][1])
    for values, length in parts:
        column = torch.arange(values.shape[1], device=values.device)
        # What does not count goes to one more column, which is dropped.
        at = torch.where(column < length[:, None], start[:, None] + column, width)
        out.scatter_(1, at, values)
        start = start + length
    return out[:, :width]


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


def same(symbol: int, like: Int[Tensor, " batch"]) -> tuple[Tensor, Tensor]:
    """A part of one symbol, the same in every row."""
    return torch.full_like(like, symbol)[:, None], torch.ones_like(like)
