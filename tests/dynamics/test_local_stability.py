from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from loopinterp.core.errors import InputError
from loopinterp.core.results import load_result
from loopinterp.dynamics import (
    LocalStabilityResult,
    Regime,
    contraction_rates,
    largest_singular_values,
    local_stability_study,
    lyapunov_exponents,
    relative_residual,
    run_loops,
    settling_time,
    spectral_radius,
    transient_growth,
)
from loopinterp.models import bind
from tests.dynamics.toys import (
    LinearModel,
    MapModel,
    batch_of_ones,
    linear,
    random_state,
    rotation,
    small_transformer,
)

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
    assert not result.has_limit.any() and (data["regime"] == Regime.ORBIT).all()
    for name in ("eigenvalue_real", "singular_value", "solve_smallest", "growth"):
        assert data[name].isnull().all(), name
    assert not data["solve_known"].any() and not data["growth_closed"].any()
    np.testing.assert_allclose(data["lyapunov"].sel(estimate="value"), 0, atol=1e-5)


def test_a_run_that_diverges_has_no_limit_and_no_exponent() -> None:
    result = local_stability_study(
        MapModel(lambda h, e: (h + e) ** 2 + 1), batch_of_ones(2, 1, ignored=0), **QUICK
    )
    assert not result.has_limit.any() and (result.data["regime"] == Regime.DIVERGENCE).all()
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


def _zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.float64)


def test_growth_of_a_transformer_is_the_norm_of_powers_of_its_dense_jacobian() -> None:
    iteration = small_transformer(causal=False).select(slice(0, 1))
    h = random_state(*iteration.h0.shape)
    jacobian = torch.autograd.functional.jacobian(iteration.step, h)
    assert isinstance(jacobian, torch.Tensor)
    dense = jacobian.reshape(1, h.numel(), h.numel())
    growth = transient_growth(iteration.step, h, 4, tol=1e-3)
    powers = [torch.linalg.matrix_power(dense, t) for t in range(len(growth.norms))]
    norms = torch.stack([torch.linalg.matrix_norm(power, 2) for power in powers])
    assert len(norms) > 2
    torch.testing.assert_close(growth.norms, norms, rtol=1e-3, atol=0)


def test_transient_growth_of_a_jordan_block_and_where_it_is_closed() -> None:
    block = 0.7 * torch.eye(4, dtype=torch.float64) + torch.diag(
        torch.ones(3, dtype=torch.float64), 1
    )
    exact = [
        torch.linalg.matrix_norm(torch.linalg.matrix_power(block, t), 2).item() for t in range(40)
    ]
    growth = transient_growth(linear(block), _zeros(1, 4), 40)
    assert growth.largest.item() == pytest.approx(max(exact), rel=0.01)
    assert growth.at.item() == int(np.argmax(exact)) and growth.closed.all()
    assert len(growth.norms) == 1 + next(t for t, norm in enumerate(exact) if norm < 1)
    short = transient_growth(linear(block), _zeros(1, 4), 3)
    assert not short.closed.any() and short.at.item() == 3
    calm = transient_growth(linear(0.5 * torch.eye(2).double()), _zeros(1, 2))
    assert (calm.largest.item(), calm.at.item(), len(calm.norms)) == (1.0, 0, 2)


def test_bad_options_of_growth_are_refused() -> None:
    with pytest.raises(InputError, match="tol"):
        transient_growth(torch.cos, torch.zeros(1, 2), tol=0.0)
    with pytest.raises(InputError, match="max_vectors"):
        transient_growth(torch.cos, torch.zeros(1, 2), max_vectors=0)
    with pytest.raises(InputError, match="state"):
        transient_growth(torch.cos, torch.full((1, 2), torch.inf))
    with pytest.raises(InputError, match="n_loops"):
        transient_growth(torch.cos, torch.zeros(1, 2), 0)


_BASIS = torch.linalg.qr(random_state(4, 4))[0]


def _turned(matrix: Tensor) -> Tensor:
    return _BASIS @ matrix.double() @ _BASIS.T


SYSTEMS: dict[str, tuple[Tensor, float]] = {
    "real": (_turned(torch.diag(torch.tensor([0.8, -0.5, 0.3, 0.1]))), 0.8),
    "complex": (_turned(torch.block_diag(rotation(0.9, 0.85), rotation(2.0, 0.4))), 0.85),
    "non-normal": (
        _turned(torch.diag(torch.tensor([0.8, 0.6, 0.4, 0.2])) + torch.ones(4, 4).triu(1)),
        0.8,
    ),
    "defective": (_turned(0.7 * torch.eye(4) + torch.diag(torch.tensor([1.0, 0.0, 0.0]), 1)), 0.7),
}
"""Linear loops of known spectral radius."""


