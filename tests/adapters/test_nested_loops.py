"""A slow cycle as a loop, fast cycles as layers of its block, and a state of two parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from loopinterp.adapters import NestedModel, adapt
from loopinterp.interventions import patching_sweep
from tests.adapters.published import hrm, hrm_text, trm
from tests.refusals import naming

LOOPS, FAST = 3, 2
BUILT: dict[str, Any] = {
    "hrm": hrm.tiny(L_cycles=FAST, L_layers=2),
    "trm": trm.tiny(L_cycles=FAST),
    "hrm_text": hrm_text.tiny(L_cycles=FAST),
}
FAST_STACK = {"hrm": "inner.L_level", "trm": "inner.L_level", "hrm_text": "model.L_module"}
NATIVE: dict[str, Any] = {"hrm": hrm, "trm": trm, "hrm_text": hrm_text}
every = pytest.mark.parametrize("name", list(BUILT))


def _tokens() -> Tensor:
    return torch.randint(64, (2, 6), generator=torch.Generator().manual_seed(1))


def _close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool((a - b).abs().max() <= 1e-5)


def _model(name: str) -> NestedModel:
    model = adapt(BUILT[name])
    assert isinstance(model, NestedModel)
    return model


@every
@pytest.mark.parametrize(("loop", "cycle"), [(0, 0), (0, 1), (2, 0)])
def test_a_change_after_one_fast_cycle_is_that_of_the_native_forward_there(
    name: str, loop: int, cycle: int
) -> None:
    published, tokens, model = BUILT[name], _tokens(), _model(name)
    stack, calls = published.get_submodule(FAST_STACK[name]), 0
    per_loop = FAST + (name == "trm")  # whose one stack makes the slow step too
    change = torch.linspace(-1, 1, 32)

    def edit(module: Any, inputs: Any, output: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return output + change if calls - 1 == loop * per_loop + cycle else output

    handle = stack.register_forward_hook(edit)
    try:
        expected = NATIVE[name].native(published, tokens, LOOPS)
    finally:
        handle.remove()
    assert calls == LOOPS * per_loop
    # A norm without weights ends HRM-Text's stacks: its output is the cycle's.
    end = "ln_cycle.hook_normalized" if name == "hrm_text" else "hook_resid_post"
    site = f"loops.{loop}.inner.{cycle}.blocks.1.{end}"
    hooks = [(site, lambda x, hook: x + change)]
    result = model.run_with_hooks(tokens, n_loops=LOOPS, fwd_hooks=hooks)
    assert _close(result, expected)
    assert not _close(result, model(tokens, n_loops=LOOPS))
    _, clean = model.run_with_cache(tokens, n_loops=LOOPS)
    with model.hooks(hooks, n_loops=LOOPS):
        _, cache = model.run_with_cache(tokens, n_loops=LOOPS)
    first = list(cache).index(model.addresses(LOOPS).resolve_name(site))
    assert all(torch.equal(cache[k], clean[k]) for k in list(cache)[: first - 1])
    assert not any(
        _close(cache[k], clean[k]) for k in list(cache)[first:] if "hook_injection" not in k
    )


@every
def test_names_of_fast_cycles_are_names_of_layers(name: str) -> None:
    model = _model(name)
    n_layers = [2] * FAST + [2]
    flat = 0
    for cycle, n in enumerate(n_layers):
        for layer in range(n):
            alias = f"loops.1.inner.{cycle}.blocks.{layer}.hook_resid_pre"
            number = model.site_map.n_layers + flat
            assert model.addresses(2).resolve_name(alias) == f"blocks.{number}.hook_resid_pre"
            flat += 1
    assert flat == model.site_map.n_layers


@every
def test_the_parts_of_a_state_lie_side_by_side(name: str) -> None:
    model, tokens = _model(name), _tokens()
    _, cache = model.run_with_cache(tokens, n_loops=2)
    state = cache["loops.1.hook_state_post"]
    assert state.shape == (2, 6, 64)
    assert torch.equal(model.part(state, "z_H"), cache["loops.1.hook_z_H"])
    assert torch.equal(model.part(state, "z_L"), cache["loops.1.hook_z_L"])
    assert torch.equal(state[..., model.site_map.state_parts["z_L"]], cache["loops.1.hook_z_L"])
    with naming("part of the state"):
        model.part(state, "z_h")


@every
def test_logits_are_read_from_the_slow_part_alone(name: str) -> None:
    model, tokens = _model(name), _tokens()
    state = model(tokens, n_loops=2, return_type="state")
    other = state.clone()
    other[..., model.site_map.state_parts["z_L"]] += 1
    assert torch.equal(model.readout(state), model.readout(other))
    # but the next loop hears of it
    goes_on = {"n_loops": 3, "start_at_loop": 2}
    assert not _close(model(tokens, state=state, **goes_on), model(tokens, state=other, **goes_on))


@every
def test_one_part_of_a_state_can_be_patched(name: str) -> None:
    model, tokens = _model(name), _tokens()
    swept = {
        part: patching_sweep(model, tokens, tokens.roll(1, 0), component=part, n_loops=3).data
        for part in ("hook_state_post", "hook_z_H", "hook_z_L")
    }
    effect = {part: data["effect"].squeeze().values for part, data in swept.items()}
    # At the end only the slow part is read; before it, neither part is the whole state.
    assert effect["hook_z_H"][-1] == pytest.approx(effect["hook_state_post"][-1], rel=1e-5)
    assert effect["hook_z_L"][-1] == 0
    for part in ("hook_z_H", "hook_z_L"):
        assert effect[part][0] != 0
        assert abs(effect[part][0] - effect["hook_state_post"][0]) > 1e-4


def test_gradients_go_through_fast_cycles_where_the_native_forward_has_none() -> None:
    published, model, tokens = BUILT["hrm"], _model("hrm"), _tokens()
    _, cache = model.run_with_cache(
        tokens,
        n_loops=2,
        names_filter="hook_embed",
        incl_bwd=True,
        loss_fn=lambda logits: logits.square().mean(),
    )
    weight = published.inner.embed_tokens.embedding_weight
    native = torch.autograd.grad(hrm.native(published, tokens, 2).square().mean(), weight)[0]
    ours = torch.autograd.grad(model(tokens, n_loops=2).square().mean(), weight)[0]
    assert cache["hook_embed_grad"].abs().sum() > 0
    assert (ours - native).norm() > 0.1 * native.norm()  # the early cycles' share
    with torch.no_grad():  # and ours is the slope
        step, way = 1e-2, torch.randn(weight.shape, generator=torch.Generator().manual_seed(2))
        losses = []
        for sign in (1, -1):
            weight += sign * step * way
            losses.append(model(tokens, n_loops=2).double().square().mean())
            weight -= sign * step * way
    slope = float((losses[0] - losses[1]) / (2 * step))
    assert float((ours * way).sum()) == pytest.approx(slope, rel=0.02)


@settings(max_examples=8)
@given(
    fast=st.integers(1, 3),
    slow_layers=st.integers(1, 2),
    fast_layers=st.integers(1, 2),
    heads=st.sampled_from([1, 4]),
    n_loops=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_any_nesting_is_the_native_forwards(
    fast: int, slow_layers: int, fast_layers: int, heads: int, n_loops: int, seed: int
) -> None:
    published = hrm.tiny(
        seed,
        L_cycles=fast,
        H_layers=slow_layers,
        L_layers=fast_layers,
        num_heads=heads,
        hidden_size=16,
    )
    model, tokens = adapt(published), _tokens()
    assert model.site_map.n_layers == fast * fast_layers + slow_layers
    assert _close(model(tokens, n_loops=n_loops), hrm.native(published, tokens, n_loops))
