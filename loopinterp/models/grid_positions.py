"""Positions on a square grid that is written row by row: where two cells stand to each other."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import nn

from loopinterp.errors import InputError

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor


def grid_width(n_pos: int) -> int:
    """Columns of the square grid that so many positions make.

    Raises:
        InputError: they make none.

    Example:
        >>> grid_width(25)
        5
    """
    width = math.isqrt(n_pos)
    if width**2 != n_pos:
        raise InputError(
            "sequence length",
            expected="a square number with positions='grid', a square grid row by row",
            given=str(n_pos),
            fix="Pass whole grids, such as those of sudoku, maze and chess_puzzles.",
        )
    return width


def grid_offsets(
    query: Int[Tensor, "#block query 1"], key: Int[Tensor, "#block 1 key"], width: int
) -> tuple[Int[Tensor, "block query key"], Int[Tensor, "block query key"]]:
    """Rows down and columns right from query to key, on a grid of so many columns.

    Example:
        >>> down, right = grid_offsets(torch.tensor([[[1]]]), torch.tensor([[[3, 8]]]), 3)
        >>> down.tolist(), right.tolist()
        ([[[1, 2]]], [[[-1, 1]]])
    """
    return key // width - query // width, key % width - query % width


class GridBias(nn.Module):
    r"""A learned bias per head and offset on the grid, each of its two parts clamped.

    .. math::
        b_h(q, k) = B_h[\operatorname{clamp}(r_k - r_q, -w, w),
                        \operatorname{clamp}(c_k - c_q, -w, w)]

    of cells in rows r and columns c. On a grid of one row it is the bias of ``relative``. It does
    not depend on the size of the grid, so that a model runs on others than it was trained on.
    """

    def __init__(self, n_heads: int, window: int) -> None:
        super().__init__()
        self.window = window
        self.table = nn.Parameter(torch.empty(n_heads, 2 * window + 1, 2 * window + 1))

    def forward(
        self, query: Int[Tensor, "#block query 1"], key: Int[Tensor, "#block 1 key"], width: int
    ) -> Float[Tensor, "block head query key"]:
        """The bias of each head between cells ``q`` and ``k`` of a grid of so many columns."""
        w = self.window
        down, right = (x.clamp(-w, w) + w for x in grid_offsets(query, key, width))
        return self.table[:, down, right].transpose(0, 1)
