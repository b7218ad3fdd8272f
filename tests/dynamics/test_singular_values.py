from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse.linalg import svds

from loopinterp.dynamics import (
    find_fixed_point,
    fixed_point_condition,
    largest_singular_values,
    leading_eigenvalues,
)
from loopinterp.errors import InputError
from loopinterp.models import bind
from loopinterp.tasks import Addition, as_batch
from loopinterp.zoo import load_pretrained
from tests.dynamics.toys import linear, random_state


def _zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.float64)


def test_all_values_of_a_trained_model_agree_with_its_dense_jacobian() -> None:
    model = load_pretrained("addition").model().double()
    iteration = bind(model, as_batch(Addition(), n=4, batch_size=1).inputs)
    h = find_fixed_point(iteration.step, iteration.h0, tol=1e-9).state
    jacobian = torch.autograd.functional.jacobian(iteration.step, h)
    assert isinstance(jacobian, torch.Tensor)
    size = h.numel()
    dense = jacobian.reshape(1, size, size)
    eigenvalues = torch.linalg.eigvals(dense).abs().sort(dim=1, descending=True)[0]
    found = leading_eigenvalues(iteration.step, h, 4, tol=1e-5)
    torch.testing.assert_close(found.values.abs(), eigenvalues[:, :4], rtol=1e-3, atol=0)
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
    found = largest_singular_values(linear(matrix), _zeros(2, size), size)
    expected = np.linalg.svd(matrix.numpy(), compute_uv=False)
    for row in found.values.numpy():
        np.testing.assert_allclose(row, expected, rtol=1e-6, atol=1e-9)
    solve = np.linalg.svd(np.eye(size) - matrix.numpy(), compute_uv=False)
    condition = fixed_point_condition(linear(matrix), _zeros(1, size))
    assert condition.converged.all()
    assert condition.condition.item() == pytest.approx(solve[0] / solve[-1], rel=1e-6)


def test_the_largest_against_scipy_on_a_space_too_large_to_exhaust() -> None:
    matrix = random_state(200, 200)
    expected = np.sort(np.asarray(svds(matrix.numpy(), k=2, return_singular_vectors=False)))[::-1]
    found = largest_singular_values(linear(matrix), _zeros(2, 4, 50), 2, tol=1e-6, max_vectors=110)
    assert found.converged.all()
    np.testing.assert_allclose(found.values[0], expected, rtol=1e-6)


def test_a_smallest_value_that_has_not_converged_is_an_upper_bound_and_says_so() -> None:
    diagonal = 1 - torch.logspace(-4, 0, 80, dtype=torch.float64)  # of I - J: 1e-4 to 1
    found = fixed_point_condition(lambda h: h * diagonal, _zeros(1, 80), max_vectors=12)
    assert not found.smallest_converged.any() and not found.converged.any()
    assert found.smallest.item() > 1.01e-4 and found.condition.item() < 0.99e4
    whole = fixed_point_condition(lambda h: h * diagonal, _zeros(1, 80), tol=1e-6)
    assert whole.converged.all() and whole.condition.item() == pytest.approx(1e4, rel=1e-4)


def test_a_space_of_fixed_points_has_no_condition() -> None:
    found = fixed_point_condition(lambda h: h * torch.tensor([1.0, 0.5]), torch.zeros(1, 2))
    assert found.smallest.item() == pytest.approx(0, abs=1e-7)
    assert found.condition.item() > 1e6


def test_positions_of_each_example_have_singular_values_of_their_own() -> None:
    matrix, mask = random_state(6, 6), torch.tensor([[1, 0, 1], [0, 1, 0]]).bool()
    found = fixed_point_condition(linear(matrix), _zeros(2, 3, 2), positions=mask)
    for row, kept in enumerate(mask.repeat_interleave(2, dim=1)):
        block = torch.eye(int(kept.sum()), dtype=torch.float64) - matrix[kept][:, kept]
        assert found.condition[row].item() == pytest.approx(torch.linalg.cond(block).item())


def test_bad_options_are_refused() -> None:
    for study in (largest_singular_values, fixed_point_condition):
        with pytest.raises(InputError, match="tol"):
            study(torch.cos, torch.zeros(1, 2), tol=0.0)
        with pytest.raises(InputError, match="max_vectors"):
            study(torch.cos, torch.zeros(1, 2), max_vectors=0)
        with pytest.raises(InputError, match="state"):
            study(torch.cos, torch.full((1, 2), math.inf))
    with pytest.raises(InputError, match="k: expected"):
        largest_singular_values(torch.cos, torch.zeros(1, 2), 3)
