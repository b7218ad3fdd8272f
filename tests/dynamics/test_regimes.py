"""Synthetic trajectories of each class, hidden in a larger space by a random rotation."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from loopinterp.core.errors import InputError
from loopinterp.dynamics import (
    Regime,
    RegimeCriteria,
    SettlingClass,
    SettlingClasses,
    SettlingCriteria,
    classify_regimes,
    classify_settling,
    run_loops,
)
from loopinterp.models import bind
from tests.dynamics.toys import MapModel, random_state, rotation

N_LOOPS, D_MODEL = 60, 16
LOOPS = torch.arange(N_LOOPS + 1, dtype=torch.float64)
GENERATOR = torch.Generator().manual_seed(0)
FRAME = torch.linalg.qr(torch.randn(D_MODEL, D_MODEL, generator=GENERATOR, dtype=torch.float64)).Q
GOLDEN = (math.sqrt(5) - 1) / 2


def _line(position: Tensor) -> Tensor:
    return position[:, None] * FRAME[0] + 2 * FRAME[1]


def _turn(turns_per_loop: float, radius: Tensor | float = 1.0, flat: float = 1.0) -> Tensor:
    angle = 2 * math.pi * turns_per_loop * LOOPS
    x, y = radius * angle.cos(), flat * radius * angle.sin()
    return x[:, None] * FRAME[0] + y[:, None] * FRAME[1] + 3 * FRAME[2]


def _visit(n_points: int) -> Tensor:
    points = torch.randn(n_points, D_MODEL, generator=GENERATOR, dtype=torch.float64)
    return points[LOOPS.long() % n_points]


def _noise(size: float) -> Tensor:
    return size * torch.randn(N_LOOPS + 1, D_MODEL, generator=GENERATOR, dtype=torch.float64)


COMING_TO_REST = {
    "geometric, fast": _line(0.5**LOOPS),
    "geometric, slow": _line(0.93**LOOPS),
    "alternating": _line((-0.95) ** LOOPS),
    "halved each loop, to 0": 0.5 ** LOOPS[:, None] * FRAME[0],
    "to 0, slowly": 0.85 ** LOOPS[:, None] * FRAME[0],
    "spiral": _turn(0.11, radius=0.97**LOOPS),
    "slow spiral": _turn(0.11, radius=0.99**LOOPS),
    "at rest": _line(torch.ones_like(LOOPS)),
    "zero": torch.zeros(N_LOOPS + 1, D_MODEL, dtype=torch.float64),
    "at rest but for rounding": _line(torch.ones_like(LOOPS)) + _noise(1e-6),
}
RETURNING = {
    "period 2": (_turn(1 / 2), 2),
    "period 3": (_turn(1 / 3), 3),
    "period 7": (_turn(1 / 7), 7),
    "period 12": (_turn(1 / 12), 12),
    "3/7 of a turn": (_turn(3 / 7), 7),
    "4 points": (_visit(4), 4),
    "11 points": (_visit(11), 11),
    "5 points and noise": (_visit(5) + _noise(0.01), 5),
}
# An irrational turn never returns: its period is 1 over the turn, taken the short way round.
TURNING = {
    "golden": (_turn(GOLDEN), 1 / (1 - GOLDEN)),
    "root of two": (_turn(math.sqrt(2) - 1), 1 / (math.sqrt(2) - 1)),
    "golden ellipse": (_turn(GOLDEN, flat=0.3), 1 / (1 - GOLDEN)),
}
DRIFTS = {
    "constant speed": _line(LOOPS),
    "square root": _line(LOOPS.sqrt()),
    "logarithm": _line((1 + LOOPS).log()),
    "to 0 as a power of the loop": (1 + LOOPS[:, None]) ** -0.5 * FRAME[0],
    "with noise": _line(LOOPS) + _noise(0.05),
}
GROWING = {
    "slowly": _line(1.1**LOOPS),
    "fast": _line(2.0**LOOPS),
    "alternating": _line((-1.5) ** LOOPS),
    "outward spiral": _turn(0.11, radius=1.05**LOOPS),
    "ends in infinity": torch.where(LOOPS[:, None] > 50, float("inf"), _line(LOOPS)),
    "ends in NaN": torch.where(LOOPS[:, None] > 59, float("nan"), _line(0.5**LOOPS)),
}
IRREGULAR = {"noise": _noise(1.0), "random walk": _noise(1.0).cumsum(dim=0)}


def _regime(states: Tensor) -> Regime:
    return Regime(int(classify_regimes(states).regime))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", COMING_TO_REST)
def test_fixed_points(name: str, dtype: torch.dtype) -> None:
    assert _regime(COMING_TO_REST[name].to(dtype)) is Regime.FIXED_POINT


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", RETURNING)
def test_orbits_that_return_have_a_whole_period(name: str, dtype: torch.dtype) -> None:
    states, period = RETURNING[name]
    regimes = classify_regimes(states.to(dtype))
    assert Regime(int(regimes.regime)) is Regime.ORBIT
    assert regimes.period.item() == period


@pytest.mark.parametrize("name", TURNING)
def test_irrational_rotations_are_orbits_with_the_period_of_their_angle(name: str) -> None:
    states, period = TURNING[name]
    regimes = classify_regimes(states)
    assert Regime(int(regimes.regime)) is Regime.ORBIT
    assert regimes.period.item() == pytest.approx(period, rel=0.01)


@pytest.mark.parametrize("name", DRIFTS)
def test_drifts(name: str) -> None:
    assert _regime(DRIFTS[name]) is Regime.DRIFT


@pytest.mark.parametrize("name", GROWING)
def test_divergence(name: str) -> None:
    assert _regime(GROWING[name]) is Regime.DIVERGENCE


@pytest.mark.parametrize("name", IRREGULAR)
def test_what_is_none_of_these_is_irregular(name: str) -> None:
    assert _regime(IRREGULAR[name]) is Regime.IRREGULAR


def test_each_class_has_a_name_of_its_own() -> None:
    kinds = (
        COMING_TO_REST["at rest"],
        _turn(1 / 3),
        _line(LOOPS),
        GROWING["fast"],
        IRREGULAR["noise"],
    )
    labels = [_regime(states).label for states in kinds]
    assert labels == ["fixed point", "orbit", "drift", "divergence", "irregular"]


def test_the_logistic_map_goes_from_rest_through_orbits_to_chaos() -> None:
    expected = {2.8: (Regime.FIXED_POINT, None), 3.2: (Regime.ORBIT, 2), 3.5: (Regime.ORBIT, 4)}
    expected[3.9] = (Regime.IRREGULAR, None)
    for growth, (regime, period) in expected.items():
        model = MapModel(lambda h, e, growth=growth: growth * h * (1 - h))
        model.initial_state = lambda e: torch.full_like(e, 0.3)
        states = run_loops(bind(model, torch.zeros(1, 1, dtype=torch.int64)), 400)
        regimes = classify_regimes(states, RegimeCriteria(window=80))
        assert Regime(int(regimes.regime)) is regime, growth
        assert period is None or regimes.period.item() == period


def test_a_batch_gives_what_its_trajectories_give_one_by_one() -> None:
    groups = (COMING_TO_REST, DRIFTS, GROWING, IRREGULAR)
    all_states = [s for group in groups for s in group.values()]
    all_states += [s for s, _ in [*RETURNING.values(), *TURNING.values()]]
    batch = torch.stack(all_states, dim=1)[:, :, None]
    full = classify_regimes(batch)
    assert full.regime.shape == (len(all_states), 1)
    for row, states in enumerate(all_states):
        single = classify_regimes(states)
        assert full.regime[row, 0] == single.regime
        torch.testing.assert_close(full.period[row, 0], single.period, equal_nan=True)
    # In float64 nothing is at rounding.
    assert {*full.regime.unique().tolist()} == {*Regime} - {Regime.CONVERGED_TO_ROUNDING}


@pytest.mark.parametrize("scale", [1e-12, 1e12])
def test_the_class_does_not_depend_on_scale(scale: float) -> None:
    for name, (states, period) in RETURNING.items():
        assert classify_regimes(scale * states).period.item() == period, name
    assert _regime(scale * DRIFTS["constant speed"]) is Regime.DRIFT
    assert _regime(scale * COMING_TO_REST["spiral"]) is Regime.FIXED_POINT


def test_runs_too_short_and_criteria_out_of_range_are_refused() -> None:
    with pytest.raises(InputError, match="states"):
        classify_regimes(torch.ones(12, 3))
    with pytest.raises(InputError, match="window"):
        classify_regimes(torch.ones(20, 3), RegimeCriteria(window=20))
    with pytest.raises(InputError, match="window"):
        RegimeCriteria(window=2)
    with pytest.raises(InputError, match="straight"):
        RegimeCriteria(straight=0.0)


SETTLING, MARGINAL, DRIFTING = SettlingClass
FALL = torch.arange(N_LOOPS + 1, dtype=torch.float64)
FALL_FRAME = torch.linalg.qr(random_state(5, 5)).Q


def iterates(step: Callable[[Tensor], Tensor], start: Tensor, n_loops: int = N_LOOPS) -> Tensor:
    states = [start.double()]
    for _ in range(n_loops):
        states.append(step(states[-1]))
    return torch.stack(states)


def linear(*blocks: Tensor, n_loops: int = N_LOOPS) -> Tensor:
    """``x -> A x`` about a point away from zero, in coordinates that hide the blocks of A."""
    matrix = torch.block_diag(*blocks).double()
    frame = FALL_FRAME[: len(matrix)]
    path = iterates(lambda x: matrix @ x, torch.ones(len(matrix)), n_loops)
    return path @ frame + FALL_FRAME[4]


def scalar(value: float) -> Tensor:
    return torch.tensor([[value]])


def turning(radius: float, angle: float = 0.7) -> Tensor:
    return rotation(angle).double() * radius


def jordan(value: float) -> Tensor:
    return torch.tensor([[value, 1.0], [0.0, value]])


def cubic(n_loops: int = N_LOOPS, start: float = 0.5) -> Tensor:
    return iterates(lambda x: x - x**3, torch.tensor([start]), n_loops)


def logistic(growth: float, n_loops: int = 400) -> Tensor:
    return iterates(lambda x: growth * x * (1 - x), torch.tensor([0.3]), n_loops)


KNOWN: dict[str, tuple[Tensor, SettlingClass]] = {
    "real": (linear(scalar(0.9), scalar(0.5)), SETTLING),
    "real, negative": (linear(scalar(-0.95)), SETTLING),
    "spiral": (linear(turning(0.97)), SETTLING),
    "slow spiral": (linear(turning(0.99)), SETTLING),
    "spiral beside real": (linear(turning(0.95), scalar(0.3)), SETTLING),
    "defective": (linear(jordan(0.9)), SETTLING),
    "defective, slow": (linear(jordan(0.97), n_loops=200), SETTLING),
    "at rest": (torch.ones(N_LOOPS + 1, 3), SETTLING),
    "zero": (torch.zeros(N_LOOPS + 1, 3), SETTLING),
    "logistic, 2.8": (logistic(2.8), SETTLING),
    "logistic, 2.95, on its way": (logistic(2.95, 60), SETTLING),
    "real, 1 - 1e-6": (linear(scalar(1 - 1e-6)), MARGINAL),
    "negative, 1 - 1e-6": (linear(scalar(-1 + 1e-6)), MARGINAL),
    "complex, 1 - 1e-6": (linear(turning(1 - 1e-6)), MARGINAL),
    "cubic": (cubic(), MARGINAL),
    "square root": (FALL.sqrt()[:, None], MARGINAL),
    "logarithm": ((1 + FALL).log()[:, None], MARGINAL),
    "logistic, 3, where period 2 is born": (logistic(3.0), MARGINAL),
    "constant speed": (iterates(lambda x: x + 0.3, torch.ones(2)), DRIFTING),
    "defective at 1": (linear(jordan(1.0)), DRIFTING),
    "circle": (linear(turning(1.0)), DRIFTING),
    "logistic, period 2": (logistic(3.2), DRIFTING),
    "logistic, period 4": (logistic(3.5), DRIFTING),
    "logistic, chaos": (logistic(3.9), DRIFTING),
    "growth": (linear(scalar(1.1)), DRIFTING),
    "moves every other loop": ((FALL // 2)[:, None], DRIFTING),
    "to a circle": (
        linear(turning(1.0)) * (1 + 0.5 * 0.9**FALL)[:, None],
        DRIFTING,
    ),
    "noise": (random_state(N_LOOPS + 1, 4), DRIFTING),
    "infinity": (
        torch.where(FALL > 50, float("inf"), 0.5**FALL)[:, None],
        DRIFTING,
    ),
    "NaN": (
        torch.where(FALL > 59, float("nan"), 0.5**FALL)[:, None],
        DRIFTING,
    ),
}
BEYOND_FLOAT32 = {name for name in KNOWN if "1e-6" in name}


def settling_of(states: Tensor) -> tuple[SettlingClass, SettlingClasses]:
    classes = classify_settling(states)
    return SettlingClass(int(classes.settling)), classes


@pytest.mark.parametrize("name", KNOWN)
def test_systems_of_known_class(name: str) -> None:
    states, expected = KNOWN[name]
    assert settling_of(states)[0] is expected
    if name not in BEYOND_FLOAT32:
        assert settling_of(states.float())[0] is expected


@given(st.floats(0.3, 0.985), st.floats(0, math.pi), st.booleans())
def test_the_rate_of_a_linear_map_is_its_spectral_radius(
    radius: float, angle: float, real: bool
) -> None:
    states = linear(scalar(radius) if real else turning(radius, angle))
    kind, classes = settling_of(states)
    assert kind is SETTLING
    if not classes.rate.isnan():  # not yet at rest
        assert classes.rate.item() == pytest.approx(radius, rel=1e-3)


def test_the_exponent_of_a_power_law() -> None:
    # x' = x - x^3 goes as (2 t)^(-1/2), so its updates as t^(-3/2).
    assert settling_of(cubic(2000))[1].exponent.item() == pytest.approx(1.5, abs=0.02)
    assert settling_of(FALL.sqrt()[:, None])[1].exponent.item() == pytest.approx(0.5, abs=0.02)


def test_an_update_too_small_for_the_rounding_of_the_state_is_none() -> None:
    slide = 1 + 1e-7 * FALL[:, None]
    assert settling_of(slide)[0] is DRIFTING
    # In single precision that slide is at most a rounding error now and then.
    kind, classes = settling_of(slide.float())
    assert kind is SETTLING and classes.rate.isnan() and classes.exponent.isnan()


def test_a_slide_is_no_power_though_its_relative_residual_is() -> None:
    slide = FALL[:, None] + 1
    relative = (slide[1:] - slide[:-1]).norm(dim=-1) / slide[1:].norm(dim=-1)
    assert relative[-1] < relative[0] / 30 and settling_of(slide)[0] is DRIFTING


def test_a_power_looks_geometric_to_a_short_look_and_not_to_a_long_one() -> None:
    # From 0.1 on it goes as (t + 50)^(-1/2), which is nearly straight over loops 12 to 24.
    states = cubic(200, start=0.1)
    assert settling_of(states[:25])[0] is SETTLING and settling_of(states)[0] is MARGINAL


def test_thresholds_move_the_lines() -> None:
    states = linear(scalar(0.999))
    assert settling_of(states)[0] is MARGINAL
    loose = classify_settling(states, SettlingCriteria(fall=0.99))
    assert SettlingClass(int(loose.settling)) is SETTLING
    noisy = 1 + 1e-9 * random_state(N_LOOPS + 1, 4)
    assert settling_of(noisy)[0] is DRIFTING
    coarse = classify_settling(noisy, SettlingCriteria(rounding=1e9))
    assert SettlingClass(int(coarse.settling)) is SETTLING


def test_a_batch_gives_what_its_trajectories_give_one_by_one_of_falling_updates() -> None:
    trajectories = [s for s, _ in KNOWN.values() if len(s) == N_LOOPS + 1]
    wide = torch.stack(
        [torch.nn.functional.pad(s, (0, 5 - s.shape[1])) for s in trajectories], dim=1
    )
    batched = classify_settling(wide[:, :, None].double())
    assert batched.settling.shape == (len(trajectories), 1)
    for row, states in enumerate(trajectories):
        classes = classify_settling(states.double())
        assert batched.settling[row, 0] == classes.settling
        torch.testing.assert_close(batched.rate[row, 0], classes.rate, equal_nan=True)
    assert {*batched.settling.flatten().tolist()} == {*SettlingClass}
    assert [kind.label for kind in SettlingClass] == ["settling", "marginal", "drifting"]


@pytest.mark.parametrize("scale", [1e-12, 1e12])
def test_the_class_does_not_depend_on_scale_of_falling_updates(scale: float) -> None:
    for name in ("real", "cubic", "circle"):
        states, expected = KNOWN[name]
        assert settling_of(scale * states)[0] is expected


def test_runs_too_short_and_criteria_out_of_range_are_refused_of_falling_updates() -> None:
    with pytest.raises(InputError, match="states"):
        classify_settling(torch.ones(12, 3))
    with pytest.raises(InputError, match="window"):
        classify_settling(torch.ones(20, 3), SettlingCriteria(window=20))
    for wrong in ({"fit": 1.0}, {"fall": 0.0}, {"lasting": -1.0}, {"rounding": 0.0}, {"window": 3}):
        with pytest.raises(InputError, match=next(iter(wrong))):
            SettlingCriteria(**wrong)  # type: ignore[arg-type]


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize("criteria", [5, {"window": 8}, "other"])
def test_criteria_of_another_kind_are_refused(criteria: object) -> None:
    states = torch.randn(20, 2, generator=torch.Generator().manual_seed(0))
    for classify, other in (
        (classify_regimes, SettlingCriteria()),
        (classify_settling, RegimeCriteria()),
    ):
        with pytest.raises(InputError) as error:
            classify(states, other if criteria == "other" else criteria)  # pyright: ignore[reportArgumentType]
        assert error.value.what.startswith("criteria")
