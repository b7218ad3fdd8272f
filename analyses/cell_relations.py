"""Influence of cells on each other, and relations of the cells of a sudoku or a maze."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from analyses.papers.claims import within
from analyses.reasoner_models import Row, Who
from loopinterp.core.intervals import mean_estimate
from loopinterp.dynamics import jvp
from loopinterp.tasks.maze import WAYS
from loopinterp.tasks.sudoku import peers


def relations(task: str, inputs: Tensor) -> dict[str, Tensor]:
    """Masks [batch, pos, pos] of pairs of cells: the task's constraints, and distance on the grid.

    Of a maze, ``open`` are neighbours with a passage, ``walled`` those without.
    """
    n, n_pos = inputs.shape
    width = int(n_pos**0.5)
    place = torch.arange(n_pos)
    row, column = place // width, place % width
    away = (row[:, None] - row).abs() + (column[:, None] - column).abs()  # [pos, pos]
    one, near = torch.eye(n_pos, dtype=torch.bool), away == 1
    if task == "sudoku":
        peer = torch.zeros(n_pos, n_pos, dtype=torch.bool)
        for cell, others in enumerate(peers(2)):
            peer[cell, list(others)] = True
        masks = {"itself": one, "peer, next to it": peer & near, "peer, farther": peer & ~near,
                 "no peer, next to it": ~peer & near & ~one,
                 "no peer, farther": ~peer & ~near & ~one}  # fmt: skip
        return {name: mask.expand(n, -1, -1) for name, mask in masks.items() if mask.any()}
    leads = torch.zeros(n, n_pos, n_pos, dtype=torch.bool)
    for way, (down, right) in enumerate(WAYS):
        to = (row[:, None] + down == row) & (column[:, None] + right == column)
        leads |= ((inputs >> way & 1) == 1)[..., None] & to
    distance = torch.where(one, 0, torch.where(leads, 1, n_pos)).float()
    for middle in range(n_pos):  # all shortest ways through the maze
        distance = torch.minimum(distance, distance[:, :, middle, None] + distance[:, middle, None])
    return {"itself": distance == 0, "open": distance == 1, "walled": near & (distance > 1),
            "way of 2": distance == 2, "way of 3 or 4": (distance > 2) & (distance < 5) & ~near,
            "way of 5 or more": (distance > 4) & ~near}  # fmt: skip


def shares(who: Who, weight: Tensor, inputs: Tensor, **where: Any) -> Iterator[Row]:
    """Mean weight [batch, to, from] by relation, over that of even weights without the cell itself.

    An interval is over examples.
    """
    masks = relations(who["task"], inputs)
    others = ~masks["itself"]
    even = (weight * others).sum((1, 2)) / others.sum((1, 2))  # [batch]
    for name, mask in masks.items():
        count = mask.sum((1, 2))
        some = count > 0
        mean = (weight * mask).sum((1, 2))[some] / count[some] / even[some]
        yield {**who, **where, "relation": name, **within("times", mean_estimate(mean))}


@torch.no_grad()
def influence(step: Any, h: Tensor, n_draws: int = 8, seed: int = 0) -> Tensor:
    """Squared norms of the blocks ``d h'_i / d h_j``, [batch, i, j], estimated by random tangents.

    ``E |J v|^2`` over v of independent standard normal numbers at position j alone.
    """
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros(*h.shape[:2], h.shape[1])
    for j in range(h.shape[1]):
        for _ in range(n_draws):
            v = torch.zeros_like(h)
            v[:, j] = torch.randn(h[:, j].shape, generator=generator)
            total[:, :, j] += jvp(step, h, v).square().sum(-1) / n_draws
    return total
