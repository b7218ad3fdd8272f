"""Masks, biases, rotations and abacus positions against plain Python."""

from __future__ import annotations

import cmath
import math
import operator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from loopinterp.core.errors import ConfigError
from loopinterp.models import LoopedTransformer
from loopinterp.models.positions import (
    AttentionContext,
    FireBias,
    GridBias,
    RelativeBias,
    _rotary_tables,
    abacus_positions,
    attention_mask,
    check_length,
    rotate,
)
from tests.models.variants import build, some_inputs
from tests.refusals import naming

CPU = torch.device("cpu")


@given(
    st.integers(1, 9),
    st.booleans(),
    st.none() | st.integers(0, 4),
    st.none() | st.integers(1, 3),
)
def test_mask_is_causality_and_the_window_of_each_head(
    n_pos: int, causal: bool, window: int | None, windowed: int | None
) -> None:
    windowed = None if window is None else windowed
    settings = {"causal": causal, "attention_window": window, "windowed_heads": windowed}
    config = build("plain", n_heads=3, d_head=2, **settings).config
    mask = attention_mask(config, n_pos, device=CPU).expand(3, n_pos, n_pos)
    for head in range(3):
        far = window if window is not None and head < (windowed or 3) else n_pos
        for query in range(n_pos):
            for key in range(n_pos):
                allowed = (key <= query or not causal) and abs(query - key) <= far
                assert mask[head, query, key] == allowed


POSITIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "absolute": {"n_ctx": 90},
    "relative": {"relative_window": 2},
    "abacus": {"n_ctx": 90, "digit_tokens": (1, 2, 3), "abacus_target": "qk"},
    "rotary": {},
    "fire": {"fire_threshold": 8.0},
}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", POSITIONS)
def test_the_first_heads_keep_to_the_window_and_the_others_do_not(kind: str, causal: bool) -> None:
    settings = {"positions": kind, **POSITIONS[kind], "causal": causal, "n_layers": 2}
    model = build("plain", attention_window=1, windowed_heads=1, **settings).double()
    free = LoopedTransformer(model.config.replace(attention_window=None, windowed_heads=None))
    free.double().load_state_dict(model.state_dict())
    for weight in free.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    model.load_state_dict(free.state_dict())
    x = some_inputs(model, n_pos=80)  # long enough that a window of all heads goes in blocks
    far = (torch.arange(80)[:, None] - torch.arange(80)).abs() > 1

    def barred(scores: Tensor, hook: object) -> Tensor:
        scores = scores.clone()
        scores[:, 0, far] = -torch.inf
        return scores

    hooks = [(name, barred) for name in free.site("attn.hook_attn_scores", n_loops=3)]
    expected = free.run_with_hooks(x, n_loops=3, fwd_hooks=hooks)
    torch.testing.assert_close(model(x, n_loops=3), expected)
    logits, cache = model.run_with_cache(x, n_loops=3)
    torch.testing.assert_close(logits, expected)
    patterns = cache.stack("attn.hook_pattern", layer=slice(None))  # [loop, layer, batch, head, …]
    assert (patterns[:, :, :, 0, far] == 0).all()
    seen = far.tril() if causal else far
    assert (patterns[:, :, :, 1, seen] > 0).all()
    assert not torch.allclose(expected, free(x, n_loops=3))


