from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.optimize
import torch
from torch import Tensor

from loopinterp.core.errors import InputError
from loopinterp.dynamics import Anderson, Broyden, NewtonKrylov, Picard, Status, find_fixed_point
from loopinterp.dynamics.solvers import Termination, advance, start
from tests.dynamics.toys import rotation


def test_one_percent_of_progress_resets_the_patience() -> None:
    state = start(lambda x: x - 1, torch.tensor([[100.0]]))
    slow = advance(lambda x: x - 0.995 * x / 99, state, torch.tensor([[100.0]]))
    assert slow.since_best.item() == 1
    fast = advance(lambda x: x - 0.5 * x / 99, slow, torch.tensor([[100.0]]))
    assert fast.since_best.item() == 0


def test_convergence_outranks_the_end_of_the_steps_and_divergence_everything() -> None:
    rule = Termination(max_iter=1)
    x = torch.tensor([[1.0], [1.0], [1.0]])
    outputs = torch.tensor([[1.0], [2.0], [float("inf")]])
    state = advance(lambda _: outputs, start(lambda _: outputs, x), x)
    codes = rule(state).tolist()
    assert codes == [Status.CONVERGED, Status.OUT_OF_BUDGET, Status.DIVERGED]


@pytest.mark.parametrize(
    "options",
    [
        {"tol": 0.0},
        {"tol": float("nan")},
        {"atol": -1.0},
        {"max_iter": 0},
        {"patience": 0},
        {"divergence": float("inf")},
    ],
)
def test_termination_options_out_of_range_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(InputError, match=next(iter(options))):
        Termination(**options)  # pyright: ignore[reportArgumentType]


def test_iterates_are_the_loop_itself_bit_by_bit() -> None:
    x = torch.rand(2, 5, generator=torch.Generator().manual_seed(0))
    point = find_fixed_point(torch.cos, x, max_iter=3, tol=1e-12)
    assert torch.equal(point.state, x.cos().cos().cos())


def test_linear_divergence_is_seen() -> None:
    point = find_fixed_point(lambda x: 2 * x + 1, torch.zeros(1, 1))
    assert point.statuses == [Status.DIVERGED]
    # 2^t - 1 passes a million at t = 20.
    assert point.n_steps.item() == pytest.approx(20, abs=1)


def test_a_rotation_stalls_and_damping_finds_its_centre() -> None:
    turn = rotation(2.0)
    start = torch.tensor([[1.0, 0.0]])
    plain = find_fixed_point(lambda x: x @ turn.T + 1, start, max_iter=500)
    damped = find_fixed_point(lambda x: x @ turn.T + 1, start, solver=Picard(damping=0.5))
    assert plain.statuses == [Status.STALLED]
    assert damped.converged.all()
    centre = torch.linalg.solve(torch.eye(2) - turn, torch.ones(2))
    torch.testing.assert_close(damped.state[0], centre, atol=1e-4, rtol=1e-4)


def test_an_unstable_fixed_point_repels() -> None:
    point = find_fixed_point(lambda x: 4 * x * (1 - x), torch.tensor([0.75 + 1e-3]))
    assert not point.converged.any()


@pytest.mark.parametrize("damping", [0.0, -1.0, 1.5, math.nan])
def test_damping_out_of_range_is_refused(damping: float) -> None:
    with pytest.raises(InputError, match="damping"):
        Picard(damping=damping)


def test_a_linear_map_of_n_dimensions_takes_about_n_steps() -> None:
    # With a full window, Anderson on a linear map is GMRES: exact after n steps.
    generator = torch.Generator().manual_seed(0)
    matrix = 0.3 * torch.randn(4, 4, generator=generator, dtype=torch.float64)
    start = torch.zeros(1, 4, dtype=torch.float64)
    point = find_fixed_point(lambda x: x @ matrix.T + 1, start, solver=Anderson(window=5), tol=1e-7)
    assert point.converged.all()
    assert point.n_steps.item() <= 6