@pytest.mark.parametrize("name", SYSTEMS)
def test_linear_systems_to_one_percent_of_the_exact_numbers(name: str) -> None:
    matrix, radius = SYSTEMS[name]
    step, at = linear(matrix), torch.zeros(1, 4, dtype=torch.float64)
    assert spectral_radius(step, at).radius.item() == pytest.approx(radius, rel=0.01)
    sigma = np.linalg.svd(matrix.numpy(), compute_uv=False)
    found = largest_singular_values(step, at, 4).values[0]
    np.testing.assert_allclose(found, sigma, rtol=0.01)
    # A vector of a defective block grows by a factor t besides: log t / t is left of it.
    exponent = lyapunov_exponents(step, at, 300, discard=300)
    assert exponent.values.item() == pytest.approx(math.log(radius), rel=0.01)

    model = LinearModel(matrix)
    iteration = bind(model, torch.ones(1, 1, dtype=torch.int64))
    states = run_loops(iteration, 300)
    limit = torch.linalg.solve(torch.eye(4, dtype=torch.float64) - matrix, iteration.e[0, 0])
    powers = [np.linalg.matrix_power(matrix.numpy(), t) @ limit.numpy() for t in range(301)]
    exact = limit.numpy() - np.array(powers)
    moved = np.linalg.norm(exact[1:] - exact[:-1], axis=1) / np.linalg.norm(exact[1:], axis=1)
    residual = relative_residual(states)
    np.testing.assert_allclose(residual[:40, 0, 0], moved[:40], rtol=0.01)
    settled = 1 + int(np.flatnonzero(moved >= 0.03).max()) + 1
    assert settling_time(residual, threshold=0.03).item() == settled
    if name != "defective":  # whose updates shrink by lambda (1 + 1/t): 1% off at t = 100
        rate = contraction_rates(states[:81].flatten(2), last=30).asymptotic
        assert rate.item() == pytest.approx(radius, rel=0.01)


def test_all_exponents_of_a_fixed_point_are_logarithms_of_its_eigenvalues() -> None:
    matrix, _ = SYSTEMS["non-normal"]
    exponents = lyapunov_exponents(
        linear(matrix), torch.zeros(2, 4, dtype=torch.float64), 40, 4, discard=60
    )
    expected = torch.tensor([0.8, 0.6, 0.4, 0.2], dtype=torch.float64).log()
    torch.testing.assert_close(exponents.values, expected.expand(2, 4), rtol=1e-4, atol=1e-5)
    assert (exponents.high - exponents.low < 1e-3).all()


def test_chaos_of_the_logistic_map_is_log_two_within_its_interval() -> None:
    start = torch.rand(256, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    exponents = lyapunov_exponents(lambda x: 4 * x * (1 - x), start, 200)
    assert exponents.values.mean().item() == pytest.approx(math.log(2), abs=0.007)
    covered = (exponents.low <= math.log(2)) & (math.log(2) <= exponents.high)
    assert 0.8 < covered.double().mean() <= 1


def test_chaos_and_area_of_the_henon_map() -> None:
    def henon(z: Tensor) -> Tensor:
        return torch.stack([1 - 1.4 * z[:, 0] ** 2 + z[:, 1], 0.3 * z[:, 0]], dim=1)

    start = 0.1 * torch.rand(256, 2, generator=torch.Generator().manual_seed(0)).double()
    exponents = lyapunov_exponents(henon, start, 160, 2, discard=50)
    assert exponents.values[:, 0].mean().item() == pytest.approx(0.419, abs=0.005)
    # The map shrinks every area by .3, so the two exponents add up to its logarithm.
    total = exponents.values.sum(1)
    torch.testing.assert_close(total, torch.full_like(total, math.log(0.3)))


def test_a_cycle_has_its_multiplier_over_its_period() -> None:
    start = torch.full((1, 1), 0.3, dtype=torch.float64)
    exponents = lyapunov_exponents(lambda x: 3.2 * x * (1 - x), start, 200, discard=200)
    assert exponents.values.item() == pytest.approx(math.log(0.16) / 2, rel=1e-3)


def test_each_example_has_its_own_and_what_diverges_or_vanishes_is_said() -> None:
    rates = torch.tensor([0.5, 2.0, 0.0, 4.0], dtype=torch.float64)[:, None]

    def step(x: Tensor) -> Tensor:
        return torch.where(rates == 4, x**2, rates * x)

    exponents = lyapunov_exponents(step, torch.full((4, 1), 3.0, dtype=torch.float64), 40)
    assert exponents.values[:2, 0].exp().tolist() == pytest.approx([0.5, 2.0])
    assert exponents.values[2].item() == -math.inf
    for ends in (exponents.values, exponents.low, exponents.high):
        assert ends[3].isnan().all() and not ends[:3].isnan().any()


def test_bad_options_are_refused_of_lyapunov() -> None:
    at = torch.zeros(1, 2)
    for options, what in (
        ({"n_loops": 4}, "n_loops"),
        ({"n_loops": 40, "k": 3}, "k"),
        ({"n_loops": 40, "n_blocks": 1}, "n_blocks"),
        ({"n_loops": 40, "discard": -1}, "discard"),
    ):
        with pytest.raises(InputError, match=what):
            lyapunov_exponents(torch.cos, at, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_states_in_half_precision_have_exponents_to_its_rounding(dtype: torch.dtype) -> None:
    exponents = lyapunov_exponents(
        lambda x: x * torch.tensor([0.5, 0.25]).to(x), _ones(dtype), 16, k=2
    )
    assert exponents.values.dtype == dtype
    expected = torch.tensor([[0.5, 0.25]]).log().to(dtype)
    torch.testing.assert_close(exponents.values, expected, rtol=2 * torch.finfo(dtype).eps, atol=0)


def _ones(dtype: torch.dtype) -> Tensor:
    return torch.ones(1, 2, dtype=dtype)
