from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from loopinterp.core.errors import CheckpointError, HookError, InputError
from loopinterp.lenses import FittedLens, fit_jacobian_lens
from loopinterp.lenses.fitted_lens import (
    EVERYWHERE,
    layer_hooks,
    live_places,
    places,
    readout_without_coda,
)
from loopinterp.models import iterate
from tests.lenses.lens_toys import KINDS, Affine, end_by_hook, inputs, tokens, transformer


def lens(**changes: Any) -> FittedLens:
    g = torch.Generator().manual_seed(0)
    settings: dict[str, Any] = {
        "kind": "tuned",
        "matrix": torch.randn(2, 3, 3, generator=g),
        "offset": torch.randn(2, 3, generator=g),
        "places": [(0, None), (1, None)],
        "n_loops": 2,
        "n_examples": 7,
        "made": {"seed": 3, "model": {"weights_sha256": "cafe"}},
    }
    return FittedLens(**(settings | changes))


def test_a_place_has_its_own_map_and_the_end_none() -> None:
    fitted, h = lens(), torch.randn(4, 5, 3)
    for loop in (0, 1):
        expected = torch.einsum("oi,bpi->bpo", fitted.matrix[loop], h) + fitted.offset[loop]
        torch.testing.assert_close(fitted.transport(h, loop), expected)
    assert fitted.transport(h, 2) is h


def test_one_map_may_serve_all_places() -> None:
    shared = lens(matrix=2 * torch.eye(3)[None], offset=torch.ones(1, 3), places=[EVERYWHERE])
    h = torch.randn(2, 3)
    assert shared.shared and not lens().shared
    for place in ((0, None), (1, 0), (1, None)):
        torch.testing.assert_close(shared.transport(h, *place), 2 * h + 1)


@pytest.mark.parametrize(("loop", "layer", "width"), [(3, None, 3), (1, 0, 3), (1, None, 4)])
def test_a_place_or_width_that_was_not_fitted_is_refused(
    loop: int, layer: int | None, width: int
) -> None:
    with pytest.raises(InputError) as caught:
        lens().transport(torch.zeros(width), loop, layer)
    assert caught.value.what == "place"


def test_a_layer_may_be_narrower_than_the_state() -> None:
    fitted, x = lens(kind="jacobian", places=[(1, 0), (1, None)], n_layers=1), torch.randn(4, 2)
    expected = x @ fitted.matrix[0, :, :2].T + fitted.offset[0]
    torch.testing.assert_close(fitted.transport(x, 1, 0), expected)
    with pytest.raises(InputError, match="width 2"):
        fitted.transport(x, 1)


def test_states_keep_their_type() -> None:
    assert lens().transport(torch.zeros(3, dtype=torch.bfloat16), 0).dtype == torch.bfloat16


def test_maps_and_places_fit_each_other() -> None:
    with pytest.raises(InputError) as caught:
        lens(places=[(0, None)])
    assert caught.value.what == "FittedLens"


@pytest.mark.parametrize("places", [[(0, None), (1, 1)], [(1, 0), (1, None)]])
def test_a_file_gives_back_the_lens(places: list[Any], tmp_path: Path) -> None:
    fitted = lens(places=places, n_layers=2)
    again = FittedLens.load(fitted.save(tmp_path / "lens.safetensors"))
    assert torch.equal(again.matrix, fitted.matrix) and torch.equal(again.offset, fitted.offset)
    for name in ("kind", "places", "n_loops", "n_layers", "n_examples", "made"):
        assert getattr(again, name) == getattr(fitted, name)


