from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from loopinterp.core.errors import InputError
from loopinterp.core.results import load_result
from loopinterp.dynamics import LocalStabilityResult, Regime, local_stability_study
from tests.dynamics.toys import LinearModel, MapModel, batch_of_ones, rotation

QUICK: dict[str, Any] = {"k": 2, "lyapunov_loops": 16, "growth_loops": 4}
SHEAR = torch.tensor([[0.6, 1.0], [0.0, 0.3]])


def test_a_linear_model_has_its_matrix_at_its_limit_and_everywhere_else(tmp_path) -> None:
    result = local_stability_study(
        LinearModel(SHEAR.double(), threshold=1.0), batch_of_ones(2, 2), n_loops=60, **QUICK
    )
    data, matrix = result.data, SHEAR.double().numpy()
    assert data["turn"].values.tolist() == [1, 1] and data["right"].all()
    assert (data["regime"] == Regime.FIXED_POINT).all()
    np.testing.assert_allclose(result.radius(), 0.6, rtol=1e-6)
    sigma = np.linalg.svd(matrix, compute_uv=False)[0]
    np.testing.assert_allclose(data["singular_value"].isel(singular=0), sigma, rtol=1e-6)
    np.testing.assert_allclose(result.non_normality(), sigma / 0.6, rtol=1e-6)
    np.testing.assert_allclose(result.condition(), np.linalg.cond(np.eye(2) - matrix), rtol=1e-6)
    norms = [np.linalg.norm(np.linalg.matrix_power(matrix, t), 2) for t in range(5)]
    np.testing.assert_allclose(data["growth"], max(norms), rtol=1e-2)
    assert data["solve_known"].all() and data["growth_closed"].all()
    np.testing.assert_allclose(
        data["lyapunov"].sel(estimate="value"), math.log(0.6), rtol=0.03, atol=0
    )
    loaded = load_result(result.save(tmp_path))
    assert isinstance(loaded, LocalStabilityResult) and loaded.data.identical(result.data)


def test_a_cycle_has_multipliers_and_the_controls_the_same_number_of_loops() -> None:
    def logistic(h: Tensor, e: Tensor) -> Tensor:
        return 3.2 * h * (1 - h)

    model = MapModel(logistic, d_model=2)
    model.initial_state = lambda e: torch.full_like(e, 0.3)  # type: ignore[method-assign]
    result = local_stability_study(model, batch_of_ones(2, 1, ignored=0), n_loops=80, **QUICK)
    assert result.data["turn"].values.tolist() == [2, 2]
    assert (result.data["regime"] == Regime.ORBIT).all()
    np.testing.assert_allclose(result.radius().sel(where="limit"), 0.16, rtol=1e-3)
    after = 3.2 * 0.3 * 0.7
    at_start = abs(3.2**2 * (1 - 0.6) * (1 - 2 * after))
    np.testing.assert_allclose(result.radius().sel(where="start"), at_start, rtol=1e-4)


def test_where_nothing_was_found_nothing_is_said_but_the_exponent() -> None:
    turn = rotation(1.0)

    def step(h: Tensor, e: Tensor) -> Tensor:
        return h @ turn.T

    model = MapModel(step)
    model.initial_state = lambda e: e.clone()  # type: ignore[method-assign]
    result = local_stability_study(model, batch_of_ones(2, 1, ignored=0), n_loops=30, **QUICK)
    data = result.data
    assert not result.found.any() and (data["regime"] == Regime.ORBIT).all()
    for name in ("eigenvalue_real", "singular_value", "solve_smallest", "growth"):
        assert data[name].isnull().all(), name
    assert not data["solve_known"].any() and not data["growth_closed"].any()
    np.testing.assert_allclose(data["lyapunov"].sel(estimate="value"), 0, atol=1e-5)


def test_a_run_that_diverges_has_no_limit_and_no_exponent() -> None:
    result = local_stability_study(
        MapModel(lambda h, e: (h + e) ** 2 + 1), batch_of_ones(2, 1, ignored=0), **QUICK
    )
    assert not result.found.any() and (result.data["regime"] == Regime.DIVERGENCE).all()
    assert result.data["lyapunov"].isnull().all()
    assert result.findings()[-1].value == "" and result.findings()[-1].good is False


def test_random_states_have_the_norms_of_the_limit_and_come_from_the_seed() -> None:
    def step(h: Tensor, e: Tensor) -> Tensor:
        return torch.tanh(0.5 * h + e)

    results = [
        local_stability_study(MapModel(step), batch_of_ones(2, 2), n_loops=20, seed=s, **QUICK)
        for s in (0, 0, 1)
    ]
    assert results[0].data.identical(results[1].data)
    limit, random = (
        [r.radius().sel(where=name).values for r in results] for name in ("limit", "random")
    )
    np.testing.assert_allclose(limit[0], limit[2], rtol=1e-3)
    assert (np.abs(random[0] - random[2]) > 1e-3).any()


@pytest.mark.parametrize("option", ["k", "n_loops", "limit_tol", "lyapunov_loops", "growth_loops"])
def test_bad_options_are_refused(option: str) -> None:
    model = LinearModel(0.5 * torch.eye(2))
    with pytest.raises(InputError) as caught:
        local_stability_study(model, batch_of_ones(), **QUICK | {option: 0})
    assert caught.value.what == option