def test_slow_contractions_take_far_fewer_steps_than_plain_iteration() -> None:
    rates = torch.linspace(0.5, 0.99, 20, dtype=torch.float64)
    start = torch.zeros(1, 20, dtype=torch.float64)
    steps = [
        find_fixed_point(
            lambda x: rates * x + 1, start, solver=solver, tol=1e-8, max_iter=5000
        ).n_steps.item()
        for solver in (Picard(), Anderson(window=10))
    ]
    assert steps[1] < steps[0] / 5


def test_a_regularisation_as_large_as_the_difference_halves_its_coefficient() -> None:
    # f(x) = x / 2 + 1 from 0, after the plain step to 1: without a coefficient the next iterate is
    # 1.5, with that of the secant it is 2, with half of it 1.75.
    solver, map_ = Anderson(regularisation=1.0), lambda x: x / 2 + 1
    state = solver.init(map_, torch.zeros(1, 1))
    iterates = []
    for _ in range(2):
        state = solver.step(map_, state)
        iterates.append(state.x.item())
    assert iterates == [1.0, 1.75]


def test_it_finds_a_fixed_point_that_repels_plain_iteration() -> None:
    start = torch.tensor([0.7, 0.8], dtype=torch.float64)
    point = find_fixed_point(lambda x: 4 * x * (1 - x), start, solver="anderson", tol=1e-9)
    assert point.converged.all()
    torch.testing.assert_close(point.state, torch.full_like(start, 0.75))


def test_a_settled_example_does_not_spoil_the_least_squares_of_another() -> None:
    # Differences of exactly zero, from the first step on, beside a slow example.
    start = torch.tensor([[2.0], [0.0]])
    rate = torch.tensor([[0.5], [0.9]])
    point = find_fixed_point(lambda x: rate * (x - 2) + 2, start, solver="anderson")
    assert point.converged.all()
    torch.testing.assert_close(point.state, torch.full((2, 1), 2.0), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "options",
    [{"window": 0}, {"mixing": 0.0}, {"mixing": 2.0}, {"regularisation": -1.0}, {"restart": 0.5}],
)
def test_options_out_of_range_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(InputError, match=next(iter(options))):
        Anderson(**options)  # pyright: ignore[reportArgumentType]


def _iterates(solver: Broyden, matrix: torch.Tensor, n: int) -> np.ndarray:
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ matrix.T + 1)

    state = solver.init(f, torch.zeros(1, len(matrix)).double())
    iterates = []
    for _ in range(n):
        state = solver.step(f, state)
        iterates.append(state.x[0].numpy())
    return np.stack(iterates)


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
    iterates = _iterates(Broyden(mixing=mixing), matrix, 8)
    np.testing.assert_allclose(iterates, expected, rtol=1e-9)
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
def test_options_out_of_range_are_refused_of_broyden(options: dict[str, float]) -> None:
    with pytest.raises(InputError, match=next(iter(options))):
        Broyden(**options)  # pyright: ignore[reportArgumentType]


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
    full = solver.replace(backtracks=0)
    assert torch.equal(full.step(f, full.init(f, start)).x, f(start))  # then the loop's own step
    point = find_fixed_point(f, start, solver=solver)
    assert point.converged.all() and point.state.item() == pytest.approx(1.0)


def test_examples_that_are_done_cost_nothing_more() -> None:
    rate = torch.tensor([[0.1], [0.9]]).double()

    def f(x: Tensor) -> Tensor:
        return torch.tanh(rate * x) + 1

    start = torch.zeros(2, 1).double()
    both = find_fixed_point(f, start, 1e-10, solver="newton-krylov")
    rate = rate[:1]
    single = find_fixed_point(f, start[:1], 1e-10, solver="newton-krylov")
    assert both.evaluations[0] == single.evaluations[0] < both.evaluations[1]


@pytest.mark.parametrize(
    "options", [{"max_vectors": 0}, {"forcing": 1.0}, {"forcing": 0.0}, {"backtracks": -1}]
)
def test_options_out_of_range_are_refused_of_newton_krylov(options: dict[str, float]) -> None:
    with pytest.raises(InputError, match=next(iter(options))):
        NewtonKrylov(**options)  # pyright: ignore[reportArgumentType]
