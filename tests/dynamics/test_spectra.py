from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse.linalg import LinearOperator, eigs, svds
from torch import Tensor

from loopinterp.core.errors import InputError
from loopinterp.dynamics import (
    Eigenvalues,
    contraction_rates,
    cycle_multipliers,
    dense_jacobian,
    find_fixed_point,
    fixed_point_condition,
    largest_singular_values,
    leading_eigenvalues,
    measures,
    run_loops,
    spectral_radius,
)
from loopinterp.models import Iteration, bind
from loopinterp.tasks import Addition, as_batch
from loopinterp.zoo import load_pretrained
from tests.dynamics.toys import TRANSFORMERS, linear, random_state, rotation, small_transformer


def _dense(matrix: Tensor, k: int) -> np.ndarray:
    """The k eigenvalues of largest modulus, the upper one of a pair first."""
    values = np.linalg.eigvals(matrix.numpy())
    return values[np.lexsort((values.imag, np.abs(values).round(9)))[::-1]][:k]


@pytest.mark.parametrize("options", TRANSFORMERS, ids=str)
def test_spectral_radius_of_each_example_against_dense_eigenvalues(
    options: dict[str, object],
) -> None:
    iteration = small_transformer(**options)
    h = find_fixed_point(iteration.step, iteration.h0, tol=1e-9, max_iter=60).state
    radius = spectral_radius(iteration.step, h, tol=1e-6)
    dense = torch.linalg.eigvals(dense_jacobian(iteration.step, h)).abs().amax(dim=1)
    torch.testing.assert_close(radius.radius, dense, atol=1e-6, rtol=1e-5)
    assert radius.converged.all()
    torch.testing.assert_close(radius.eigenvalue.abs(), radius.radius)


def test_spectral_radius_against_arpack_on_a_state_too_large_to_exhaust() -> None:
    matrix = random_state(300, 300) / math.sqrt(300)
    product = LinearOperator(
        shape=(300, 300),
        matvec=lambda v: matrix.numpy() @ v,  # pyright: ignore[reportCallIssue]
        dtype=np.float64,
    )
    expected = eigs(product, k=4, return_eigenvectors=False, v0=np.ones(300))
    h = torch.zeros(2, 3, 100, dtype=torch.float64)
    radius = spectral_radius(
        lambda h: (h.flatten(1) @ matrix.T).reshape(h.shape), h, max_vectors=200, tol=1e-8
    )
    assert radius.converged.all()
    assert radius.radius.tolist() == pytest.approx([np.abs(expected).max()] * 2, rel=1e-6)


def test_analytic_cases() -> None:
    maps = {
        "rotation": (lambda h: h @ rotation(1.0, scale=0.7).T, 0.7),
        "zero": (lambda h: 0 * h, 0.0),
        "negative": (lambda h: -1.5 * h, 1.5),
        "nonlinear": (lambda h: torch.cos(h), math.sin(0.7390851)),
    }
    at = torch.full((3, 2), 0.7390851)
    for name, (step, radius) in maps.items():
        leading = spectral_radius(step, at)
        assert leading.radius.tolist() == pytest.approx([radius] * 3, abs=1e-5), name
        assert leading.converged.all(), name
    upper = spectral_radius(maps["rotation"][0], at).eigenvalue
    torch.testing.assert_close(upper.angle().float(), torch.ones(3))


def test_the_asymptotic_rate_of_a_run_is_the_spectral_radius_at_its_limit() -> None:
    iteration = small_transformer(loop_norm=True)
    states = run_loops(iteration, 200)
    rate = contraction_rates(states.flatten(2), last=20).asymptotic
    radius = spectral_radius(iteration.step, states[-1]).radius
    # The leading eigenvalues are complex pairs, so the observed rate sways around the radius.
    torch.testing.assert_close(rate, radius, atol=0.05, rtol=0)


