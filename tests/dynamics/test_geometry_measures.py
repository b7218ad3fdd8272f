"""Ranks against NumPy's and SciPy's, principal axes against scikit-learn's."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.decomposition import PCA

from loopinterp.core.errors import InputError
from loopinterp.dynamics import effective_rank, participation_ratio, principal_axes
from loopinterp.dynamics.geometry_measures import StateMoments, StateSets
from tests.dynamics.toys import random_state


@pytest.mark.parametrize("shape", [(30, 4), (3, 8), (1, 5)])
@pytest.mark.parametrize("centred", [True, False])
def test_ranks_against_numpy(shape: tuple[int, int], centred: bool) -> None:
    states = random_state(*shape) + 100
    values = states.numpy() - (states.numpy().mean(axis=0) if centred else 0)
    singular = np.linalg.svd(values, compute_uv=False)
    if centred and shape[0] == 1:
        expected = 0.0, 0.0
    else:
        variance = singular**2
        expected = np.exp(scipy.stats.entropy(singular)), variance.sum() ** 2 / (variance**2).sum()
    ranks = effective_rank(states, centred=centred), participation_ratio(states, centred=centred)
    np.testing.assert_allclose(ranks, expected, rtol=1e-6)


@given(st.integers(1, 6), st.floats(0.1, 10))
def test_equal_directions_are_counted(k: int, scale: float) -> None:
    corners = scale * torch.cat([torch.eye(6)[:k], -torch.eye(6)[:k]]).double() + 5
    assert effective_rank(corners).item() == pytest.approx(k)
    assert participation_ratio(corners).item() == pytest.approx(k)


def test_the_dimension_is_that_of_the_shape_and_not_of_place_and_direction() -> None:
    states, turn = random_state(40, 6), torch.linalg.qr(random_state(6, 6)).Q
    moved = 3 * states @ turn + 7
    torch.testing.assert_close(effective_rank(moved), effective_rank(states))
    torch.testing.assert_close(participation_ratio(moved), participation_ratio(states))


def test_one_point_has_no_dimension_and_rounding_makes_none() -> None:
    point = random_state(1, 8).float().expand(20, 8)
    shaken = point * (1 + 1e-7 * random_state(20, 8).float())
    for states in (point, shaken, torch.zeros(4, 8)):
        assert effective_rank(states) == 0 and participation_ratio(states) == 0
    assert effective_rank(shaken.double()) > 5


def test_sets_are_measured_each_for_itself() -> None:
    states = random_state(2, 3, 10, 4)
    batched = effective_rank(states)
    assert batched.shape == (2, 3)
    torch.testing.assert_close(batched[1, 2], effective_rank(states[1, 2]))


def test_principal_axes_against_scikit_learn() -> None:
    states = random_state(20, 3, 7) * torch.arange(1.0, 8)
    axes = principal_axes(states, 3)
    oracle = PCA(3).fit(states.reshape(-1, 7).numpy())
    np.testing.assert_allclose(axes.explained, oracle.explained_variance_ratio_, rtol=1e-9)
    sign = np.sign((oracle.components_ * axes.axes.numpy()).sum(axis=1))
    np.testing.assert_allclose(axes.axes, sign[:, None] * oracle.components_, atol=1e-9)
    expected = sign * oracle.transform(states.reshape(-1, 7).numpy())
    projected = axes.project(states)
    assert projected.shape == (20, 3, 3)
    np.testing.assert_allclose(projected.reshape(-1, 3), expected, atol=1e-9)
    assert (axes.axes.gather(1, axes.axes.abs().argmax(1, keepdim=True)) > 0).all()


def test_fewer_states_than_features_and_one_point() -> None:
    wide = principal_axes(random_state(3, 50), 2)
    assert wide.explained.sum().item() == pytest.approx(1)
    still = principal_axes(torch.ones(5, 4), 2)
    assert still.explained.tolist() == [0, 0]


@pytest.mark.usefixtures("no_type_checks")
def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(InputError, match="states"):
        effective_rank(torch.zeros(0, 4))
    with pytest.raises(InputError, match="finite"):
        participation_ratio(torch.tensor([[1.0], [float("nan")]]))
    for n_components in (0, 5):
        with pytest.raises(InputError, match="n_components"):
            principal_axes(random_state(20, 4), n_components)
    with pytest.raises(InputError, match="states"):
        effective_rank(torch.ones(4, 4, dtype=torch.int64))


def test_parts_add_up_to_the_whole() -> None:
    states = random_state(3, 20, 5) + 50
    moments = StateMoments(states[:, :4])
    moments.add(states[:, 4:11])
    moments.add(states[:, 11:])
    assert moments.count == 20
    centred = states - states.mean(dim=1, keepdim=True)
    expected = torch.linalg.svdvals(centred).flip(-1)
    torch.testing.assert_close(moments.singular_values(), expected)
    far = torch.linalg.svdvals(states).flip(-1)
    torch.testing.assert_close(moments.singular_values(about_zero=True), far)
    spread = centred.norm(dim=(1, 2)) / states.norm(dim=(1, 2))
    torch.testing.assert_close(moments.spread(), spread)


def test_what_is_not_finite_has_no_values_and_spoils_no_other_set() -> None:
    states = random_state(2, 10, 3)
    states[1, 4, 0] = float("inf")
    singular = StateMoments(states).singular_values()
    assert singular[0].isfinite().all() and singular[1].isnan().all()


def test_a_small_spread_far_from_zero_is_measured() -> None:
    states = 1e6 + 1e-3 * random_state(50, 4)
    centred = states - states.mean(dim=0)
    moments = StateMoments(states[:7])
    moments.add(states[7:])
    expected = torch.linalg.svdvals(centred).flip(0)
    torch.testing.assert_close(moments.singular_values(), expected, rtol=1e-4, atol=0.0)


def test_the_control_has_as_many_vectors() -> None:
    sets = StateSets()
    sets.add("loops", random_state(3, 6, 40))
    sets.add("few", random_state(3, 40))
    sets.add("none", random_state(0, 40))
    arrays = sets.measures("loops", ["few", "none"], torch.Generator().manual_seed(0))
    assert arrays["set_size"].tolist() == [3, 0] and arrays["rank"].shape == (3,)
    # Three vectors about their mean span two dimensions, however many features there are.
    assert arrays["control_rank"][0].mean().item() == pytest.approx(2, abs=0.05)
    assert arrays["set_rank"][1].isnan() and arrays["control_participation"][1].isnan().all()
