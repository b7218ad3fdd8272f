from __future__ import annotations

from typing import Any

import pytest
import torch

from loopinterp.errors import InputError
from loopinterp.lenses import fit_jacobian_lens, lens_study
from loopinterp.lenses.lens_places import layer_hooks
from loopinterp.models import LoopedTransformer, bind
from tests.lenses.lens_toys import KINDS, Affine, inputs, tokens, transformer

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
    """The transport from a place by central differences, one component and position at a time."""
    n_examples, n_pos = x.shape
    width = model.config.d_model
    J = torch.zeros(width, width, dtype=torch.float64)
    for pos in range(n_pos):
        for j in range(width):
            added = torch.zeros(n_examples, n_pos, width, dtype=torch.float64)
            added[:, pos, j] = EPS
            change = ends(model, x, n_loops, at, added) - ends(model, x, n_loops, at, -added)
            J[:, j] += (change[:, pos] if own else change.sum(1)).sum(0) / (2 * EPS)
    return J / (n_examples * n_pos)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_the_transport_is_that_of_finite_differences(kind: str) -> None:
    model, x = transformer(kind).double(), tokens(3, 3)
    lens = fit_jacobian_lens(model, x, n_loops=2, inside=True)
    assert lens.matrix.dtype == torch.float64 and not lens.offset.any()
    assert len(lens.places) == 2 * (model.config.n_layers + 1)  # both loops, but the last state
    for at, J in zip(lens.places, lens.matrix):
        torch.testing.assert_close(J, differences(model, x, 2, at), atol=1e-6, rtol=1e-6)


@torch.no_grad()
def test_the_effect_on_the_own_position_is_had_by_random_signs() -> None:
    model, x = transformer("loop norm", n_layers=1).double(), tokens(2, 2)
    own = differences(model, x, 2, (0, None), own=True)
    every = differences(model, x, 2, (0, None))
    found = fit_jacobian_lens(model, x, n_loops=2, targets="own", draws=150).matrix[0]
    assert (found - own).norm() < 0.1 * own.norm() < (every - own).norm()


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

    monkeypatch.setattr("loopinterp.lenses.jacobian_lens.live_places", live)
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
    whole = fit_jacobian_lens(model, x, n_loops=3, centred=True)
    monkeypatch.setattr("loopinterp.dynamics.state_trajectories.CHUNK_BYTES", 1)
    parts = fit_jacobian_lens(model, x, n_loops=3, centred=True)
    torch.testing.assert_close(parts.matrix, whole.matrix, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(parts.offset, whole.offset, atol=1e-5, rtol=1e-4)


def test_weights_are_left_as_they_are() -> None:
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
    with pytest.raises(InputError, match="can be differentiated"):
        fit_jacobian_lens(model, inputs(), n_loops=1)


@pytest.mark.parametrize("wrong", [{"positions": [9]}, {"draws": 0}, {"n_loops": 0}])
def test_numbers_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    asked: dict[str, Any] = {"n_loops": 2} | wrong
    with pytest.raises(InputError, match=next(iter(wrong))):
        fit_jacobian_lens(transformer(), tokens(), **asked)
