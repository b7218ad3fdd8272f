from __future__ import annotations

import math

import pytest
import torch

from loopinterp.dynamics import Picard, Status, find_fixed_point
from loopinterp.errors import InputError
from tests.dynamics.toys import rotation


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
