"""Rotation of orbits: made orbits of known period, phases and noise."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from loopinterp.core.errors import InputError
from loopinterp.dynamics import find_rotation, lag_distance


def orbit(period: float, phases: Tensor, n: int = 200, harmonics: int = 1) -> Tensor:
    """States [loop, pos, 6] that turn in random planes, about a random mean."""
    generator = torch.Generator().manual_seed(0)
    mean, planes = torch.randn(6, generator=generator), torch.randn(3, 2, 6, generator=generator)
    turn = 2 * math.pi * torch.arange(n)[:, None] / period + phases  # [loop, pos]
    parts = []
    for k in range(1, harmonics + 1):
        wave = torch.stack((torch.cos(k * turn), torch.sin(k * turn)), -1)
        parts.append(wave @ planes[k - 1] / k**2)
    return mean + sum(parts, torch.zeros(n, len(phases), 6))


@given(st.floats(2.2, 30.0), st.integers(1, 3))
def test_the_period_of_a_made_orbit_is_found(period: float, harmonics: int) -> None:
    found = find_rotation(orbit(period, torch.tensor([0.0, 1.0]), harmonics=harmonics))
    assert found.period == pytest.approx(period, rel=2e-3)
    assert found.explained > 0.95


@given(st.floats(-3, 3))
def test_positions_keep_the_differences_of_their_phases(gap: float) -> None:
    phases = torch.tensor([0.0, 0.0, gap / 2])
    found = find_rotation(orbit(4.83, phases)).phase()
    assert torch.allclose(found[0], found[1], atol=1e-3)
    turned = torch.exp(1j * (found[2] - found[0]))
    assert torch.allclose(turned, torch.exp(torch.tensor(1j * gap / 2)).to(turned), atol=1e-2)


def test_the_fitted_harmonics_are_the_orbit() -> None:
    states = orbit(5.13, torch.tensor([0.0, 0.4, 2.0]), harmonics=3)
    found = find_rotation(states)
    turn = 2 * math.pi * torch.arange(len(states)) / found.period
    made = found.mean + sum(
        (found.amplitudes[k] * torch.exp(1j * (k + 1) * turn)[:, None, None]).real for k in range(3)
    )
    assert (made - states).norm() / (states - states.mean(0)).norm() < 0.05


def test_noise_is_explained_as_far_as_fitting_six_numbers_goes() -> None:
    noise = torch.randn(200, 40, generator=torch.Generator().manual_seed(0))
    assert find_rotation(noise).explained < 0.08
    shuffled = orbit(4.8, torch.zeros(1))[torch.randperm(200)]
    assert (
        find_rotation(shuffled).explained
        < 0.5
        < find_rotation(orbit(4.8, torch.zeros(1))).explained
    )


def test_states_that_do_not_move_have_no_rotation() -> None:
    assert math.isnan(find_rotation(torch.ones(20, 3)).explained)


@given(st.integers(2, 7), st.integers(1, 9))
def test_a_cycle_comes_back_after_its_period_and_its_multiples_alone(period: int, n: int) -> None:
    cycle = torch.randn(period, 2, 5, generator=torch.Generator().manual_seed(n))
    found = lag_distance(cycle.repeat(8, 1, 1), 2 * period)
    back = [bool((found[p - 1] == 0).all()) for p in range(1, 2 * period + 1)]
    assert back == [p % period == 0 for p in range(1, 2 * period + 1)]


def test_constant_zeros_are_at_no_distance() -> None:
    states = torch.zeros(12, 2, 3)
    states[:, 1] = 1.0
    assert lag_distance(states, 3).tolist() == [[0.0, 0.0]] * 3


def test_too_few_states_are_refused() -> None:
    for call in (
        lambda: find_rotation(torch.ones(15, 3)),
        lambda: lag_distance(torch.ones(4, 3), 4),
    ):
        with pytest.raises(InputError) as error:
            call()
        assert error.value.what == "states"
