from __future__ import annotations

from typing import Any

import pytest
import torch

from loopinterp.compiler import compile_program
from loopinterp.core.errors import InputError
from loopinterp.lenses import fit_jacobian_lens, fit_tuned_lens, lens_study
from loopinterp.lenses.fitted_lens import layer_hooks
from loopinterp.models import LoopedTransformer, bind
from loopinterp.tasks import Addition, Batch
from loopinterp.tasks.task import IGNORE
from tests.lenses.lens_toys import KINDS, Affine, inputs, tokens, transformer


def test_translators_that_are_known_are_found() -> None:
    model = Affine()
    lens = fit_tuned_lens(
        model, inputs(512), n_loops=3, steps=400, learning_rate=0.03, batch_size=128
    )
    assert lens.places == [(0, None), (1, None), (2, None)]
    for (loop, _), matrix, offset in zip(lens.places, lens.matrix, lens.offset):
        A, b = model.to_the_end(3 - loop)
        assert (A - torch.eye(3)).abs().max() > 0.1  # there was something to be found
        torch.testing.assert_close(matrix, A, atol=0.02, rtol=0)
        torch.testing.assert_close(offset, b, atol=0.02, rtol=0)
    read = lens_study(model, inputs(seed=5), lens=lens).data["reading_kl"].mean(("layer", "batch"))
    assert float(read.sel(reading="lens").max()) < 1e-3
    assert float(read.sel(reading="shuffled").sel(loop=0)) > 0.1
    # The control by the maps of other loops knows whose is whose.
    transfer = lens_study(model, inputs(seed=5), lens=lens).data["transfer_kl"].mean("batch")
    for applied in range(4):
        assert int(transfer.sel(applied=applied).argmin("translator")) == applied


def test_one_translator_for_all_finds_what_all_share() -> None:
    model = Affine()
    lens = fit_tuned_lens(
        model, inputs(512), n_loops=1, shared=True, steps=400, learning_rate=0.03, batch_size=128
    )
    assert lens.shared and len(lens.matrix) == 1
    torch.testing.assert_close(lens.matrix[0], model.M, atol=0.02, rtol=0)
    shared = fit_tuned_lens(model, inputs(64), n_loops=3, shared=True, steps=50)
    separate = fit_tuned_lens(model, inputs(64), n_loops=3, steps=50)
    assert shared.matrix.shape == (1, 3, 3) and separate.matrix.shape == (3, 3, 3)


def test_a_readout_in_parts_gives_the_same_lens(monkeypatch: pytest.MonkeyPatch) -> None:
    model = transformer("prelude and coda")
    options: dict[str, Any] = {"n_loops": 2, "inside": True, "steps": 3}
    full = fit_tuned_lens(model, tokens(), **options)
    assert len(full.places) == 6 - 1  # the last layer leaves the last state
    monkeypatch.setattr("loopinterp.lenses.lens_fits._LOGITS_AT_ONCE", 1)
    parts = fit_tuned_lens(model, tokens(), **options)
    torch.testing.assert_close(parts.matrix, full.matrix, atol=1e-5, rtol=0)


def test_layers_are_brought_nearer_to_the_end() -> None:
    model, x = transformer("loop norm"), tokens(64)
    lens = fit_tuned_lens(model, x, n_loops=3, inside=True, steps=150, learning_rate=0.01)
    kl = lens_study(model, tokens(64, seed=1), lens=lens, inside=True).data["reading_kl"]
    kl = kl.mean("batch").isel(loop=slice(1, None))
    better = (kl.sel(reading="lens") < kl.sel(reading="plain")).values
    assert better[:2, :2].all() and better[2, 0]  # the end is read as it is, by either
    assert float(kl.sel(reading="lens", loop=3, layer="layer 1")) < 1e-6


def test_a_task_is_drawn_from_anew_at_every_step() -> None:
    model = compile_program("ripple", max_length=5).model
    drawn: list[int] = []
    task = Addition()
    sample = task.sample

    class Counted(Addition):
        def sample(self, *given: Any, **options: Any) -> Any:
            batch = sample(*given, **options)
            drawn.append(hash(tuple(batch.inputs.flatten().tolist())))
            return batch

    lens = fit_tuned_lens(model, Counted(), n=4, steps=6, batch_size=8)
    assert lens.n_loops == 5 and lens.n_examples == 48
    assert len(set(drawn)) >= 6


def test_the_seed_says_it_all() -> None:
    model, x = transformer("loop norm"), tokens(64)
    options: dict[str, Any] = {"n_loops": 2, "steps": 3, "batch_size": 8}
    once, again = (fit_tuned_lens(model, x, **options, seed=1) for _ in range(2))
    assert torch.equal(once.matrix, again.matrix)
    assert not torch.equal(once.matrix, fit_tuned_lens(model, x, **options, seed=2).matrix)