def test_what_has_not_converged_says_so() -> None:
    # Eigenvalues spread evenly on a circle: no Krylov space smaller than all of them tells them.
    shift = torch.eye(50, dtype=torch.float64).roll(1, dims=0)
    radius = spectral_radius(
        lambda h: h @ shift.T, torch.zeros(1, 50, dtype=torch.float64), max_vectors=10
    )
    assert not radius.converged.any() and (radius.residual > 1e-3).all()
    full = spectral_radius(lambda h: h @ shift.T, torch.zeros(1, 50, dtype=torch.float64))
    assert full.radius.item() == pytest.approx(1.0)


def test_the_residual_is_that_of_the_leading_ritz_pair() -> None:
    # Two vectors of a space of three: the pair from an orthonormal basis of them, in NumPy.
    matrix = np.array([[2.0, 1.0, 0.0], [1.0, 1.0, 0.5], [0.0, 0.5, -0.5]])
    radius = spectral_radius(
        lambda h: h @ torch.from_numpy(matrix).T,
        torch.zeros(1, 3, dtype=torch.float64),
        max_vectors=2,
        seed=5,
    )
    first = torch.randn(1, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)[0]
    basis = np.linalg.qr(np.stack([first.numpy(), matrix @ first.numpy()], axis=1)).Q
    values, vectors = np.linalg.eigh(basis.T @ matrix @ basis)
    lead = np.abs(values).argmax()
    value, vector = values[lead], basis @ vectors[:, lead]
    residual = np.linalg.norm(matrix @ vector - value * vector) / abs(value)
    assert radius.eigenvalue.item() == pytest.approx(value)
    assert radius.residual.item() == pytest.approx(residual) and residual > 0.01


def test_the_seed_decides_the_start_alone() -> None:
    matrix = random_state(20, 20)
    radii = [
        spectral_radius(
            lambda h: h @ matrix.T, torch.zeros(1, 20, dtype=torch.float64), seed=s
        ).radius.item()
        for s in range(3)
    ]
    assert radii == pytest.approx([radii[0]] * 3, rel=1e-8)


def test_bad_states_and_options_are_refused() -> None:
    with pytest.raises(InputError, match="state"):
        spectral_radius(torch.cos, torch.full((1, 2), float("nan")))
    with pytest.raises(InputError, match="max_vectors"):
        spectral_radius(torch.cos, torch.zeros(1, 2), max_vectors=0)
    with pytest.raises(InputError, match="tol"):
        spectral_radius(torch.cos, torch.zeros(1, 2), tol=0.0)
    with pytest.raises(InputError, match="k"):
        leading_eigenvalues(torch.cos, torch.zeros(1, 2), 3)
    with pytest.raises(InputError, match="max_vectors"):
        leading_eigenvalues(torch.cos, torch.zeros(1, 20), 3, max_vectors=5)
    with pytest.raises(InputError, match="period"):
        cycle_multipliers(torch.cos, torch.zeros(1, 2), 0)


