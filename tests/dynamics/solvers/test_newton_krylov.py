from __future__ import annotations

import numpy as np
import pytest
import scipy.optimize
import torch
from torch import Tensor

from loopinterp.dynamics import NewtonKrylov, find_fixed_point
from loopinterp.errors import InputError


def _network(radius: float, size: int = 6) -> Tensor:
    matrix = torch.randn(size, size, generator=torch.Generator().manual_seed(1)).double()
    return matrix * radius / torch.linalg.eigvals(matrix).abs().max()


def test_a_linear_map_is_solved_in_one_exact_step() -> None:
    # With a forcing term of rounding GMRES runs until it is exact: as many products as dimensions.
    matrix, offset = _network(3.0), torch.arange(6).double()
    solver = NewtonKrylov(forcing=1e-12, max_vectors=6)
    start = torch.zeros(1, 6).double()
    point = find_fixed_point(lambda x: x @ matrix.T + offset, start, 1e-9, solver=solver)
    exact = torch.linalg.solve(torch.eye(6).double() - matrix, offset)
    torch.testing.assert_close(point.state[0], exact)
    assert point.n_steps.item() == 1
    assert point.evaluations.item() == 1 + 6 + 1


def test_a_step_is_newtons_where_the_system_is_solved_exactly() -> None:
    matrix = _network(0.9)

    def f(x: Tensor) -> Tensor:
        return torch.tanh(x @ matrix.T + 1)

    start = torch.full((1, 6), 0.1).double()
    solver = NewtonKrylov(forcing=1e-12, max_vectors=6)
    state = solver.step(f, solver.init(f, start))
    jacobian = torch.autograd.functional.jacobian(lambda x: f(x) - x, start[0])
    assert isinstance(jacobian, Tensor)
    newton = start[0] - torch.linalg.solve(jacobian, (f(start) - start)[0])
    torch.testing.assert_close(state.x[0], newton)


def test_it_ends_where_scipy_does_and_converges_faster_than_linearly() -> None:
    matrix = _network(1.5)
    point = find_fixed_point(
        lambda x: torch.tanh(x @ matrix.T + 1),
        torch.zeros(1, 6).double(),
        1e-11,
        solver="newton-krylov",
    )
    solution = scipy.optimize.newton_krylov(
        lambda x: np.tanh(matrix.numpy() @ x + 1) - x, np.zeros(6), f_tol=1e-12
    )
    assert point.converged.all()
    np.testing.assert_allclose(point.state[0].numpy(), solution, atol=1e-9)
    logs = point.residuals[:, 0].log()
    assert logs[-1] - logs[-2] < 1.5 * (logs[-2] - logs[-3]) < 0


def test_a_step_that_would_make_it_worse_is_shortened() -> None:
    # g = arctan(4 (x - 1)): beyond 1.39 / 4 from its root, Newton's whole step goes further away.
    def f(x: Tensor) -> Tensor:
        return x + torch.atan(4 * (x - 1))

    start = torch.tensor([[3.0]]).double()
    solver = NewtonKrylov(backtracks=8, forcing=1e-6)
    state = solver.init(f, start)
    gaps = [state.gap.item()]
    for _ in range(2):
        state = solver.step(f, state)
        gaps.append(state.gap.item())
    assert gaps[2] < gaps[1] < gaps[0]
    whole = solver.replace(backtracks=0)
    assert torch.equal(whole.step(f, whole.init(f, start)).x, f(start))  # then the loop's own step
    point = find_fixed_point(f, start, solver=solver)
    assert point.converged.all() and point.state.item() == pytest.approx(1.0)


def test_examples_that_are_done_cost_nothing_more() -> None:
    rate = torch.tensor([[0.1], [0.9]]).double()

    def f(x: Tensor) -> Tensor:
        return torch.tanh(rate * x) + 1

    start = torch.zeros(2, 1).double()
    both = find_fixed_point(f, start, 1e-10, solver="newton-krylov")
    rate = rate[:1]
    alone = find_fixed_point(f, start[:1], 1e-10, solver="newton-krylov")
    assert both.evaluations[0] == alone.evaluations[0] < both.evaluations[1]


@pytest.mark.parametrize(
    "options", [{"max_vectors": 0}, {"forcing": 1.0}, {"forcing": 0.0}, {"backtracks": -1}]
)
def test_options_out_of_range_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(InputError, match=next(iter(options))):
        NewtonKrylov(**options)  # pyright: ignore[reportArgumentType]
