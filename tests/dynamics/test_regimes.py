"""Synthetic trajectories of each class, hidden in a larger space by a random rotation."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from loopinterp.dynamics import Regime, RegimeCriteria, classify_regimes, run_loops
from loopinterp.errors import InputError
from loopinterp.models import bind
from tests.dynamics.toys import MapModel

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


SETTLING = {
    "geometric, fast": _line(0.5**LOOPS),
    "geometric, slow": _line(0.93**LOOPS),
    "alternating": _line((-0.95) ** LOOPS),
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
DRIFTING = {
    "constant speed": _line(LOOPS),
    "square root": _line(LOOPS.sqrt()),
    "logarithm": _line((1 + LOOPS).log()),
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
@pytest.mark.parametrize("name", SETTLING)
def test_fixed_points(name: str, dtype: torch.dtype) -> None:
    assert _regime(SETTLING[name].to(dtype)) is Regime.FIXED_POINT


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", RETURNING)
def test_orbits_that_return_have_a_whole_period(name: str, dtype: torch.dtype) -> None:
    states, period = RETURNING[name]
    found = classify_regimes(states.to(dtype))
    assert Regime(int(found.regime)) is Regime.ORBIT
    assert found.period.item() == period


@pytest.mark.parametrize("name", TURNING)
def test_irrational_rotations_are_orbits_with_the_period_of_their_angle(name: str) -> None:
    states, period = TURNING[name]
    found = classify_regimes(states)
    assert Regime(int(found.regime)) is Regime.ORBIT
    assert found.period.item() == pytest.approx(period, rel=0.01)


@pytest.mark.parametrize("name", DRIFTING)
def test_drifts(name: str) -> None:
    assert _regime(DRIFTING[name]) is Regime.DRIFT


@pytest.mark.parametrize("name", GROWING)
def test_divergence(name: str) -> None:
    assert _regime(GROWING[name]) is Regime.DIVERGENCE


@pytest.mark.parametrize("name", IRREGULAR)
def test_what_is_none_of_these_is_irregular(name: str) -> None:
    assert _regime(IRREGULAR[name]) is Regime.IRREGULAR


def test_each_class_has_a_name_of_its_own() -> None:
    kinds = SETTLING["at rest"], _turn(1 / 3), _line(LOOPS), GROWING["fast"], IRREGULAR["noise"]
    labels = [_regime(states).label for states in kinds]
    assert labels == ["fixed point", "orbit", "drift", "divergence", "irregular"]


def test_the_logistic_map_goes_from_rest_through_orbits_to_chaos() -> None:
    expected = {2.8: (Regime.FIXED_POINT, None), 3.2: (Regime.ORBIT, 2), 3.5: (Regime.ORBIT, 4)}
    expected[3.9] = (Regime.IRREGULAR, None)
    for growth, (regime, period) in expected.items():
        model = MapModel(lambda h, e, growth=growth: growth * h * (1 - h))
        model.initial_state = lambda e: torch.full_like(e, 0.3)
        states = run_loops(bind(model, torch.zeros(1, 1, dtype=torch.int64)), 400)
        found = classify_regimes(states, RegimeCriteria(window=80))
        assert Regime(int(found.regime)) is regime, growth
        assert period is None or found.period.item() == period


def test_a_batch_gives_what_its_trajectories_give_one_by_one() -> None:
    groups = (SETTLING, DRIFTING, GROWING, IRREGULAR)
    all_states = [s for group in groups for s in group.values()]
    all_states += [s for s, _ in [*RETURNING.values(), *TURNING.values()]]
    together = torch.stack(all_states, dim=1)[:, :, None]
    whole = classify_regimes(together)
    assert whole.regime.shape == (len(all_states), 1)
    for row, states in enumerate(all_states):
        alone = classify_regimes(states)
        assert whole.regime[row, 0] == alone.regime
        torch.testing.assert_close(whole.period[row, 0], alone.period, equal_nan=True)
    assert set(whole.regime.unique().tolist()) == set(Regime)


@pytest.mark.parametrize("scale", [1e-12, 1e12])
def test_the_class_does_not_depend_on_scale(scale: float) -> None:
    for name, (states, period) in RETURNING.items():
        assert classify_regimes(scale * states).period.item() == period, name
    assert _regime(scale * DRIFTING["constant speed"]) is Regime.DRIFT
    assert _regime(scale * SETTLING["spiral"]) is Regime.FIXED_POINT


def test_runs_too_short_and_criteria_out_of_range_are_refused() -> None:
    with pytest.raises(InputError, match="at least 13"):
        classify_regimes(torch.ones(12, 3))
    with pytest.raises(InputError, match="window"):
        classify_regimes(torch.ones(20, 3), RegimeCriteria(window=20))
    with pytest.raises(InputError, match="window"):
        RegimeCriteria(window=2)
    with pytest.raises(InputError, match="straight"):
        RegimeCriteria(straight=0.0)
