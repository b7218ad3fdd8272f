from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from loopinterp.dynamics import Limits, Status, find_limits
from loopinterp.dynamics.limits import (
    NO_LIMIT,
    DistinctLimits,
    answered_right,
    around,
    centre,
    limit_distances,
)
from loopinterp.models import Iteration, bind
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
    assert end.has_limit.all()
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


SAME = 0.1


def fixed_points(numbers: Tensor, status: Status = Status.CONVERGED) -> Limits:
    """Limits of one position and one feature."""
    codes = torch.full(numbers.shape, int(status))
    return Limits(numbers[:, None, None], codes, codes * 0, codes * 0 + 1)


def stays(n_examples: int) -> Iteration:
    inputs = torch.ones(n_examples, 1, dtype=torch.int64)
    return bind(MapModel(lambda h, e: h.clone(), d_model=1), inputs)


def greedy(values: list[float]) -> list[int]:
    """One after the other: the first of the firsts that is near enough, or a new one."""
    firsts: list[float] = []
    numbers = []
    for value in values:
        near = [k for k, first in enumerate(firsts) if abs(value - first) <= SAME * abs(first)]
        if not near:
            firsts.append(value)
        numbers.append(near[0] if near else len(firsts) - 1)
    return numbers


@settings(max_examples=40)
@given(
    rows=st.lists(st.tuples(st.integers(0, 2), st.integers(10, 40)), min_size=1, max_size=30),
    cut=st.integers(0, 30),
)
def test_limits_are_numbered_as_one_after_the_other_would(
    rows: list[tuple[int, int]], cut: int
) -> None:
    example, values = (torch.tensor(column) for column in zip(*rows))
    ends = fixed_points(values.float())
    distinct = DistinctLimits(stays(3), torch.ones(3, 1, dtype=torch.bool), SAME)
    # However they come, in one part or two.
    parts = [part for part in (slice(0, cut), slice(cut, len(rows))) if rows[part]]
    numbers = torch.cat([distinct.number(ends.select(part), example[part]) for part in parts])
    for k in range(3):
        expected = greedy(values[example == k].float().tolist())
        assert numbers[example == k].tolist() == expected
        assert distinct.count()[k].item() == len({*expected})


def test_what_is_no_limit_has_no_number_and_makes_no_first() -> None:
    distinct = DistinctLimits(stays(1), torch.ones(1, 1, dtype=torch.bool), SAME)
    assert distinct.count().tolist() == [0]
    lost = fixed_points(torch.tensor([5.0, 7.0]), Status.OUT_OF_BUDGET)
    both = torch.zeros(2, dtype=torch.int64)
    assert distinct.number(lost, both).tolist() == [NO_LIMIT] * 2
    assert distinct.count().tolist() == [0]
    assert distinct.number(fixed_points(torch.tensor([7.0])), both[:1]).tolist() == [0]
    distance, cosine = limit_distances(lost, lost, stays(2), torch.ones(2, 1, dtype=torch.bool))
    assert distance.isnan().all() and cosine.isnan().all()


def test_cycles_are_one_where_they_are_nearest_and_right_where_they_are_right_all_around() -> None:
    model = MapModel(lambda h, e: 4 - h, d_model=1)  # from h to 4 - h and back
    each = torch.zeros(3, dtype=torch.int64)
    iteration = bind(model, torch.ones(3, 1, dtype=torch.int64))
    codes = torch.full((3,), int(Status.CYCLE))
    ends = Limits(torch.tensor([5.0, -1.0, 3.0])[:, None, None], codes, codes, codes * 0 + 2)
    distinct = DistinctLimits(iteration.select(each[:1]), torch.ones(1, 1, dtype=torch.bool), SAME)
    assert distinct.number(ends, each).tolist() == [0, 0, 1]
    # The readout says 1 where the state is above 0: 5 is and -1 is not; 3 and 1 are.
    targets = torch.ones(3, 1, dtype=torch.int64)
    assert answered_right(iteration, ends, targets, 1).tolist() == [False, False, True]


def test_only_positions_that_are_counted_tell_limit_distances() -> None:
    state = torch.tensor([[[1.0], [2.0]], [[1.0], [9.0]]])
    codes = torch.full((2,), int(Status.CONVERGED))
    ends = Limits(state, codes, codes * 0, codes * 0 + 1)
    both = torch.zeros(2, dtype=torch.int64)
    inputs = torch.ones(1, 2, dtype=torch.int64)
    iteration = bind(MapModel(lambda h, e: h.clone(), d_model=1), inputs)
    for counted, expected in (([True, False], [0, 0]), ([True, True], [0, 1])):
        distinct = DistinctLimits(iteration, torch.tensor([counted]), SAME)
        assert distinct.number(ends, both).tolist() == expected


def test_a_limit_at_zero_is_one_however_nearly_it_is_found() -> None:
    iteration = bind(MapModel(lambda h, e: h / 2), torch.ones(1, 1, dtype=torch.int64))
    starts = torch.tensor([[[0.0, 0.0]], [[1.0, 3.0]], [[-2.0, 1e-3]]])
    each = torch.zeros(3, dtype=torch.int64)
    ends = find_limits(iteration.select(each), starts, max_loops=100)
    assert ends.has_limit.all() and (ends.state[1:] != 0).any()
    distinct = DistinctLimits(iteration, torch.ones(1, 1, dtype=torch.bool), SAME)
    assert distinct.number(ends, each).tolist() == [0, 0, 0]