def test_what_is_not_asked_does_not_count() -> None:
    model, x = Affine(), inputs(16, 2)
    targets = torch.tensor([0, IGNORE]).expand(16, 2).clone()
    counts = torch.full((16,), 2)
    batch = Batch(inputs=x, targets=targets, n=counts, n_loops=counts)
    asked = fit_tuned_lens(model, batch, steps=5)
    single = fit_tuned_lens(model, x[:, :1], n_loops=2, steps=5)
    torch.testing.assert_close(asked.matrix, single.matrix)
    both = fit_tuned_lens(model, x, n_loops=2, steps=5)
    assert (both.matrix - single.matrix).abs().max() > 1e-4


def test_weights_are_left_as_they_are() -> None:
    model = transformer("loop norm")
    fit_tuned_lens(model, tokens(), n_loops=2, steps=2)
    assert all(weight.grad is None and weight.requires_grad for weight in model.parameters())


def test_a_readout_that_cuts_the_graph_is_refused() -> None:
    model = Affine()
    model.readout = lambda h: h.detach() @ model.W
    with pytest.raises(InputError) as caught:
        fit_tuned_lens(model, inputs(), n_loops=1, steps=1)
    assert caught.value.what == "model"


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"learning_rate": 0.0}, {"batch_size": 0}])
def test_numbers_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    asked: dict[str, Any] = {"n_loops": 2} | wrong
    with pytest.raises(InputError, match=next(iter(wrong))):
        fit_tuned_lens(transformer(), tokens(), **asked)


def test_a_step_whose_examples_ask_nothing_teaches_nothing() -> None:
    targets = torch.full((4, 2), IGNORE)
    targets[1:] = 0
    counts = torch.full((4,), 2)
    batch = Batch(inputs=inputs(4, 2), targets=targets, n=counts, n_loops=counts)
    lens = fit_tuned_lens(Affine(), batch, steps=8, batch_size=1)
    assert lens.matrix.isfinite().all() and lens.offset.isfinite().all()


@pytest.mark.parametrize(("steps", "seen"), [(9, 12), (2, 8)])
def test_an_example_that_is_seen_again_is_counted_once(steps: int, seen: int) -> None:
    lens = fit_tuned_lens(Affine(), inputs(12, 2), n_loops=2, steps=steps, batch_size=4)
    assert lens.n_examples == seen


EPS = 1e-5


def ends(model: LoopedTransformer, x: torch.Tensor, n_loops: int, at: Any, added: Any) -> Any:
    """The last state, where something is added to what stands at a place."""
    loop, layer = at
    if layer is None:
        iteration = bind(model, x)
        h = [h for _, h in iteration.run(loop)][-1] + added
        return [h for _, h in iteration.run(n_loops - loop, state=h)][-1]
    name = layer_hooks(model, loop - 1, n_loops)[layer]
    hooks = [(name, lambda residual, hook: residual + added)]
    return model.run_with_hooks(x, n_loops=n_loops, fwd_hooks=hooks, return_type="state")


def differences(
    model: LoopedTransformer, x: torch.Tensor, n_loops: int, at: Any, *, own: bool = False
) -> torch.Tensor:
    """The transport from a place by central differences, one position at a time."""
    n_examples, n_pos = x.shape
    width = model.config.d_model
    J = torch.zeros(width, width, dtype=torch.float64)
    each = x.repeat(width, 1)  # all examples for one component, then for the next
    for pos in range(n_pos):
        added = torch.zeros(width, n_examples, n_pos, width, dtype=torch.float64)
        added[:, :, pos] = EPS * torch.eye(width, dtype=torch.float64)[:, None]
        added = added.flatten(0, 1)
        change = ends(model, each, n_loops, at, added) - ends(model, each, n_loops, at, -added)
        change = (change[:, pos] if own else change.sum(1)).unflatten(0, (width, n_examples))
        J += change.sum(1).T / (2 * EPS)
    return J / (n_examples * n_pos)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_the_transport_is_that_of_finite_differences(kind: str) -> None:
    model, x = transformer(kind).double(), tokens(2, 3)
    lens = fit_jacobian_lens(model, x, n_loops=2, inside=True)
    assert lens.matrix.dtype == torch.float64 and not lens.offset.any()
    assert len(lens.places) == 2 * (model.config.n_layers + 1)  # both loops, but the last state
    for at, J in zip(lens.places, lens.matrix):
        torch.testing.assert_close(J, differences(model, x, 2, at), atol=1e-6, rtol=1e-6)


