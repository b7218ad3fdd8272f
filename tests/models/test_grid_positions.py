"""Positions on a grid against plain Python, and against relative positions on a single row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from loopinterp.errors import ConfigError, InputError
from loopinterp.models import LoopedTransformer
from loopinterp.models.grid_positions import GridBias
from loopinterp.models.positions import RelativeBias, attention_mask
from tests.models.variants import build, some_inputs

CPU = torch.device("cpu")
GRID: dict[str, Any] = {
    "positions": "grid",
    "causal": False,
    "injection": "input",
    "initial_state": "zeros",
}


def on_grid(relative_window: int = 1, **changes: Any) -> LoopedTransformer:
    """A model on grids with weights that matter."""
    model = build("plain", relative_window=relative_window, **GRID, **changes).double()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3, generator=torch.Generator().manual_seed(0))
    return model


def places(n: int) -> tuple[Tensor, Tensor]:
    place = torch.arange(n)
    return place[None, :, None], place[None, None]


@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 3))
def test_the_bias_is_that_of_the_clamped_offset(rows: int, width: int, window: int) -> None:
    bias = GridBias(2, window)
    torch.nn.init.normal_(bias.table)
    full = bias(*places(rows * width), width)[0]
    cells = [(row, column) for row in range(rows) for column in range(width)]
    for q, (row, column) in enumerate(cells):
        for k, (other_row, other_column) in enumerate(cells):
            down = max(-window, min(window, other_row - row)) + window
            right = max(-window, min(window, other_column - column)) + window
            assert torch.equal(full[:, q, k], bias.table[:, down, right])


@given(st.integers(1, 9), st.integers(0, 3))
def test_on_one_row_it_is_the_relative_bias(n: int, window: int) -> None:
    grid, line = GridBias(3, window), RelativeBias(3, window)
    torch.nn.init.normal_(grid.table)
    line.table.data = grid.table.data[:, window]
    assert torch.equal(grid(*places(n), n), line(*places(n)))


@given(st.integers(1, 4), st.none() | st.integers(0, 3), st.none() | st.integers(1, 2))
def test_a_window_is_counted_in_steps_of_a_king(
    width: int, window: int | None, windowed: int | None
) -> None:
    windowed = None if window is None else windowed
    config = on_grid(attention_window=window, windowed_heads=windowed).config
    mask = attention_mask(config, width**2, device=CPU).expand(2, width**2, width**2)
    for head in range(2):
        far = window if window is not None and head < (windowed or 2) else width
        for q in range(width**2):
            for k in range(width**2):
                steps = max(abs(q // width - k // width), abs(q % width - k % width))
                assert mask[head, q, k] == (steps <= far)


@pytest.mark.parametrize("changes", [{}, {"attention_window": 1}, {"n_prelude": 1, "n_coda": 1}])
def test_the_scores_have_bias_and_window_and_all_ways_to_run_agree(changes: dict[str, Any]) -> None:
    model = on_grid(**changes)
    x, site = some_inputs(model, n_pos=16), "loops.1.blocks.0.attn.hook_attn_scores"
    logits, cache = model.run_with_cache(x, n_loops=2)
    torch.testing.assert_close(model(x, n_loops=2), logits)
    bias = model.relative_bias
    assert isinstance(bias, GridBias)
    q, k = (cache[f"loops.1.blocks.0.attn.hook_{name}"] for name in "qk")
    expected = torch.einsum("bqhd,bkhd->bhqk", q, k) / 8**0.5 + bias(*places(16), 4)
    seen = attention_mask(model.config, 16, device=CPU).expand_as(expected)
    torch.testing.assert_close(cache[site][seen], expected[seen])
    assert (cache[site][~seen] == -torch.inf).all()
    logits.square().mean().backward()
    assert bias.table.grad is not None and (bias.table.grad.abs().sum((1, 2)) > 0).all()


def test_within_a_window_a_loop_reaches_one_cell_whatever_the_size_of_the_grid() -> None:
    model = on_grid(attention_window=1)
    for width in (4, 6):
        x = some_inputs(model, batch=1, n_pos=width**2)
        other = x.clone()
        other[0, 0] = (x[0, 0] + 1) % 6
        for n_loops in (1, 2):
            changed = (model(x, n_loops=n_loops) != model(other, n_loops=n_loops)).any(-1)[0]
            # The corner's token enters with the first loop, and moves on with it.
            expected = torch.zeros(width, width, dtype=torch.bool)
            expected[: n_loops + 1, : n_loops + 1] = True
            assert torch.equal(changed.view(width, width), expected)
    assert model.reach is None and not model.local_step


def test_it_survives_saving(tmp_path) -> None:
    model = on_grid(attention_window=1)
    model.save_pretrained(tmp_path / "model")
    again = LoopedTransformer.from_pretrained(tmp_path / "model")
    x = some_inputs(model, n_pos=9)
    assert torch.equal(again(x, n_loops=2), model(x, n_loops=2))


def test_what_is_no_square_grid_and_what_is_causal_are_refused() -> None:
    model = on_grid()
    with pytest.raises(InputError, match=r"a square number with positions='grid'.* got 7"):
        model(some_inputs(model, n_pos=7))
    with pytest.raises(ConfigError, match="causal: expected false with positions='grid'"):
        model.config.replace(causal=True)
    with pytest.raises(ConfigError, match="Set relative_window"):
        model.config.replace(relative_window=None)
