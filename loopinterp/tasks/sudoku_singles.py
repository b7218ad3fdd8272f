"""Sudoku without guessing: all singles of many puzzles at once, round by round."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from loopinterp.tasks.sudoku_search import units

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor


@cache
def _units(box: int, device: torch.device) -> Float[Tensor, "cell unit"]:
    """1 where a cell is in a unit."""
    within = torch.zeros(box**4, 3 * box**2, dtype=torch.float32)
    for unit, cells in enumerate(units(box)):
        within[list(cells), unit] = 1
    return within.to(device)


def _written(cells: Int[Tensor, "batch cell"], box: int) -> Float[Tensor, "batch digit cell"]:
    """1 where a digit stands."""
    return F.one_hot(cells, box**2 + 1)[..., 1:].transpose(1, 2).float()


def is_solved(cells: Int[Tensor, "batch cell"], box: int) -> Bool[Tensor, " batch"]:
    """Whether every unit has every digit once."""
    return (_written(cells, box) @ _units(box, cells.device) == 1).flatten(1).all(1)


def fill_singles(
    cells: Int[Tensor, "batch cell"], box: int, *, hidden: bool = True
) -> tuple[Int[Tensor, "batch cell"], Int[Tensor, " batch"]]:
    """Fill all singles at once, again and again; how many rounds that took until none was left.

    A naked single is a cell with one candidate, a hidden single the one cell of a unit that has a
    candidate. What is filled holds of every solution there may be.

    Args:
        cells: Digits from 1 on, 0 for a blank.
        box: Rows and columns of a box.
        hidden: Whether hidden singles count too.

    Example:
        >>> cells, rounds = fill_singles(torch.tensor([[1, 2, 3, 0, 3, 4, 0, 0, *[0] * 8]]), 2)
        >>> cells[0, :8].tolist(), rounds.tolist()
        ([1, 2, 3, 4, 3, 4, 0, 0], [1])
    """
    cells, rounds = cells.clone(), torch.zeros_like(cells[:, 0])
    going = torch.arange(len(cells), device=cells.device)
    while len(going):
        digit, new = _singles(cells[going], box, hidden=hidden)
        cells[going] += digit  # 0 where nothing is filled
        going = going[new]
        rounds[going] += 1
    return cells, rounds


def _singles(
    cells: Int[Tensor, "batch cell"], box: int, *, hidden: bool
) -> tuple[Int[Tensor, "batch cell"], Bool[Tensor, " batch"]]:
    """The digits of all singles, 0 elsewhere; and where there are any."""
    within = _units(box, cells.device)
    # [batch, digit, cell]: what a blank may still be, as its units have it not
    seen = (_written(cells, box) @ within) @ within.T
    candidate = (seen == 0) & (cells == 0)[:, None]
    single = candidate & (candidate.sum(1, keepdim=True) == 1)
    if hidden:
        lone = (candidate.float() @ within == 1).float() @ within.T > 0
        single = single | (candidate & lone)
    digit = torch.arange(1, box**2 + 1, device=cells.device)[:, None]
    digits = (single * digit).amax(1)
    return digits, (digits > 0).any(1)
