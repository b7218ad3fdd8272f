"""Systems whose updates fall in a known way: maps with chosen spectra, powers, slides, orbits."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from loopinterp.dynamics import (
    SettlingClass,
    SettlingClasses,
    SettlingCriteria,
    classify_settling,
)
from loopinterp.errors import InputError
from tests.dynamics.toys import random_state, rotation

SETTLING, MARGINAL, DRIFTING = SettlingClass
N_LOOPS = 60
LOOPS = torch.arange(N_LOOPS + 1, dtype=torch.float64)
FRAME = torch.linalg.qr(random_state(5, 5)).Q


def iterates(step: Callable[[Tensor], Tensor], start: Tensor, n_loops: int = N_LOOPS) -> Tensor:
    states = [start.double()]
    for _ in range(n_loops):
        states.append(step(states[-1]))
    return torch.stack(states)


def linear(*blocks: Tensor, n_loops: int = N_LOOPS) -> Tensor:
    """``x -> A x`` about a point away from zero, in coordinates that hide the blocks of A."""
    matrix = torch.block_diag(*blocks).double()
    frame = FRAME[: len(matrix)]
    path = iterates(lambda x: matrix @ x, torch.ones(len(matrix)), n_loops)
    return path @ frame + FRAME[4]


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
    "square root": (LOOPS.sqrt()[:, None], MARGINAL),
    "logarithm": ((1 + LOOPS).log()[:, None], MARGINAL),
    "logistic, 3, where period 2 is born": (logistic(3.0), MARGINAL),
    "constant speed": (iterates(lambda x: x + 0.3, torch.ones(2)), DRIFTING),
    "defective at 1": (linear(jordan(1.0)), DRIFTING),
    "circle": (linear(turning(1.0)), DRIFTING),
    "logistic, period 2": (logistic(3.2), DRIFTING),
    "logistic, period 4": (logistic(3.5), DRIFTING),
    "logistic, chaos": (logistic(3.9), DRIFTING),
    "growth": (linear(scalar(1.1)), DRIFTING),
    "moves every other loop": ((LOOPS // 2)[:, None], DRIFTING),
    "to a circle": (linear(turning(1.0)) * (1 + 0.5 * 0.9**LOOPS)[:, None], DRIFTING),
    "noise": (random_state(N_LOOPS + 1, 4), DRIFTING),
    "infinity": (torch.where(LOOPS > 50, float("inf"), 0.5**LOOPS)[:, None], DRIFTING),
    "NaN": (torch.where(LOOPS > 59, float("nan"), 0.5**LOOPS)[:, None], DRIFTING),
}
BEYOND_FLOAT32 = {name for name in KNOWN if "1e-6" in name}


def of(states: Tensor) -> tuple[SettlingClass, SettlingClasses]:
    found = classify_settling(states)
    return SettlingClass(int(found.settling)), found


@pytest.mark.parametrize("name", KNOWN)
def test_systems_of_known_class(name: str) -> None:
    states, expected = KNOWN[name]
    assert of(states)[0] is expected
    if name not in BEYOND_FLOAT32:
        assert of(states.float())[0] is expected


@given(st.floats(0.3, 0.985), st.floats(0, math.pi), st.booleans())
def test_the_rate_of_a_linear_map_is_its_spectral_radius(
    radius: float, angle: float, real: bool
) -> None:
    states = linear(scalar(radius) if real else turning(radius, angle))
    kind, found = of(states)
    assert kind is SETTLING
    if not found.rate.isnan():  # not yet at rest
        assert found.rate.item() == pytest.approx(radius, rel=1e-3)


def test_the_exponent_of_a_power_law() -> None:
    # x' = x - x^3 goes as (2 t)^(-1/2), so its updates as t^(-3/2).
    assert of(cubic(2000))[1].exponent.item() == pytest.approx(1.5, abs=0.02)
    assert of(LOOPS.sqrt()[:, None])[1].exponent.item() == pytest.approx(0.5, abs=0.02)


def test_an_update_too_small_for_the_rounding_of_the_state_is_none() -> None:
    slide = 1 + 1e-7 * LOOPS[:, None]
    assert of(slide)[0] is DRIFTING
    # In single precision that slide is at most a rounding error now and then.
    kind, found = of(slide.float())
    assert kind is SETTLING and found.rate.isnan() and found.exponent.isnan()


def test_a_slide_is_no_power_though_its_relative_residual_is() -> None:
    slide = LOOPS[:, None] + 1
    relative = (slide[1:] - slide[:-1]).norm(dim=-1) / slide[1:].norm(dim=-1)
    assert relative[-1] < relative[0] / 30 and of(slide)[0] is DRIFTING


def test_a_power_looks_geometric_to_a_short_look_and_not_to_a_long_one() -> None:
    # From 0.1 on it goes as (t + 50)^(-1/2), which is nearly straight over loops 12 to 24.
    states = cubic(200, start=0.1)
    assert of(states[:25])[0] is SETTLING and of(states)[0] is MARGINAL


def test_thresholds_move_the_lines() -> None:
    states = linear(scalar(0.999))
    assert of(states)[0] is MARGINAL
    loose = classify_settling(states, SettlingCriteria(fall=0.99))
    assert SettlingClass(int(loose.settling)) is SETTLING
    noisy = 1 + 1e-9 * random_state(N_LOOPS + 1, 4)
    assert of(noisy)[0] is DRIFTING
    coarse = classify_settling(noisy, SettlingCriteria(rounding=1e9))
    assert SettlingClass(int(coarse.settling)) is SETTLING


def test_a_batch_gives_what_its_trajectories_give_one_by_one() -> None:
    alone = [s for s, _ in KNOWN.values() if len(s) == N_LOOPS + 1]
    wide = torch.stack([torch.nn.functional.pad(s, (0, 5 - s.shape[1])) for s in alone], dim=1)
    together = classify_settling(wide[:, :, None].double())
    assert together.settling.shape == (len(alone), 1)
    for row, states in enumerate(alone):
        found = classify_settling(states.double())
        assert together.settling[row, 0] == found.settling
        torch.testing.assert_close(together.rate[row, 0], found.rate, equal_nan=True)
    assert {*together.settling.flatten().tolist()} == {*SettlingClass}
    assert [kind.label for kind in SettlingClass] == ["settling", "marginal", "drifting"]


@pytest.mark.parametrize("scale", [1e-12, 1e12])
def test_the_class_does_not_depend_on_scale(scale: float) -> None:
    for name in ("real", "cubic", "circle"):
        states, expected = KNOWN[name]
        assert of(scale * states)[0] is expected


def test_runs_too_short_and_criteria_out_of_range_are_refused() -> None:
    with pytest.raises(InputError, match="at least 13"):
        classify_settling(torch.ones(12, 3))
    with pytest.raises(InputError, match="window"):
        classify_settling(torch.ones(20, 3), SettlingCriteria(window=20))
    for wrong in ({"fit": 1.0}, {"fall": 0.0}, {"lasting": -1.0}, {"rounding": 0.0}, {"window": 3}):
        with pytest.raises(InputError, match=next(iter(wrong))):
            SettlingCriteria(**wrong)  # type: ignore[arg-type]
