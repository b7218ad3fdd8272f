"""Mazes as passages between cells: growing them, measuring them, filling their dead ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from jaxtyping import Bool, Int
    from torch import Tensor

WAYS = ((-1, 0), (0, 1), (1, 0), (0, -1))
"""Up, right, down, left: rows down and columns right."""


def next_to(marks: Bool[Tensor, "batch row column"]) -> Bool[Tensor, "batch 4 row column"]:
    """Whether the neighbour in each way is marked; borders are open, and joined to the other side.

    Example:
        >>> next_to(torch.tensor([[[True, False, False]]]))[0, :, 0].int().tolist()
        [[1, 0, 0], [0, 0, 1], [1, 0, 0], [0, 1, 0]]
    """
    return torch.stack([marks.roll((-down, -right), (1, 2)) for down, right in WAYS], 1)


def grow(
    n: Int[Tensor, " batch"], generator: torch.Generator
) -> Bool[Tensor, "batch 4 row column"]:
    """Passages of random mazes of ``n x n`` cells: a random walk that goes back from dead ends.

    Each is a tree, so that one path leads from any cell to any other. A smaller maze lies in the
    upper left corner.
    """
    width, rows, device = int(n.max()), torch.arange(len(n), device=n.device), n.device
    step = torch.tensor([down * width + right for down, right in WAYS], device=device)
    line = torch.arange(width, device=device)
    stays = {by: (line + by >= 0) & (line + by < width) for by in (-1, 0, 1)}
    # [cell, way]: whether the way stays inside
    inside = torch.stack([stays[down][:, None] & stays[right] for down, right in WAYS], 2)
    inside = inside.flatten(0, 1)
    small = line < n[:, None]
    visited = ~(small[:, :, None] & small[:, None]).flatten(1)
    passages = torch.zeros((len(n), width**2, 4), dtype=torch.bool, device=device)
    start = torch.rand((2, len(n)), generator=generator, device=device, dtype=torch.float32) * n
    here = start.long()[0] * width + start.long()[1]
    visited[rows, here] = True
    stack, depth = torch.zeros((len(n), width**2), dtype=torch.long, device=device), here * 0
    # Each cell but the first is entered once, and left once for good.
    for _ in range(2 * (width**2 - 1)):
        there = here[:, None] + step
        free = inside[here] & ~visited.gather(1, there.clamp(0, width**2 - 1))
        luck = torch.rand(free.shape, generator=generator, device=device, dtype=torch.float32)
        way = luck.masked_fill(~free, -1).argmax(1)
        goes = free.any(1)
        there = there[rows, way]
        on = rows[goes]
        passages[on, here[on], way[on]] = True
        passages[on, there[on], (way[on] + 2) % 4] = True
        visited[on, there[on]] = True
        stack[rows, depth] = here
        back = stack[rows, (depth - 1).clamp(min=0)]
        depth = torch.where(goes, depth + 1, depth - 1).clamp(min=0)
        here = torch.where(goes, there, back)
    return passages.view(len(n), width, width, 4).permute(0, 3, 1, 2).contiguous()


def fill_dead_ends(
    passages: Bool[Tensor, "batch 4 row column"], keep: Bool[Tensor, "batch row column"]
) -> tuple[Bool[Tensor, "batch row column"], Int[Tensor, " batch"]]:
    """Fill all dead ends at once, again and again: what is left, and how many rounds that took.

    A dead end is a cell with at most one passage to a cell that is not filled.

    Args:
        passages: Of each cell up, right, down and left.
        keep: Cells that are never filled.

    Example:
        >>> across = torch.zeros(1, 4, 1, 3, dtype=torch.bool)
        >>> across[0, 1, 0, :2] = across[0, 3, 0, 1:] = True
        >>> left, rounds = fill_dead_ends(across, torch.tensor([[[True, False, False]]]))
        >>> left.tolist(), rounds.tolist()
        ([[[True, False, False]]], [2])
    """
    left = passages.any(1) | keep
    rounds = torch.zeros_like(left[:, 0, 0], dtype=torch.long)
    while True:
        dead = left & ~keep & ((passages & next_to(left)).sum(1) <= 1)
        if not bool(dead.any()):
            return left, rounds
        left, rounds = left & ~dead, rounds + dead.flatten(1).any(1)


def farthest(
    passages: Bool[Tensor, "batch 4 row column"], start: Bool[Tensor, "batch row column"]
) -> Bool[Tensor, "batch row column"]:
    """One of the cells that are the most steps away from the start."""
    seen = last = start
    while bool(last.any()):
        new = (passages & next_to(last)).any(1) & ~seen
        # Where there is no more, the last ones stay.
        more = new.flatten(1).any(1)[:, None, None]
        start, seen, last = torch.where(more, new, start), seen | new, new
    return one_of(start)


def one_of(cells: Bool[Tensor, "batch row column"]) -> Bool[Tensor, "batch row column"]:
    """The first cell of those."""
    flat = cells.flatten(1)
    return (flat & (flat.cumsum(1) == 1)).view_as(cells)
