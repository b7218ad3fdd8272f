"""Cycles and what is nearly one: told apart, in both precisions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from loopinterp.dynamics import FixedPoint, Picard, Status, find_fixed_point
from loopinterp.dynamics.solvers import CycleWatch

both_precisions = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)

Map = Callable[[Tensor], Tensor]


def _logistic(*rates: float) -> Map:
    return lambda x: torch.tensor(rates).to(x)[:, None] * x * (1 - x)


def _henon(*a: float) -> Map:
    bend = torch.tensor(a)
    return lambda x: torch.stack([1 - bend.to(x) * x[:, 0] ** 2 + x[:, 1], 0.3 * x[:, 0]], dim=1)


def _turns(*scales_and_angles: tuple[float, float]) -> Map:
    """Rotations about (3, 3), each scaled: spirals where the scale is not 1."""
    scale, angle = torch.tensor(scales_and_angles, dtype=torch.float64).T
    c, s = scale * angle.cos(), scale * angle.sin()
    matrix = torch.stack([torch.stack([c, -s], 1), torch.stack([s, c], 1)], 1)
    return lambda x: torch.einsum("bij,bj->bi", matrix.to(x), x - 3) + 3


def _search(f: Map, x0: list[list[float]], dtype: torch.dtype, n: int) -> FixedPoint:
    start = torch.tensor(x0, dtype=dtype)
    return find_fixed_point(f, start, tol=1e-6, max_iter=n, patience=None)


CYCLES: dict[str, tuple[Map, list[list[float]], list[int]]] = {
    "logistic": (_logistic(3.2, 3.5, 3.83, 3.55), [[0.2]] * 4, [2, 4, 3, 8]),
    "Henon": (
        _henon(0.5, 1.0, 1.0, 1.25),
        [[0.1, 0.1], [0.1, 0.1], [0.3, 0.0], [0.1, 0.1]],
        [2, 4, 4, 7],
    ),
    "part of a turn": (
        _turns((1.0, math.pi), (1.0, 2 * math.pi / 5), (1.0, 4 * math.pi / 3)),
        [[4.0, 3.0]] * 3,
        [2, 5, 3],
    ),
}


@both_precisions
@pytest.mark.parametrize("name", CYCLES)
def test_cycles_have_their_least_period(name: str, dtype: torch.dtype) -> None:
    f, x0, periods = CYCLES[name]
    point = _search(f, x0, dtype, 500)
    assert set(point.statuses) == {Status.CYCLE}
    assert point.period.tolist() == periods
    # The state given back is on the cycle: it returns after a whole turn, and not before.
    trajectory = [point.state]
    for _ in range(max(periods)):
        trajectory.append(f(trajectory[-1]))
    far = (torch.stack(trajectory[1:]) - point.state).abs().amax(dim=-1)
    for row, period in enumerate(periods):
        assert far[period - 1, row] < 1e-4 < 1e-2 < far[: period - 1, row].min()


_STARTS = [[4.0, 3.0], [3.01, 3.02], [3.0005, 3.0]]
_SPIRALS = itertools.product((0.999, 0.9999, 1.001), (math.pi, 2 * math.pi / 3, 2.0, 0.01))
_GOLDEN = math.pi * (math.sqrt(5) - 1)
NEARLY: dict[str, tuple[Map, list[list[float]]]] = {
    "chaos, logistic": (_logistic(3.9, 3.99), [[0.2], [0.61]]),
    "chaos, Henon": (_henon(1.4), [[0.1, 0.1]]),
    "flip that drifts": (
        lambda x: torch.stack([-x[:, 0], x[:, 1] + 1e-5], dim=1),
        [[1.0, 1.0], [1.0, 0.0]],
    ),
    # 355 steps by an angle of 2 are 113 turns, all but 6e-5.
    "irrational angle": (_turns((1.0, _GOLDEN), (1.0, 2.0)), [[4.0, 3.0]] * 2),
    "spiral": (_turns(*[s for s in _SPIRALS for _ in _STARTS]), _STARTS * 12),
}


@both_precisions
@pytest.mark.parametrize("name", NEARLY)
def test_what_is_nearly_a_cycle_is_not_called_one(name: str, dtype: torch.dtype) -> None:
    f, x0 = NEARLY[name]
    point = _search(f, x0, dtype, 500)
    assert Status.CYCLE not in point.statuses
    assert (point.period == 0).all()


def test_an_irrational_turn_is_no_cycle_at_a_tolerance_that_it_meets_in_each_turn() -> None:
    # 22 steps by 2 come back to within 2%.
    start = torch.tensor([[4.0, 3.0]]).double()
    point = find_fixed_point(_turns((1.0, 2.0)), start, 0.01, 500, patience=None)
    assert point.statuses == [Status.OUT_OF_BUDGET]


def test_examples_of_a_batch_have_periods_of_their_own_and_rest_or_not() -> None:
    f = _logistic(2.8, 3.2, 3.9, 3.5, 3.83, 4.1)
    start = torch.full((6, 1), 0.3).double()
    point = find_fixed_point(f, start, 1e-6, 400, patience=None)
    assert point.period.tolist() == [0, 2, 0, 4, 3, 0]
    assert point.statuses[0] == Status.CONVERGED and point.statuses[5] == Status.DIVERGED
    assert [s for s, p in zip(point.statuses, point.period, strict=True) if p] == [Status.CYCLE] * 3


def test_a_damped_iteration_reports_no_cycle_of_the_map() -> None:
    # (x + f(x)) / 2 turns from 1 to -1 and back, which f does not.
    point = find_fixed_point(lambda x: -3 * x, torch.ones(1), 1e-6, 300, solver=Picard(damping=0.5))
    assert point.statuses == [Status.STALLED] and point.period.item() == 0


def test_low_precision_has_wide_cycles_only() -> None:
    wide = find_fixed_point(lambda x: 1 - x, torch.tensor([[0.0], [1.0]]).bfloat16())
    assert wide.period.tolist() == [2, 2]
    # 1 and its neighbour in bfloat16, in turn.
    narrow = find_fixed_point(
        lambda x: torch.where(x > 1, 1.0, 1.0078125).to(x), torch.ones(1, 1).bfloat16()
    )
    assert narrow.statuses == [Status.STALLED]


def test_the_watch_keeps_one_state_however_long_it_looks() -> None:
    watch = CycleWatch(torch.zeros(3, 5), 1e-6, 1e-8)
    for step in range(40):
        watch.see(torch.full((3, 5), float(step)))
    held = sum(v.numel() for v in vars(watch).values() if isinstance(v, Tensor))
    assert held == 3 * 5 + 5 * 3  # the anchor, and five numbers of each example
