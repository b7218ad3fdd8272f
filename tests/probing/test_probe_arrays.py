"""A broadcast grid laid out flat, and back."""

from __future__ import annotations

import itertools

import pytest
import torch

from loopinterp.probing.probe_arrays import Problem, chunks


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize(
    ("x_grid", "y_grid", "weight_grid"),
    [
        ((), (), ()),
        ((4,), (), ()),
        ((4,), (3, 1), ()),
        ((4, 1), (1, 3), ()),
        ((1, 4, 1), (2, 1, 3), (4, 1)),
        ((4,), (3, 4), (3, 1)),
        ((2, 1, 1), (1, 3, 5), (2, 3, 1)),
    ],
)
def test_each_cell_gets_its_own_x_y_and_weight(
    share: bool, x_grid: tuple[int, ...], y_grid: tuple[int, ...], weight_grid: tuple[int, ...]
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(*x_grid, 7, 2, generator=generator)
    y = torch.randint(50, (*y_grid, 7), generator=generator)
    weight = torch.rand(*weight_grid, 7, generator=generator)
    layout = Problem(x, y, weight, None, lambda v: v).layout(share)
    grid = torch.broadcast_shapes(x_grid, y_grid, weight_grid)
    assert layout.grid == grid
    # A "solution" that shows what each cell and label was solved from.
    cell_x, cell_y, cell_weight = layout.cells(slice(None))
    seen_x = cell_x[:, None].expand(-1, cell_y.shape[-1], -1, -1)
    seen_y = cell_y.mT
    seen_w = cell_weight[:, None].expand_as(seen_y)
    assert torch.equal(layout.unfold(seen_x), x.expand(*grid, 7, 2))
    assert torch.equal(layout.unfold(seen_y), y.expand(*grid, 7))
    assert torch.equal(layout.unfold(seen_w), weight.expand(*grid, 7))
    only_y = [
        a
        for a in range(len(grid))
        if grid[a] > 1
        and all(
            dict(zip(range(-len(g), 0), g)).get(a - len(grid), 1) == 1
            for g in (x_grid, weight_grid)
        )
    ]
    assert list(layout.label_axes) == (only_y if share else [])


def test_chunks_cover_every_cell_once_and_never_none() -> None:
    for n, size in itertools.product((1, 5, 8), (1, 2**27, 2**40)):
        parts = list(chunks(n, bytes_per_cell=size))
        assert [i for p in parts for i in range(n)[p]] == list(range(n))
    assert len(list(chunks(5, bytes_per_cell=2**40))) == 5
