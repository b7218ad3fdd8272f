"""What every solver must do; a new solver is added to the list and passes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from loopinterp.dynamics import (
    Anderson,
    Broyden,
    NewtonKrylov,
    Picard,
    Solver,
    Status,
    find_fixed_point,
    list_solvers,
)
from loopinterp.dynamics.fixed_point import get_solver
from loopinterp.dynamics.jacobian import Linearised

SOLVERS = [
    *[get_solver(name) for name in list_solvers()],
    Picard(damping=0.7),
    Anderson(window=1),
    Anderson(window=10, mixing=0.5),
    Broyden(window=3),
    NewtonKrylov(max_vectors=2),
]

every_solver = pytest.mark.parametrize("solver", SOLVERS, ids=repr)


def _matrix(radius: float, size: int, seed: int) -> Tensor:
    matrix = torch.randn(size, size, generator=torch.Generator().manual_seed(seed)).double()
    return matrix * radius / torch.linalg.eigvals(matrix).abs().max()


@every_solver
def test_half_plus_one_gives_two(solver: Solver) -> None:
    point = find_fixed_point(lambda x: x / 2 + 1, torch.tensor(0.0), solver=solver, tol=1e-6)
    assert point.statuses == [Status.CONVERGED]
    assert point.state.item() == pytest.approx(2.0, abs=1e-5)
    assert point.state.shape == ()


@every_solver
@pytest.mark.parametrize("radius", [0.3, 0.9])
def test_linear_contractions_end_at_the_solution_of_the_linear_system(
    solver: Solver, radius: float
) -> None:
    matrices = torch.stack([_matrix(radius, 6, seed) for seed in range(5)])
    offset = torch.randn(5, 6, generator=torch.Generator().manual_seed(9)).double()
    point = find_fixed_point(
        lambda x: torch.einsum("bij,bj->bi", matrices, x) + offset,
        torch.zeros(5, 6, dtype=torch.float64),
        solver=solver,
        tol=1e-9,
        max_iter=1000,
    )
    solution = torch.linalg.solve(torch.eye(6).double() - matrices, offset)
    assert point.converged.all()
    torch.testing.assert_close(point.state, solution, atol=1e-6, rtol=1e-6)


NONLINEAR: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "cosine": (torch.cos, 0.7390851332151607),
    "exp(-x)": (lambda x: torch.exp(-x), 0.5671432904097838),
    "Babylonian root of 7": (lambda x: (x + 7 / x) / 2, math.sqrt(7)),
    "sin(x)/2 (fixed point at zero)": (lambda x: torch.sin(x) / 2, 0.0),
}


@every_solver
@pytest.mark.parametrize("name", NONLINEAR)
def test_nonlinear_maps_end_at_their_analytic_fixed_points(solver: Solver, name: str) -> None:
    function, solution = NONLINEAR[name]
    starts = torch.tensor([0.3, 1.0, 2.5], dtype=torch.float64)
    point = find_fixed_point(function, starts, solver=solver, tol=1e-10, atol=1e-10)
    assert point.converged.all()
    torch.testing.assert_close(point.state, torch.full_like(starts, solution), atol=1e-8, rtol=0)


@every_solver
@pytest.mark.parametrize("name", ["x^2 + 1", "exp(x)", "x + 1"])
def test_maps_without_a_fixed_point_never_converge(solver: Solver, name: str) -> None:
    maps = {"x^2 + 1": lambda x: x * x + 1, "exp(x)": torch.exp, "x + 1": lambda x: x + 1}
    start = torch.tensor([0.0, 1.0])
    point = find_fixed_point(maps[name], start, solver=solver, tol=1e-6, max_iter=30)
    assert not point.converged.any()
    assert point.state.isfinite().all()


@every_solver
def test_an_orbit_of_period_two_is_not_a_fixed_point(solver: Solver) -> None:
    # 0 -> 1 -> 0: the jump leaves no fixed point for any solver to find.
    start = torch.tensor([0.0, 1.0])
    point = find_fixed_point(lambda x: (x <= 0.5).to(x), start, solver=solver, patience=30)
    assert not point.converged.any()
    if solver == Picard():
        assert point.statuses == [Status.CYCLE] * 2 and point.period.tolist() == [2, 2]
    else:  # their iterates are no trajectory, so a return of theirs is no cycle of the map
        assert set(point.statuses) <= {Status.STALLED, Status.OUT_OF_BUDGET}
        assert point.period.tolist() == [0, 0]


@every_solver
def test_nan_is_divergence_at_once_and_only_for_its_own_example(solver: Solver) -> None:
    spoil = torch.tensor([1.0, float("nan"), 1.0])[:, None]
    start = torch.tensor([[0.0], [5.0], [1.0]])
    point = find_fixed_point(lambda x: (x / 2 + 1) * spoil, start, solver=solver)
    assert point.statuses == [Status.CONVERGED, Status.DIVERGED, Status.CONVERGED]
    assert point.n_steps[1] == 0
    assert point.state[1].item() == 5.0


@every_solver
def test_a_batch_gives_what_its_examples_give_one_by_one(solver: Solver) -> None:
    offsets = torch.tensor([[0.1, 2.0], [-1.0, 0.5], [3.0, 3.0]], dtype=torch.float64)

    def make(offset: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda x: torch.tanh(x.flip(-1)) / 2 + offset

    batched = find_fixed_point(make(offsets), torch.zeros_like(offsets), solver=solver)
    for row in range(3):
        one = offsets[row : row + 1]
        single = find_fixed_point(make(one), torch.zeros_like(one), solver=solver)
        assert batched.n_steps[row] == single.n_steps[0]
        assert batched.status[row] == single.status[0]
        torch.testing.assert_close(batched.state[row], single.state[0])
        n_steps = int(single.n_steps[0])
        torch.testing.assert_close(batched.residuals[: n_steps + 1, row], single.residuals[:, 0])


@every_solver
def test_the_last_residual_is_that_of_the_state_given_back(solver: Solver) -> None:
    start = torch.tensor([[0.2, 4.0], [1.0, -1.0]], dtype=torch.float64)
    point = find_fixed_point(torch.cos, start, solver=solver, tol=1e-4)
    image = torch.cos(point.state)
    residual = (image - point.state).norm(dim=1) / image.norm(dim=1)
    torch.testing.assert_close(point.residuals[-1], residual)
    assert (residual <= 1.001e-4).all()


@every_solver
def test_steps_are_never_more_than_allowed(solver: Solver) -> None:
    point = find_fixed_point(
        lambda x: 2 * x.cos() + 1, torch.zeros(2, 1), solver=solver, max_iter=1, tol=1e-12
    )
    assert point.residuals.shape == (2, 2)
    assert point.statuses == [Status.OUT_OF_BUDGET] * 2
    assert (point.n_steps == 1).all()


@every_solver
def test_a_start_at_the_fixed_point_takes_no_step(solver: Solver) -> None:
    point = find_fixed_point(lambda x: x / 2 + 1, torch.full((1, 3), 2.0), solver=solver)
    assert point.converged.all() and (point.n_steps == 0).all()


@every_solver
def test_evaluations_are_the_calls_and_jacobian_products_of_a_batch_of_one(
    solver: Solver, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, turn = 0, _matrix(0.8, 4, 3)

    def f(x: Tensor) -> Tensor:
        nonlocal calls
        calls += not x.requires_grad  # the run that is differentiated serves all its products
        return torch.tanh(x @ turn.T + 1)

    def push(linear: Linearised, v: Tensor, exactly: Any = Linearised.push) -> Tensor:
        nonlocal calls
        before, product = calls, exactly(linear, v)
        calls = before + 1  # however many runs it took
        return product

    monkeypatch.setattr(Linearised, "push", push)
    point = find_fixed_point(f, torch.zeros(1, 4).double(), 1e-8, solver=solver)
    assert point.converged.all()
    assert point.evaluations.tolist() == [calls]
    assert calls > point.n_steps.item()


@every_solver
@settings(max_examples=6)
@given(seed=st.integers(0, 2**20), radius=st.floats(0.1, 1.2), double=st.booleans())
def test_success_is_never_said_of_a_state_that_the_map_moves(
    solver: Solver, seed: int, radius: float, double: bool
) -> None:
    dtype = torch.float64 if double else torch.float32
    matrix, offset = _matrix(radius, 3, seed).to(dtype), torch.tensor([1.0, -2.0, 0.5], dtype=dtype)

    def f(x: Tensor) -> Tensor:
        return torch.sin(x @ matrix.T) * 2 + offset

    point = find_fixed_point(f, torch.zeros(2, 3, dtype=dtype), 1e-4, 40, solver=solver)
    gap = (f(point.state) - point.state).double().norm(dim=1)
    close = gap <= 1e-4 * f(point.state).double().norm(dim=1) + 1e-8
    assert (close | ~point.converged).all()


@every_solver
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_ends_and_overflow_is_divergence(solver: Solver, dtype: torch.dtype) -> None:
    start = torch.tensor([[0.0, 0.0], [3.0, 3.0]], dtype=dtype)
    grow = torch.tensor([[0.5], [50.0]], dtype=dtype)
    offset = torch.tensor([[1.0], [1e3]], dtype=dtype)
    # The second example's map has a repelling fixed point, which only a plain step runs away from.
    point = find_fixed_point(lambda x: x * grow + offset, start, 0.02, solver=solver)
    assert point.state.dtype == dtype and point.state.isfinite().all()
    assert point.statuses[0] == Status.CONVERGED
    torch.testing.assert_close(point.state[0].float(), torch.full((2,), 2.0), atol=0.1, rtol=0)
    if solver == Picard():
        assert point.statuses[1] == Status.DIVERGED


@every_solver
def test_norms_that_overflow_the_type_of_the_state_are_no_success(solver: Solver) -> None:
    # |x| is beyond float32, and so would be tol * |x|, under which everything counts as small.
    start = torch.full((1, 4), 1e38)
    point = find_fixed_point(lambda x: -x / 2, start, max_iter=1, solver=solver, divergence=1e9)
    assert point.converged.item() == ((point.state == 0).all().item())
    assert point.residuals[0].item() == pytest.approx(3.0)


@every_solver
def test_what_the_map_raises_is_raised(solver: Solver) -> None:
    def f(x: Tensor) -> Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        find_fixed_point(f, torch.zeros(1, 2), solver=solver)
