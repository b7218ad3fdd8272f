from __future__ import annotations

import math

import pytest
import torch

from loopinterp.core.errors import InputError
from loopinterp.dynamics import Picard, Status, find_fixed_point
from loopinterp.dynamics.solvers import Termination, advance, start
from tests.dynamics.toys import rotation


def test_one_percent_of_progress_resets_the_patience() -> None:
    state = start(lambda x: x - 1, torch.tensor([[100.0]]))
    slow = advance(lambda x: x - 0.995 * x / 99, state, torch.tensor([[100.0]]))
    assert slow.since_best.item() == 1
    fast = advance(lambda x: x - 0.5 * x / 99, slow, torch.tensor([[100.0]]))
    assert fast.since_best.item() == 0


def test_convergence_outranks_the_end_of_the_steps_and_divergence_everything() -> None:
    rule = Termination(max_iter=1)
    x = torch.tensor([[1.0], [1.0], [1.0]])
    outputs = torch.tensor([[1.0], [2.0], [float("inf")]])
    state = advance(lambda _: outputs, start(lambda _: outputs, x), x)
    codes = rule(state).tolist()
    assert codes == [Status.CONVERGED, Status.OUT_OF_BUDGET, Status.DIVERGED]


@pytest.mark.parametrize(
    "options",
    [
        {"tol": 0.0},
        {"tol": float("nan")},
        {"atol": -1.0},
        {"max_iter": 0},
        {"patience": 0},
        {"divergence": float("inf")},
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(InputError, match=next(iter(options))):
        Termination(**options)  # pyright: ignore[reportArgumentType]


def test_iterates_are_the_loop_itself_bit_by_bit() -> None:
    x = torch.rand(2, 5, generator=torch.Generator().manual_seed(0))
    point = find_fixed_point(torch.cos, x, max_iter=3, tol=1e-12)
    assert torch.equal(point.state, x.cos().cos().cos())


def test_linear_divergence_is_seen() -> None:
    point = find_fixed_point(lambda x: 2 * x + 1, torch.zeros(1, 1))
    assert point.statuses == [Status.DIVERGED]
    # 2^t - 1 passes a million at t = 20.
    assert point.n_steps.item() == pytest.approx(20, abs=1)


def test_a_rotation_stalls_and_damping_finds_its_centre() -> None:
    turn = rotation(2.0)
    start = torch.tensor([[1.0, 0.0]])
    plain = find_fixed_point(lambda x: x @ turn.T + 1, start, max_iter=500)
    damped = find_fixed_point(lambda x: x @ turn.T + 1, start, solver=Picard(damping=0.5))
    assert plain.statuses == [Status.STALLED]
    assert damped.converged.all()
    centre = torch.linalg.solve(torch.eye(2) - turn, torch.ones(2))
    torch.testing.assert_close(damped.state[0], centre, atol=1e-4, rtol=1e-4)


def test_an_unstable_fixed_point_repels() -> None:
    point = find_fixed_point(lambda x: 4 * x * (1 - x), torch.tensor([0.75 + 1e-3]))
    assert not point.converged.any()


@pytest.mark.parametrize("damping", [0.0, -1.0, 1.5, math.nan])
def test_damping_out_of_range_is_refused(damping: float) -> None:
    with pytest.raises(InputError, match="damping"):
        Picard(damping=damping)