def test_another_file_is_no_lens(tmp_path: Path) -> None:
    path = lens().save(tmp_path / "lens.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(CheckpointError):
        FittedLens.load(path)
    transformer().save_pretrained(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        FittedLens.load(tmp_path / "model.safetensors")
    assert caught.value.what == f"file {tmp_path / 'model.safetensors'}"


@pytest.mark.parametrize("kind", ["plain", "prelude and coda"])
def test_layers_have_the_numbers_of_transformer_lens(kind: str, tmp_path: Path) -> None:
    from transformer_lens.tools.analysis import JacobianLens

    model = transformer(kind, n_layers=2)
    fitted = fit_jacobian_lens(model, tokens(), n_loops=3, inside=True)
    theirs = fitted.to_transformer_lens()
    theirs.save(str(tmp_path / "lens.pt"), dtype=torch.float32)
    read = JacobianLens.load(str(tmp_path / "lens.pt"))
    before = model.config.n_prelude
    assert read.source_layers == list(range(before, before + 5))
    assert read.metadata["target_layer"] == before + 5
    assert read.n_prompts == 6
    for flat in read.source_layers:
        (loop, layer), *_ = [
            (t, k) for t in range(3) for k in range(2)
            if model.site("resid_post", loop=t, layer=k, n_loops=3)
            == f"blocks.{flat}.hook_resid_post"
        ]  # fmt: skip
        matrix = fitted.matrix[fitted.places.index((loop + 1, layer))]
        assert torch.equal(read.jacobians[flat], matrix)
    h = torch.randn(2, 8)
    again = FittedLens.from_transformer_lens(read, n_loops=3, n_layers=2, n_before=before)
    for loop, layer in again.places:
        torch.testing.assert_close(
            again.transport(h, loop, layer), fitted.transport(h, loop, layer), atol=1e-6, rtol=0
        )


def test_states_of_loops_may_stand_for_layers() -> None:
    fitted = fit_jacobian_lens(transformer(), tokens(), n_loops=3)
    theirs = fitted.to_transformer_lens()
    assert theirs.source_layers == [0, 1] and theirs.metadata["source"] == "states of loops"
    again = FittedLens.from_transformer_lens(theirs, n_loops=3)
    assert again.places == [(1, None), (2, None)]
    assert torch.equal(again.matrix, fitted.matrix[1:])


def test_what_its_format_does_not_have_is_refused() -> None:
    shared = lens(matrix=torch.eye(3)[None], offset=torch.zeros(1, 3), places=[EVERYWHERE])
    for made in (lens(), shared):
        with pytest.raises(InputError) as caught:
            made.to_transformer_lens()
        assert caught.value.what == "lens"
    with pytest.raises(InputError) as caught:
        fit_jacobian_lens(transformer(), tokens(), n_loops=1).to_transformer_lens()
    assert caught.value.what == "lens"
    theirs = fit_jacobian_lens(transformer(), tokens(), n_loops=3).to_transformer_lens()
    with pytest.raises(InputError) as caught:
        FittedLens.from_transformer_lens(theirs, n_loops=1)
    assert caught.value.what == "lens"


@pytest.mark.parametrize("kind", KINDS)
def test_places_are_those_of_one_whole_run(kind: str) -> None:
    model, x = transformer(kind), tokens()
    _, cache = model.run_with_cache(x, n_loops=3)
    states = dict(iterate(model, x, 3))
    run = list(places(model, x, 3, inside=True))
    layers = model.config.n_layers
    expected_places = [(0, None), *((t, k) for t in (1, 2, 3) for k in (*range(layers), None))]
    assert [(p.loop, p.layer) for p in run] == expected_places
    for place in run:
        if place.layer is None:
            expected = states[place.loop]
        else:
            expected = cache[f"loops.{place.loop - 1}.blocks.{place.layer}.hook_resid_post"]
        torch.testing.assert_close(place.residual, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_that_ends_at_its_last_layer_leaves_its_state(kind: str) -> None:
    run = list(places(transformer(kind), tokens(), 2, inside=True))
    for before, state in itertools.pairwise(run):
        if state.layer is None:
            torch.testing.assert_close(before.ended, state.residual, atol=1e-5, rtol=0)
            assert torch.equal(state.ended, state.residual)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_loop_leaves_is_what_a_hook_at_its_last_layer_says(kind: str) -> None:
    model, x = transformer(kind, n_layers=3), tokens()
    run = list(places(model, x, 2, inside=True))
    states = [place.residual for place in run if place.layer is None]
    for place in run:
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

    for place, expected in zip(places(Hidden(), x, 2, inside=True), shown, strict=True):
        torch.testing.assert_close(place.ended, expected.ended, atol=1e-5, rtol=0)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_live_places_are_the_same_and_lead_to_the_end(kind: str, inside: bool) -> None:
    model, x = transformer(kind), tokens()
    *run, last = places(model, x, 2, inside=inside)
    end, live = live_places(model, x, 2, inside=inside)
    torch.testing.assert_close(end, last.residual, atol=1e-5, rtol=0)
    assert list(live) == [(place.loop, place.layer) for place in run]
    for place in run:
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
