from __future__ import annotations

import torch

from loopinterp.dynamics import Status, find_limits
from loopinterp.dynamics.limits import around, centre
from loopinterp.models import bind
from tests.dynamics.toys import LinearModel, MapModel, rotation


def test_every_example_goes_as_far_as_it_has_to() -> None:
    model = LinearModel(0.5 * torch.eye(2))
    inputs = torch.tensor([[1, 2], [3, 4]])
    iteration = bind(model, inputs)
    there = model.limit(inputs)
    start = torch.stack([iteration.h0[0], there[1]])
    end = find_limits(iteration, start, max_loops=100)
    assert (end.status == Status.CONVERGED).all()
    torch.testing.assert_close(end.state, there, atol=1e-4, rtol=1e-4)
    assert end.loops[0] > 10 and end.loops[1] <= 1


def test_more_loops_than_one_phase_are_counted() -> None:
    iteration = bind(LinearModel(0.9 * torch.eye(2)), torch.ones(1, 1, dtype=torch.int64))
    end = find_limits(iteration, iteration.h0, max_loops=300)
    # The residual at loop t is 0.1 * 0.9^t / (1 - 0.9^t): under 1e-5 from loop 88 on.
    assert end.loops.tolist() == [88]


def test_what_is_not_finite_or_never_rests_has_no_limit() -> None:
    iteration = bind(LinearModel(rotation(1.0)), torch.ones(2, 1, dtype=torch.int64))
    start = torch.stack([torch.full((1, 2), float("nan")), torch.ones(1, 2)])
    end = find_limits(iteration, start, max_loops=30)
    assert end.status.tolist() == [Status.DIVERGED, Status.OUT_OF_BUDGET]
    grows = bind(MapModel(lambda h, e: 3 * h + e), torch.ones(1, 1, dtype=torch.int64))
    assert find_limits(grows, grows.h0, max_loops=400).status.item() == Status.DIVERGED


def test_a_cycle_is_a_limit_with_a_period_and_a_centre() -> None:
    model = MapModel(lambda h, e: 3 - h)  # from h to 3 - h and back
    iteration = bind(model, torch.ones(1, 1, dtype=torch.int64))
    start = torch.tensor([[[1.0, 0.5]]])
    end = find_limits(iteration, start, max_loops=200)
    assert end.status.tolist() == [Status.CYCLE] and end.period.tolist() == [2]
    assert end.found.all()
    states = list(around(iteration, end))
    assert len(states) == 2
    torch.testing.assert_close(states[0] + states[1], torch.full((1, 1, 2), 3.0))
    torch.testing.assert_close(centre(iteration, end), torch.full((1, 1, 2), 1.5))


def test_the_centre_of_a_fixed_point_is_itself_beside_a_cycle() -> None:
    flips = MapModel(lambda h, e: torch.where(e[..., :1] == 1, -h, 0.5 * h + 1))
    iteration = bind(flips, torch.tensor([[1], [2]]))
    end = find_limits(iteration, torch.ones(2, 1, 2), max_loops=200)
    assert end.period.tolist() == [2, 1]
    expected = torch.tensor([[[0.0, 0.0]], [[2.0, 2.0]]])
    torch.testing.assert_close(centre(iteration, end), expected, atol=1e-4, rtol=0)
