"""Cycles and what is nearly one: told apart, in both precisions."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from loopinterp import dynamics
from loopinterp.core.errors import InputError
from loopinterp.dynamics import (
    Anderson,
    FixedPoint,
    Picard,
    Status,
    find_fixed_point,
    get_solver,
    list_solvers,
)
from loopinterp.dynamics.fixed_point import _CycleWatch
from loopinterp.models import LoopedTransformer, LoopedTransformerConfig, bind
from tests.dynamics.toys import LinearModel, batch_of_ones, rotation
from tests.models.timed_toys import Timed


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


@pytest.mark.parametrize("period", [9, 12, 16, 24, 30])
def test_long_cycles_are_found_within_the_default_patience(period: int) -> None:
    turn = rotation(2 * torch.pi / period)
    point = find_fixed_point(lambda x: x @ turn.T, torch.tensor([[1.0, 0.0]]), max_iter=1000)
    assert point.statuses == [Status.CYCLE] and point.period.item() == period


def test_a_cycle_is_followed_past_an_anchor_with_its_shortest_period() -> None:
    # A twelfth of the circle beside a part that alternates and fades; turns by 4 and 6 steps.
    twelve, four, six = (rotation(2 * torch.pi / n) for n in (12, 4, 6))
    for turn in (torch.block_diag(twelve, torch.tensor([[-0.5]])), torch.block_diag(four, six)):
        start = torch.ones(1, len(turn))
        point = find_fixed_point(lambda x, turn=turn: x @ turn.T, start, max_iter=1000)
        assert point.statuses == [Status.CYCLE] and point.period.item() == 12


@pytest.mark.parametrize("rate", [0.9, -0.9])
@pytest.mark.parametrize("solver", list_solvers())
def test_a_state_that_shrinks_to_zero_converges(rate: float, solver: str) -> None:
    point = find_fixed_point(lambda x: rate * x, torch.ones(1, 3), max_iter=500, solver=solver)
    assert point.converged.all() and point.state.norm() < 1e-6


def test_saved_codes_keep_their_meaning() -> None:
    codes = {"RUNNING": 0, "CONVERGED": 1, "OUT_OF_BUDGET": 2, "DIVERGED": 3}
    assert {s.name: int(s) for s in Status} == codes | {
        "STALLED": 4,
        "CYCLE": 5,
        "CONVERGED_TO_ROUNDING": 6,
    }


def test_a_start_that_is_not_finite_or_empty_is_refused() -> None:
    for start in (torch.tensor([0.0, float("nan")]), torch.zeros(0, 3)):
        with pytest.raises(InputError, match="x0"):
            find_fixed_point(torch.cos, start)


@pytest.mark.usefixtures("no_type_checks")
def test_an_integer_start_is_refused() -> None:
    with pytest.raises(InputError, match="x0"):
        find_fixed_point(lambda x: x, torch.tensor([1]))


def test_a_map_that_changes_shape_or_type_is_refused() -> None:
    with pytest.raises(InputError, match="keeps shape"):
        find_fixed_point(lambda x: x[:, :1], torch.zeros(2, 3))
    with pytest.raises(InputError, match="float64"):
        find_fixed_point(lambda x: x.double(), torch.zeros(2, 3))


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
    # Longer than any cycle that is looked for; the angle comes back after 355 steps.
    point = _search(f, x0, dtype, 400 if name == "irrational angle" else 200)
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
    assert narrow.statuses == [Status.CONVERGED_TO_ROUNDING]


def test_the_watch_keeps_one_state_however_long_it_looks() -> None:
    watch = _CycleWatch(torch.zeros(3, 5), 1e-6, 1e-8)
    for step in range(40):
        watch.see(torch.full((3, 5), float(step)))
    held = sum(v.numel() for v in vars(watch).values() if isinstance(v, Tensor))
    assert held == 3 * 5 + 5 * 3  # the anchor, and five numbers of each example


def test_names_give_solvers_and_instances_are_kept() -> None:
    assert [type(get_solver(name)).__name__.lower() for name in list_solvers()] == [
        name.replace("-", "") for name in list_solvers()
    ]
    mine = Anderson(window=2)
    assert get_solver(mine) is mine


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(InputError, match="'anderson'"):
        get_solver("andersen")


A = torch.tensor([[0.5, 0.4], [0.0, -0.3]])

MEASURES: dict[str, Callable[[Any, Any], torch.Tensor]] = {
    "find_fixed_point": lambda m, h: dynamics.find_fixed_point(m, h).state,
    "spectral_radius": lambda m, h: dynamics.spectral_radius(m, h).radius,
    "leading_eigenvalues": lambda m, h: dynamics.leading_eigenvalues(m, h, 1).values.abs(),
    "largest_singular_values": lambda m, h: dynamics.largest_singular_values(m, h, 1).values,
    "fixed_point_condition": lambda m, h: dynamics.fixed_point_condition(m, h).condition,
    "transient_growth": lambda m, h: dynamics.transient_growth(m, h).largest,
    "lyapunov_exponents": lambda m, h: dynamics.lyapunov_exponents(m, h, 40).values.exp(),
    "cycle_multipliers": lambda m, h: dynamics.cycle_multipliers(m, h, 2, 1).values.abs(),
}
EXPECTED = {"spectral_radius": 0.5, "leading_eigenvalues": 0.5, "cycle_multipliers": 0.25}


@pytest.mark.parametrize("name", sorted(MEASURES))
def test_a_model_and_its_inputs_are_its_map_and_state(name: str) -> None:
    assert next(iter(inspect.signature(getattr(dynamics, name)).parameters)) == "model"
    model, batch = LinearModel(A), batch_of_ones()
    iteration = bind(model, batch.inputs)
    limit = dynamics.find_fixed_point(iteration.step, iteration.h0).state
    at = iteration.h0 if name in ("find_fixed_point", "lyapunov_exponents") else limit
    wanted = MEASURES[name](iteration.step, at)
    for data in (batch, batch.inputs):
        torch.testing.assert_close(MEASURES[name](model, data), wanted, atol=1e-3, rtol=1e-3)
    if name in EXPECTED:
        known = torch.full_like(wanted, EXPECTED[name])
        torch.testing.assert_close(wanted, known, atol=1e-3, rtol=0)


@pytest.mark.parametrize("name", sorted(MEASURES))
def test_a_map_for_each_loop_is_refused(name: str) -> None:
    with pytest.raises(InputError) as error:
        MEASURES[name](Timed(), torch.zeros(1, 3, dtype=torch.long))
    assert error.value.what == "model"
