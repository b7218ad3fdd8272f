"""Functions of one map take a model and its inputs, or a map and a state: the same numbers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from loopinterp import dynamics
from loopinterp.errors import InputError
from loopinterp.models import bind
from tests.dynamics.toys import LinearModel, batch_of_ones
from tests.models.timed_toys import Timed

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
    "non_normality": lambda m, h: dynamics.non_normality(m, h).ratio,
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
