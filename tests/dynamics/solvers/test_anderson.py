from __future__ import annotations

import pytest
import torch

from loopinterp.dynamics import Anderson, Picard, find_fixed_point
from loopinterp.errors import InputError


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