def test_a_window_of_the_loop_alone_leaves_the_layers_around_it_free() -> None:
    some = build("window in the loop only", n_layers=2)
    free = LoopedTransformer(some.config.without_window())
    all_windowed = LoopedTransformer(some.config.replace(windowed_surround=True))
    for weight in some.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    for other in (free, all_windowed):
        other.load_state_dict(some.state_dict())
    x = some_inputs(some, n_pos=80)  # long enough that the window goes in blocks
    e = free.embed(x)
    torch.testing.assert_close(some.embed(x), e)
    assert not torch.allclose(all_windowed.embed(x), e)
    h = torch.randn(e.shape, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(some.step(h, e), all_windowed.step(h, e))
    assert not torch.allclose(some.step(h, e), free.step(h, e))
    torch.testing.assert_close(some.readout(h), free.readout(h))


def test_all_heads_windowed_is_the_window_of_old() -> None:
    some, none = (build("plain", attention_window=1, windowed_heads=n) for n in (2, None))
    x = some_inputs(some, n_pos=80)
    assert some.input_context(x, 0).window == none.input_context(x, 0).window == 1
    assert torch.equal(some(x, n_loops=3), none(x, n_loops=3))
    assert build("plain", attention_window=1, windowed_heads=1).input_context(x, 0).window is None


def test_relative_bias_is_clamped() -> None:
    bias = RelativeBias(2, 2)
    torch.nn.init.normal_(bias.table)
    place = torch.arange(6)
    full = bias(place[None, :, None], place[None, None])[0]
    for query in range(6):
        for key in range(6):
            index = max(-2, min(2, key - query)) + 2
            assert torch.equal(full[:, query, key], bias.table[:, index])


@given(
    st.integers(1, 9),
    st.floats(0.01, 50),
    st.floats(0.5, 20),
    st.integers(0, 2**32),
)
def test_fire_is_an_mlp_of_the_share_of_the_distance(
    n_pos: int, c: float, threshold: float, seed: int
) -> None:
    torch.manual_seed(seed)
    bias = FireBias(3, threshold).double()
    torch.nn.init.constant_(bias.log_c, math.log(c))
    place = torch.arange(n_pos)
    values = bias(place[None, :, None], place[None, None])
    assert values.shape == (1, 3, n_pos, n_pos)
    weights = {name: x.tolist() for name, x in bias.mlp.state_dict().items()}
    threshold = math.exp(bias.log_threshold.item())
    for query in range(n_pos):
        for key in range(n_pos):
            far, end = (math.log(c * x + 1) for x in (abs(query - key), max(query, threshold)))
            hidden = [
                max(0.0, w * far / end + b)
                for (w,), b in zip(weights["0.weight"], weights["0.bias"])
            ]
            for head in range(3):
                products = map(operator.mul, weights["2.weight"][head], hidden)
                expected = sum(products) + weights["2.bias"][head]
                assert values[0, head, query, key].item() == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("settings", [{}, {"attention_window": 3}, {"causal": False}])
def test_fire_is_added_to_the_scores_and_learns(settings: dict[str, Any]) -> None:
    model = build("plain", positions="fire", fire_threshold=4.0, **settings).double()
    bias = model.relative_bias
    assert isinstance(bias, FireBias)
    x, site = some_inputs(model, n_pos=40), "loops.1.blocks.0.attn.hook_attn_scores"
    logits, cache = model.run_with_cache(x, n_loops=2)
    torch.testing.assert_close(model(x, n_loops=2), logits)
    q, k = (cache[f"loops.1.blocks.0.attn.hook_{name}"] for name in "qk")
    place = torch.arange(40)
    expected = torch.einsum("bqhd,bkhd->bhqk", q, k) / 8**0.5
    expected = expected + bias(place[None, :, None], place[None, None])
    seen = cache[site].isfinite()
    torch.testing.assert_close(cache[site][seen], expected[seen])
    logits.square().mean().backward()
    for name, weight in bias.named_parameters():
        assert weight.grad is not None and weight.grad.abs().sum() > 0, name


def test_fire_in_half_precision_tells_far_places_apart() -> None:
    bias = FireBias(1, 8.0)
    query, key = torch.tensor([[[1000]]]), torch.arange(990, 1001)[None, None]
    exact, half = bias(query, key), bias.bfloat16()(query, key)
    torch.testing.assert_close(half.float(), exact, atol=2e-2, rtol=0)


@pytest.mark.parametrize("causal", [True, False])
def test_without_a_window_scores_have_the_bias_at_every_distance(causal: bool) -> None:
    model = build("plain", positions="relative", relative_window=2, causal=causal)
    assert isinstance(model.relative_bias, RelativeBias)
    x, site = some_inputs(model), "loops.0.blocks.0.attn.hook_attn_scores"
    with torch.no_grad():
        model.relative_bias.table.normal_(generator=torch.Generator().manual_seed(0))
        logits, cache = model.run_with_cache(x)
        torch.testing.assert_close(model(x), logits)
        table = model.relative_bias.table.clone()
        model.relative_bias.table.zero_()
        without = model.run_with_cache(x)[1][site]
    for query in range(7):
        for key in range(query + 1 if causal else 7):
            bias = table[:, max(-2, min(2, key - query)) + 2]
            added = cache[site][..., query, key] - without[..., query, key]
            torch.testing.assert_close(added, bias.expand(3, -1), atol=1e-5, rtol=0)
        assert (cache[site][..., query, query + 1 :] == -torch.inf).all() or not causal


def test_rotation_turns_pairs_like_complex_numbers() -> None:
    x = torch.randn(1, 1, 5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rotated = rotate(x, _rotary_tables(5, 4, 100.0, CPU, torch.float64))
    for pos in range(5):
        for pair, frequency in enumerate([1.0, 100.0**-0.5]):
            z = complex(*x[0, 0, pos, 2 * pair : 2 * pair + 2].tolist())
            expected = z * cmath.exp(1j * pos * frequency)
            got = rotated[0, 0, pos, 2 * pair : 2 * pair + 2]
            assert got.tolist() == pytest.approx([expected.real, expected.imag], abs=1e-6)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=20), st.integers(0, 7))