@torch.no_grad()
def test_the_effect_on_the_own_position_is_had_by_random_signs() -> None:
    model, x = transformer("loop norm", n_layers=1).double(), tokens(2, 2)
    exact = differences(model, x, 2, (0, None), own=True)
    every = differences(model, x, 2, (0, None))
    estimate = fit_jacobian_lens(model, x, n_loops=2, targets="own", draws=100).matrix[0]
    assert (estimate - exact).norm() < 0.1 * exact.norm() < (every - exact).norm()


def test_a_model_whose_loops_are_one_map_has_its_powers() -> None:
    model = Affine()
    lens = fit_jacobian_lens(model, inputs(), n_loops=4, centred=True)
    for (loop, _), J, b in zip(lens.places, lens.matrix, lens.offset):
        A, offset = model.to_the_end(4 - loop)
        torch.testing.assert_close(J, A)
        torch.testing.assert_close(b, offset, atol=1e-5, rtol=0)
    result = lens_study(model, inputs(seed=2), lens=lens)
    assert float(result.data["kl"].max()) < 1e-6  # exact at every loop, and not the last alone
    raw = lens_study(model, inputs(seed=2), lens=fit_jacobian_lens(model, inputs(), n_loops=4))
    assert float(raw.data["kl"].sel(loop=0).max()) > 1e-3  # which misses the constant


def test_a_layer_narrower_than_the_state_has_its_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state of two parts, of which the layer writes one: h = (x, y), x' = A x, y' = y + B x'."""
    A, B = torch.randn(2, 2, 2)
    model = Affine(4)

    def live(model: Any, x: torch.Tensor, n_loops: int, **_: Any) -> Any:
        h = x.clone().requires_grad_()
        layer = h[..., :2] @ A.T
        return torch.cat([layer, h[..., 2:] + layer @ B.T], -1), {(0, None): h, (1, 0): layer}

    monkeypatch.setattr("loopinterp.lenses.lens_fits.live_places", live)
    lens = fit_jacobian_lens(model, inputs(width=4), n_loops=1)
    of_state, of_layer = torch.zeros(2, 4, 4)
    of_layer[:, :2] = torch.cat([torch.eye(2), B])
    of_state[:, :2] = of_layer[:, :2] @ A
    of_state[2:, 2:] = torch.eye(2)
    torch.testing.assert_close(lens.matrix, torch.stack([of_state, of_layer]))


def test_positions_are_those_of_source_and_target() -> None:
    model, x = transformer("loop norm").double(), tokens(2, 3)
    some = fit_jacobian_lens(model, x, n_loops=2, positions=[1]).matrix[1]
    h = [h for _, h in bind(model, x).run(1)][-1].detach()
    iteration = bind(model, x)
    whole: Any = torch.autograd.functional.jacobian(iteration.step, h)  # [b p i, b' p' j]
    own = [whole[b, 1, :, b, 1] for b in range(2)]
    torch.testing.assert_close(some, torch.stack(own).mean(0))


def test_it_does_not_depend_on_how_many_examples_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = transformer("loop norm"), tokens()
    full = fit_jacobian_lens(model, x, n_loops=3, centred=True)
    monkeypatch.setattr("loopinterp.dynamics.measures.CHUNK_BYTES", 1)
    parts = fit_jacobian_lens(model, x, n_loops=3, centred=True)
    torch.testing.assert_close(parts.matrix, full.matrix, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(parts.offset, full.offset, atol=1e-5, rtol=1e-4)


def test_weights_are_left_as_they_are_of_jacobian_lens() -> None:
    model = transformer("loop norm")
    model.requires_grad_(False)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    lens = fit_jacobian_lens(model, tokens(), n_loops=2, inside=True)
    assert lens.matrix.abs().max() > 0
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert not any(weight.requires_grad for weight in model.parameters())


def test_a_loop_that_cuts_the_graph_is_refused() -> None:
    model = Affine()
    model.step = lambda h, e: (h.detach() * 2).requires_grad_()
    lens = fit_jacobian_lens(model, inputs(), n_loops=1)
    assert not lens.matrix.any()  # nothing of the state reaches the end, as the graph says
    model.step = lambda h, e: h.detach() * 2
    with pytest.raises(InputError) as caught:
        fit_jacobian_lens(model, inputs(), n_loops=1)
    assert caught.value.what == "model"


@pytest.mark.parametrize("wrong", [{"positions": [9]}, {"draws": 0}, {"n_loops": 0}])
def test_numbers_out_of_range_are_refused_of_jacobian_lens(wrong: dict[str, Any]) -> None:
    asked: dict[str, Any] = {"n_loops": 2} | wrong
    with pytest.raises(InputError, match=next(iter(wrong))):
        fit_jacobian_lens(transformer(), tokens(), **asked)
