from __future__ import annotations

import itertools

import pytest
import torch

from loopinterp.errors import HookError, InputError
from loopinterp.lenses.lens_places import (
    end_by_hook,
    layer_hooks,
    live_places,
    places,
    readout_without_coda,
)
from loopinterp.models import iterate
from tests.lenses.lens_toys import KINDS, Affine, inputs, tokens, transformer


@pytest.mark.parametrize("kind", KINDS)
def test_places_are_those_of_one_whole_run(kind: str) -> None:
    model, x = transformer(kind), tokens()
    _, cache = model.run_with_cache(x, n_loops=3)
    states = dict(iterate(model, x, 3))
    found = list(places(model, x, 3, inside=True))
    layers = model.config.n_layers
    wanted = [(0, None), *((t, k) for t in (1, 2, 3) for k in (*range(layers), None))]
    assert [(p.loop, p.layer) for p in found] == wanted
    for place in found:
        if place.layer is None:
            expected = states[place.loop]
        else:
            expected = cache[f"loops.{place.loop - 1}.blocks.{place.layer}.hook_resid_post"]
        torch.testing.assert_close(place.residual, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_that_ends_at_its_last_layer_leaves_its_state(kind: str) -> None:
    found = list(places(transformer(kind), tokens(), 2, inside=True))
    for before, state in itertools.pairwise(found):
        if state.layer is None:
            torch.testing.assert_close(before.ended, state.residual, atol=1e-5, rtol=0)
            assert torch.equal(state.ended, state.residual)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_loop_leaves_is_what_a_hook_at_its_last_layer_says(kind: str) -> None:
    model, x = transformer(kind, n_layers=3), tokens()
    found = list(places(model, x, 2, inside=True))
    states = [place.residual for place in found if place.layer is None]
    for place in found:
        if place.layer in (0, 1):
            loop = place.loop - 1
            span = {"n_loops": 2, "start_at_loop": loop, "stop_at_loop": loop + 1}
            last = layer_hooks(model, loop, 2)[-1]
            left = end_by_hook(model, x, place.residual, last, {**span, "state": states[loop]})
            torch.testing.assert_close(place.ended, left, atol=1e-5, rtol=0)


def test_a_model_that_does_not_say_what_follows_its_layers_is_asked_by_a_hook() -> None:
    model, x = transformer("gated, loop norm", n_layers=3), tokens()
    shown = list(places(model, x, 2, inside=True))

    class Hidden:
        site, run_with_cache, run_with_hooks, bind = (
            model.site, model.run_with_cache, model.run_with_hooks, model.bind
        )  # fmt: skip

    for place, own in zip(places(Hidden(), x, 2, inside=True), shown, strict=True):
        torch.testing.assert_close(place.ended, own.ended, atol=1e-5, rtol=0)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_live_places_are_the_same_and_lead_to_the_end(kind: str, inside: bool) -> None:
    model, x = transformer(kind), tokens()
    *found, last = places(model, x, 2, inside=inside)
    end, live = live_places(model, x, 2, inside=inside)
    torch.testing.assert_close(end, last.residual, atol=1e-5, rtol=0)
    assert list(live) == [(place.loop, place.layer) for place in found]
    for place in found:
        torch.testing.assert_close(live[place[:2]], place.residual, atol=1e-5, rtol=0)
    for gradient in torch.autograd.grad(end.square().sum(), list(live.values())):
        assert gradient.abs().max() > 0
    assert all(weight.grad is None for weight in model.parameters())


def test_a_model_without_hooks_has_states_only() -> None:
    model = Affine()
    assert [p[:2] for p in places(model, inputs(), 2)] == [(0, None), (1, None), (2, None)]
    for run in (live_places, lambda *a, **k: list(places(*a, **k))):
        with pytest.raises(InputError, match="hooks"):
            run(model, inputs(), 2, inside=True)


def test_hooks_that_are_on_are_refused() -> None:
    model = transformer()
    model.add_hook("loops.0.blocks.0.hook_resid_post", lambda x, hook: 0 * x)
    with pytest.raises(HookError, match="no hooks"):
        list(places(model, tokens(), 2, inside=True))


def test_the_plain_readout_leaves_the_coda_out() -> None:
    assert readout_without_coda(transformer(), tokens()) is None
    assert readout_without_coda(Affine(), inputs()) is None
    model = transformer("prelude and coda", n_loops=5)  # by which hooks are numbered
    plain = readout_without_coda(model, tokens(2, 3))
    assert plain is not None and model.ln_final is not None
    h = torch.randn(2, 3, 8)
    torch.testing.assert_close(plain(h), model.ln_final(h) @ model.W_U + model.b_U)
    assert (plain(h) - model.readout(h)).abs().max() > 0.01