def test_abacus_counts_digits_within_their_number(tokens: list[int], offset: int) -> None:
    expected, run = [], 0
    for token in tokens:
        run = run + 1 if token in (1, 2, 3) else 0
        expected.append(run + offset if run else 0)
    got = abacus_positions(torch.tensor([tokens]), (1, 2, 3), offset)
    assert got[0].tolist() == expected
    # With signs, a number's first digit comes after the place of the sign before it.
    got = abacus_positions(torch.tensor([tokens]), (1, 2, 3), offset, signs=True)
    assert got[0].tolist() == [at or offset for at in expected]


@settings(max_examples=40)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=20), st.integers(0, 4))
def test_digits_are_seen_within_the_abacus_window(tokens: list[int], window: int) -> None:
    settings = {"positions": "abacus", "n_ctx": 30, "digit_tokens": (1, 2, 3)}
    model = build("plain", d_vocab=6, **settings, abacus_window=window)
    free = build("plain", d_vocab=6, **settings)
    inputs = torch.tensor([tokens])
    place = abacus_positions(inputs, (1, 2, 3))[0].tolist()
    _, cache = model.run_with_cache(inputs, n_loops=1)
    seen = cache["blocks.0.attn.hook_pattern"][0].gt(0).all(0)
    for query, p in enumerate(place):
        for key, q in enumerate(place):
            far = q > 0 and abs(p - q) > window
            assert bool(seen[query, key]) == (key <= query and not far)
    # Numbers that fit into the window are read as without one.
    if max(place) <= window:
        torch.testing.assert_close(model(inputs, n_loops=2), free(inputs, n_loops=2))


def test_tables_that_are_too_short_are_refused() -> None:
    check_length(8, 8, "sequence length")
    with naming("sequence length") as caught:
        check_length(9, 8, "sequence length")
    assert "n_ctx=8" in caught.value.expected and caught.value.given == "9"


def test_selecting_examples_keeps_their_own_offsets() -> None:
    offsets = torch.arange(6.0).view(3, 1, 1, 2)
    rows = torch.tensor([2, 0])
    selected = AttentionContext(qk_offset=offsets).select(rows)
    assert selected.qk_offset is not None
    assert torch.equal(selected.qk_offset, offsets[rows])
    plain = AttentionContext(is_causal=True)
    assert plain.select(rows) is plain


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
    with naming("sequence length") as caught:
        model(some_inputs(model, n_pos=7))
    assert caught.value.given == "7"
    with pytest.raises(ConfigError, match=r"^causal:"):
        model.config.replace(causal=True)
    with pytest.raises(ConfigError, match=r"^relative_window:"):
        model.config.replace(relative_window=None)


@pytest.mark.parametrize("target", ["attention", "qk"])
def test_positions_enter_queries_and_keys_alone(target: Any) -> None:
    """Before their projections or after; in the second case next and previous score alike."""
    settings = {"positions": "abacus", "n_ctx": 30, "digit_tokens": (1, 2, 3), "n_heads": 2}
    model = build("plain", abacus_target=target, injection="sublayer", **settings).double()
    assert model.position_embedding is not None
    tokens = torch.tensor([[1, 2, 3, 1, 2, 3]])  # one number: positions 1 to 6
    with torch.no_grad():
        _, cache = model.run_with_cache(tokens, n_loops=1)
        embedding = model.position_embedding(torch.arange(1, 7)).clone()
        model.position_embedding.weight.zero_()
        _, without = model.run_with_cache(tokens, n_loops=1)
    added = {name: (cache[name, 0, 0] - without[name, 0, 0])[0] for name in "qkv"}  # [pos head d]
    attention: Any = model.block[0].attn
    for name in "qk":
        expected = embedding.unflatten(-1, (2, -1))
        if target == "attention":
            weight = getattr(attention, f"W_{name.upper()}")
            expected = torch.einsum("pm,hmd->phd", embedding, weight)
        torch.testing.assert_close(added[name], expected)
    assert not added["v"].any()
    scores = torch.einsum("phd,khd->hpk", added["q"], added["k"])
    assert torch.allclose(scores, scores.mT) == (target == "qk")
