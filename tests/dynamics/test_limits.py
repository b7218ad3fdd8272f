from __future__ import annotations

import torch

from loopinterp.dynamics import Status, find_limits
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
    assert end.status.tolist() == [Status.DIVERGED, Status.MAX_STEPS]
    grows = bind(MapModel(lambda h, e: 3 * h + e), torch.ones(1, 1, dtype=torch.int64))
    assert find_limits(grows, grows.h0, max_loops=400).status.item() == Status.DIVERGED
