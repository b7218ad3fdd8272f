from __future__ import annotations

import pytest
import torch

from loopinterp.dynamics import Status, find_fixed_point
from loopinterp.errors import InputError
from loopinterp.models import LoopedTransformer, LoopedTransformerConfig, bind
from tests.dynamics.toys import LinearModel, rotation


def test_states_of_any_shape_keep_it() -> None:
    model = LinearModel(0.5 * torch.eye(3))
    inputs = torch.tensor([[1, 2], [3, 4], [5, 6], [0, 0]])
    iteration = bind(model, inputs)
    point = find_fixed_point(iteration.step, iteration.h0, tol=1e-6)
    assert point.state.shape == (4, 2, 3)
    assert point.residuals.shape == (int(point.n_steps.max()) + 1, 4)
    torch.testing.assert_close(point.state, model.limit(inputs), atol=1e-4, rtol=1e-4)


def test_residuals_of_a_finished_example_stay_where_they_are() -> None:
    rate = torch.tensor([[0.1], [0.9]])
    point = find_fixed_point(lambda x: rate * x + 1, torch.zeros(2, 1))
    first = int(point.n_steps[0])
    assert first < int(point.n_steps[1])
    assert (point.residuals[first:, 0] == point.residuals[first, 0]).all()


def test_a_transformer_settles_on_a_state_that_a_loop_leaves_alone() -> None:
    config = LoopedTransformerConfig(
        d_model=16,
        n_heads=2,
        d_vocab=5,
        d_vocab_out=2,
        loop_norm=True,
        injection="input",
        initial_state="zeros",
    )
    model = LoopedTransformer(config, seed=0)
    iteration = bind(model, torch.tensor([[0, 1, 2, 3], [4, 3, 2, 1]]))
    point = find_fixed_point(iteration.step, iteration.h0, tol=1e-5, max_iter=500)
    assert point.converged.all()
    assert not point.state.requires_grad
    torch.testing.assert_close(iteration.step(point.state), point.state, atol=1e-3, rtol=1e-3)


def test_the_call_of_the_framework() -> None:
    point = find_fixed_point(lambda x: 0.5 * x + 1, torch.tensor(0.0), tol=1e-6, max_iter=100)
    assert point.converged.item() and point.state.item() == pytest.approx(2.0, abs=1e-5)
    again = find_fixed_point(lambda x: 0.5 * x + 1, torch.tensor(0.0), 1e-6, 100)
    assert torch.equal(point.residuals, again.residuals)


def test_patience_none_never_stalls() -> None:
    # A turn by 2 of nothing less than a whole number of steps.
    turn = {"model": lambda x: x @ rotation(2.0).T, "x0": torch.tensor([[1.0, 0.0]])}
    assert find_fixed_point(**turn, max_iter=300).statuses == [Status.STALLED]
    none = find_fixed_point(**turn, max_iter=300, patience=None)
    assert none.statuses == [Status.OUT_OF_BUDGET]


def test_patience_waits_for_a_cycle_that_is_being_followed() -> None:
    # Eight turns of five steps from the 64th on, which patience for 70 steps would not see.
    def turn(x: torch.Tensor) -> torch.Tensor:
        return x @ rotation(2 * torch.pi / 5).T

    start = torch.tensor([[1.0, 0.0]])
    assert find_fixed_point(turn, start, patience=70).statuses == [Status.CYCLE]
    assert find_fixed_point(turn, start, patience=70, max_iter=80).statuses == [Status.STALLED]


def test_saved_codes_keep_their_meaning() -> None:
    codes = {"RUNNING": 0, "CONVERGED": 1, "OUT_OF_BUDGET": 2, "DIVERGED": 3}
    assert {s.name: int(s) for s in Status} == codes | {"STALLED": 4, "CYCLE": 5}


def test_a_start_that_is_not_finite_or_empty_is_refused() -> None:
    for start in (torch.tensor([0.0, float("nan")]), torch.zeros(0, 3)):
        with pytest.raises(InputError, match="x0"):
            find_fixed_point(torch.cos, start)


@pytest.mark.usefixtures("no_type_checks")
def test_an_integer_start_is_refused() -> None:
    with pytest.raises(InputError, match=r"x0\.float"):
        find_fixed_point(lambda x: x, torch.tensor([1]))


def test_a_map_that_changes_shape_or_type_is_refused() -> None:
    with pytest.raises(InputError, match="keeps shape"):
        find_fixed_point(lambda x: x[:, :1], torch.zeros(2, 3))
    with pytest.raises(InputError, match="float64"):
        find_fixed_point(lambda x: x.double(), torch.zeros(2, 3))