@settings(max_examples=15)
@given(size=st.integers(2, 9), k=st.integers(1, 4), seed=st.integers(0, 10**6))
def test_a_whole_space_gives_the_eigenvalues_of_numpy(size: int, k: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(size, size, generator=generator, dtype=torch.float64)
    k = min(k, size)
    eigenvalues = leading_eigenvalues(linear(matrix), torch.zeros(2, size, dtype=torch.float64), k)
    assert eigenvalues.converged.all()
    for row in eigenvalues.values.numpy():
        np.testing.assert_allclose(row, _dense(matrix, k), rtol=1e-5, atol=1e-7)


def test_restarts_find_what_the_whole_matrix_has_in_the_memory_of_few_vectors() -> None:
    matrix = random_state(90, 90) / math.sqrt(90)
    h = torch.zeros(2, 3, 30, dtype=torch.float64)
    eigenvalues = leading_eigenvalues(
        linear(matrix), h, 3, tol=1e-7, max_vectors=16, max_products=400, vectors=True
    )
    assert eigenvalues.converged.all() and 32 < eigenvalues.n_products < 400
    for row in eigenvalues.values.numpy():
        np.testing.assert_allclose(row, _dense(matrix, 3), rtol=1e-6)
    assert eigenvalues.vectors is not None and eigenvalues.vectors.shape == (2, 3, 3, 30)
    vectors = eigenvalues.vectors.flatten(2)
    away = vectors @ matrix.T.to(vectors) - eigenvalues.values[..., None] * vectors
    relative = away.norm(dim=2) / eigenvalues.values.abs()
    torch.testing.assert_close(relative, eigenvalues.residuals, atol=1e-9, rtol=1e-3)
    torch.testing.assert_close(vectors.norm(dim=2), torch.ones(2, 3, dtype=torch.float64))


def test_multiple_eigenvalues_are_found_as_often_as_they_are_there() -> None:
    diagonal = torch.tensor([0.9, 0.9, 0.9, 0.5, 0.5, 0.1], dtype=torch.float64)
    at = torch.zeros(1, 6, dtype=torch.float64)
    eigenvalues = leading_eigenvalues(lambda h: h * diagonal, at, 5)
    assert eigenvalues.values.real[0].tolist() == pytest.approx(diagonal[:5].tolist())
    assert leading_eigenvalues(lambda h: 0 * h, at, 2).converged.all()


def test_equal_moduli_are_no_hindrance_to_a_restart() -> None:
    shift = torch.eye(40, dtype=torch.float64).roll(1, dims=0)
    at = torch.zeros(1, 40, dtype=torch.float64)
    eigenvalues = leading_eigenvalues(linear(shift), at, 2, max_vectors=10, max_products=60)
    assert eigenvalues.n_products == 60 and not eigenvalues.converged.any()
    assert eigenvalues.values.isfinite().all()


def test_under_a_causal_mask_the_spectrum_is_that_of_single_positions() -> None:
    iteration = small_transformer(loop_norm=True)
    h = random_state(3, 4, 8)
    full = leading_eigenvalues(iteration.step, h, 32).values.abs().sort(dim=1)[0]
    parts = [leading_eigenvalues(iteration.step, h, 8, positions=[p]).values for p in range(4)]
    torch.testing.assert_close(
        torch.cat(parts, dim=1).abs().sort(dim=1)[0], full, atol=1e-7, rtol=1e-6
    )


def test_positions_of_each_example_against_its_dense_block() -> None:
    iteration, h = small_transformer(causal=False), random_state(3, 4, 8)
    mask = torch.tensor([[1, 0, 0, 1], [0, 1, 0, 0], [1, 1, 1, 0]]).bool()
    eigenvalues = leading_eigenvalues(iteration.step, h, 4, positions=mask, tol=1e-9)
    dense = dense_jacobian(iteration.step, h)
    for row in range(3):
        kept = mask[row].repeat_interleave(8)
        expected = _dense(dense[row][kept][:, kept], 4)
        np.testing.assert_allclose(
            eigenvalues.values[row].abs().numpy(), np.abs(expected), rtol=1e-6
        )


@pytest.mark.parametrize("positions", [None, [1, 2], "each its own"])
def test_a_batch_in_parts_gives_what_the_whole_gives(
    positions: list[int] | str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    iteration, h = small_transformer(loop_norm=True), random_state(3, 4, 8)
    mask = torch.tensor([[1, 0, 0, 1], [0, 1, 0, 0], [1, 1, 1, 0]]).bool()
    where = mask if isinstance(positions, str) else positions
    sizes: list[int] = []

    def advance(h: Tensor, e: Tensor, context: object) -> Tensor:
        sizes.append(len(h))
        return iteration.advance(h, e, context)

    def eigenvalues() -> Eigenvalues:
        sizes.clear()
        step = replace(iteration, advance=advance).step
        return leading_eigenvalues(
            step, h, 2, tol=1e-6, max_vectors=6, vectors=True, positions=where
        )

    full = eigenvalues()
    assert set(sizes) == {3} and full.converged.all()
    monkeypatch.setattr(measures, "CHUNK_BYTES", 1)
    parts = eigenvalues()
    assert set(sizes) == {1} and parts.converged.all()
    # Each ends when it has converged by itself; the whole went on until all had.
    assert parts.n_products <= full.n_products
    torch.testing.assert_close(parts.values, full.values, atol=1e-6, rtol=1e-5)
    assert parts.vectors is not None and full.vectors is not None
    overlap = torch.linalg.vecdot(parts.vectors.flatten(2), full.vectors.flatten(2)).abs()
    torch.testing.assert_close(overlap, torch.ones_like(overlap), atol=1e-4, rtol=0)


def test_a_batch_of_one_input_and_many_states_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    h = random_state(3, 4, 8)
    one = Iteration(h[:1], h[:1], advance=lambda h, e, _: torch.cos(h) + e, readout=torch.clone)
    full = leading_eigenvalues(one.step, h, 2).values
    monkeypatch.setattr(measures, "CHUNK_BYTES", 1)
    assert torch.equal(leading_eigenvalues(one.step, h, 2).values, full)


def test_the_multipliers_of_a_cycle_are_those_of_its_product_of_jacobians() -> None:
    # The logistic map at 3.2 and 3.5: cycles of 2 and 4; the multiplier is the product of r(1-2x).
    for rate, period in ((3.2, 2), (3.5, 4)):
        x = torch.full((1, 1), 0.4, dtype=torch.float64)
        for _ in range(2000):
            x = rate * x * (1 - x)
        orbit, y = [], x
        for _ in range(period):
            orbit.append(y.item())
            y = rate * y * (1 - y)
        expected = math.prod(rate * (1 - 2 * at) for at in orbit)
        multipliers = cycle_multipliers(lambda h, r=rate: r * h * (1 - h), x, period, k=1)
        assert multipliers.values.real.item() == pytest.approx(expected, rel=1e-6)
    step, h = small_transformer(loop_norm=True).step, random_state(3, 4, 8)
    product, at = torch.eye(32, dtype=torch.float64), h
    for _ in range(3):
        product, at = dense_jacobian(step, at) @ product, step(at).detach()
    multipliers = cycle_multipliers(step, h, 3, k=2, tol=1e-8)
    for row in range(3):
        expected = np.abs(_dense(product[row], 2))
        np.testing.assert_allclose(multipliers.values[row].abs().numpy(), expected, rtol=1e-5)


def _zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.float64)


def test_all_values_of_a_trained_model_agree_with_its_dense_jacobian() -> None:
    model = load_pretrained("addition").double()
    iteration = bind(model, as_batch(Addition(), n=4, batch_size=1).inputs)
    h = find_fixed_point(iteration.step, iteration.h0, tol=1e-9).state
    jacobian = torch.autograd.functional.jacobian(iteration.step, h)
    assert isinstance(jacobian, torch.Tensor)
    size = h.numel()
    dense = jacobian.reshape(1, size, size)
    eigenvalues = torch.linalg.eigvals(dense).abs().sort(dim=1, descending=True)[0]
    leading = leading_eigenvalues(iteration.step, h, 4, tol=1e-5)
    torch.testing.assert_close(leading.values.abs(), eigenvalues[:, :4], rtol=1e-3, atol=0)
    sigma = torch.linalg.svdvals(dense)
    top = largest_singular_values(iteration.step, h, 3, tol=1e-5)
    torch.testing.assert_close(top.values, sigma[:, :3], rtol=1e-3, atol=0)
    solve = torch.linalg.svdvals(torch.eye(size, dtype=torch.float64) - dense)
    condition = fixed_point_condition(iteration.step, h, tol=1e-4)
    assert condition.converged.all()
    torch.testing.assert_close(condition.largest, solve[:, 0], rtol=1e-3, atol=0)
    torch.testing.assert_close(condition.smallest, solve[:, -1], rtol=1e-3, atol=0)


@settings(max_examples=15)
@given(size=st.integers(1, 9), seed=st.integers(0, 10**6))
def test_a_whole_space_gives_the_singular_values_of_numpy(size: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(size, size, generator=generator, dtype=torch.float64)
    singular = largest_singular_values(linear(matrix), _zeros(2, size), size)
    expected = np.linalg.svd(matrix.numpy(), compute_uv=False)
    for row in singular.values.numpy():
        np.testing.assert_allclose(row, expected, rtol=1e-6, atol=1e-9)
    solve = np.linalg.svd(np.eye(size) - matrix.numpy(), compute_uv=False)
    condition = fixed_point_condition(linear(matrix), _zeros(1, size))
    assert condition.converged.all()
    assert condition.condition.item() == pytest.approx(solve[0] / solve[-1], rel=1e-6)


def test_the_largest_against_scipy_on_a_space_too_large_to_exhaust() -> None:
    matrix = random_state(200, 200)
    expected = np.sort(np.asarray(svds(matrix.numpy(), k=2, return_singular_vectors=False)))[::-1]
    singular = largest_singular_values(
        linear(matrix), _zeros(2, 4, 50), 2, tol=1e-6, max_vectors=110
    )
    assert singular.converged.all()
    np.testing.assert_allclose(singular.values[0], expected, rtol=1e-6)


def test_a_smallest_value_that_has_not_converged_is_an_upper_bound_and_says_so() -> None:
    diagonal = 1 - torch.logspace(-4, 0, 80, dtype=torch.float64)  # of I - J: 1e-4 to 1
    condition = fixed_point_condition(lambda h: h * diagonal, _zeros(1, 80), max_vectors=12)
    assert not condition.smallest_converged.any() and not condition.converged.any()
    assert condition.smallest.item() > 1.01e-4 and condition.condition.item() < 0.99e4
    full = fixed_point_condition(lambda h: h * diagonal, _zeros(1, 80), tol=1e-6)
    assert full.converged.all() and full.condition.item() == pytest.approx(1e4, rel=1e-4)


def test_a_space_of_fixed_points_has_no_condition() -> None:
    condition = fixed_point_condition(lambda h: h * torch.tensor([1.0, 0.5]), torch.zeros(1, 2))
    assert condition.smallest.item() == pytest.approx(0, abs=1e-7)
    assert condition.condition.item() > 1e6
    everywhere = fixed_point_condition(lambda h: h * torch.ones(2), torch.zeros(1, 2))  # I - J = 0
    assert everywhere.condition.item() == np.linalg.cond(np.zeros((2, 2))) == np.inf


def test_positions_of_each_example_have_singular_values_of_their_own() -> None:
    matrix, mask = random_state(6, 6), torch.tensor([[1, 0, 1], [0, 1, 0]]).bool()
    condition = fixed_point_condition(linear(matrix), _zeros(2, 3, 2), positions=mask)
    for row, kept in enumerate(mask.repeat_interleave(2, dim=1)):
        block = torch.eye(int(kept.sum()), dtype=torch.float64) - matrix[kept][:, kept]
        assert condition.condition[row].item() == pytest.approx(torch.linalg.cond(block).item())


def test_bad_options_are_refused() -> None:
    for study in (largest_singular_values, fixed_point_condition):
        with pytest.raises(InputError, match="tol"):
            study(torch.cos, torch.zeros(1, 2), tol=0.0)
        with pytest.raises(InputError, match="max_vectors"):
            study(torch.cos, torch.zeros(1, 2), max_vectors=0)
        with pytest.raises(InputError, match="state"):
            study(torch.cos, torch.full((1, 2), math.inf))
    with pytest.raises(InputError, match="k"):
        largest_singular_values(torch.cos, torch.zeros(1, 2), 3)
