from __future__ import annotations

import numpy as np
import pytest
import scipy.optimize
import torch

from loopinterp.dynamics import Broyden, find_fixed_point
from loopinterp.errors import InputError


def _iterates(solver: Broyden, matrix: torch.Tensor, n: int) -> np.ndarray:
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ matrix.T + 1)

    state = solver.init(f, torch.zeros(1, len(matrix)).double())
    found = []
    for _ in range(n):
        state = solver.step(f, state)
        found.append(state.x[0].numpy())
    return np.stack(found)


@pytest.mark.parametrize("mixing", [1.0, 0.4])
def test_iterates_are_those_of_a_dense_jacobian_updated_step_by_step(mixing: float) -> None:
    matrix = torch.randn(5, 5, generator=torch.Generator().manual_seed(0)).double() / 3
    w = matrix.numpy()

    def g(x: np.ndarray) -> np.ndarray:
        return np.tanh(w @ x + 1) - x

    x, jacobian, expected = np.zeros(5), -np.eye(5) / mixing, []
    for _ in range(8):
        step = -np.linalg.solve(jacobian, g(x))
        jacobian += np.outer(g(x + step) - g(x) - jacobian @ step, step) / (step @ step)
        x = x + step
        expected.append(x)
    found = _iterates(Broyden(mixing=mixing), matrix, 8)
    np.testing.assert_allclose(found, expected, rtol=1e-9)
    # A window that forgets goes another way, from the first step on that it has forgotten.
    short = _iterates(Broyden(window=2, mixing=mixing), matrix, 8)
    np.testing.assert_allclose(short[:3], expected[:3], rtol=1e-9)
    assert np.abs(short[4] - expected[4]).max() > 1e-6


def test_it_ends_where_scipy_does_on_a_map_that_repels_plain_iteration() -> None:
    matrix = torch.tensor([[-1.6, 0.3], [0.2, -1.2]]).double()
    point = find_fixed_point(
        lambda x: torch.sin(x @ matrix.T) + 0.5, torch.zeros(1, 2).double(), 1e-10, solver="broyden"
    )
    solution = scipy.optimize.broyden1(
        lambda x: np.sin(matrix.numpy() @ x) + 0.5 - x, np.zeros(2), f_tol=1e-12
    )
    assert point.converged.all()
    np.testing.assert_allclose(point.state[0].numpy(), solution, atol=1e-8)


@pytest.mark.parametrize("options", [{"window": 0}, {"mixing": 0.0}, {"restart": 0.5}])
def test_options_out_of_range_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(InputError, match=next(iter(options))):
        Broyden(**options)  # pyright: ignore[reportArgumentType]
