"""Attention block by block equals attention under the whole mask, and costs what a window does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from loopinterp.models import LoopedTransformer
from loopinterp.models.positions import attention_context
from tests.models.variants import build, some_inputs

N_POS = 170


VARIANTS = ["plain", "demo", "fire", "sandwich rotary", "abacus on q and k"]


def model_with(name: str, window: int) -> LoopedTransformer:
    changes = {"n_ctx": N_POS + 1} if "abacus" in name else {}
    model = build(name, attention_window=window, **changes).double()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return model


def full_run(model: LoopedTransformer, inputs: Tensor, n_loops: int) -> Tensor:
    """The run in which somebody looks at the patterns, all pairs of positions."""
    return model.run_with_cache(inputs, n_loops=n_loops, names_filter="pattern")[0]


@pytest.mark.parametrize("window", [0, 1, 2, 3, 17])  # narrow ones go distance by distance
@pytest.mark.parametrize("name", VARIANTS)
def test_equals_attention_under_the_whole_mask(name: str, window: int) -> None:
    model = model_with(name, window)
    inputs = some_inputs(model, batch=2, n_pos=N_POS)
    context = model.input_context(inputs, 0)
    assert context.window == window
    ours, expected = model(inputs, n_loops=3), full_run(model, inputs, 3)
    torch.testing.assert_close(ours, expected, atol=1e-11, rtol=1e-11)
    single = model.float()
    torch.testing.assert_close(
        single(inputs, n_loops=1), full_run(single, inputs, 1), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("name", VARIANTS)
def test_gradients_are_the_same(name: str) -> None:
    model = model_with(name, 3)
    inputs = some_inputs(model, batch=2, n_pos=N_POS)
    gradients = [
        torch.autograd.grad(out.square().mean(), list(model.parameters()), allow_unused=True)
        for out in (model(inputs, n_loops=2), full_run(model, inputs, 2))
    ]
    for ours, expected in zip(*gradients):
        torch.testing.assert_close(ours, expected, atol=1e-11, rtol=1e-8)


@pytest.mark.parametrize("n_pos", [69, 80, 81, 95, 96, 97])
def test_lengths_that_do_not_fill_their_blocks(n_pos: int) -> None:
    model = model_with("demo", 1)
    inputs = some_inputs(model, batch=1, n_pos=n_pos)
    assert model.input_context(inputs, 0).window == 1
    torch.testing.assert_close(
        model(inputs, n_loops=2), full_run(model, inputs, 2), atol=1e-11, rtol=1e-11
    )


def test_the_mask_grows_with_the_length_and_not_with_its_square() -> None:
    def size(n_pos: int, window: int) -> int:
        config = build("demo").config.replace(attention_window=window)
        context = attention_context(
            config, n_pos, bias=None, device=torch.device("cpu"), dtype=torch.float32
        )
        assert context.mask is not None
        return context.mask.numel()

    assert size(100_000, 1) == 100_000 * 2  # distance by distance
    assert size(100_000, 3) == 100_000 * 19  # by blocks of 16 queries
    assert size(16, 1) == 16**2  # a short input takes the one fused operation


@pytest.mark.parametrize("changes", [{"causal": False}, {"attention_window": None}])
def test_only_a_hard_causal_window_goes_block_by_block(changes: dict[str, Any]) -> None:
    model = build("demo", **changes)
    assert model.input_context(some_inputs(model, n_pos=N_POS), 0).window is None


def test_a_hook_on_scores_sees_all_pairs_and_one_elsewhere_needs_none() -> None:
    model = model_with("demo", 1)
    inputs = some_inputs(model, batch=1, n_pos=N_POS)
    _, cache = model.run_with_cache(inputs, n_loops=2)
    assert cache.stack("pattern").shape == (2, 1, 2, N_POS, N_POS)
    expected = cache.stack("z")
    _, cache = model.run_with_cache(inputs, n_loops=2, names_filter="z")
    torch.testing.assert_close(cache.stack("z"), expected, atol=1e-11, rtol=1e-11)
