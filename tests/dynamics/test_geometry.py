from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.decomposition import PCA
from torch import Tensor

from loopinterp.core.errors import InputError
from loopinterp.core.results import load_result
from loopinterp.dynamics import (
    GeometryResult,
    Regime,
    SettlingClass,
    Status,
    classify_settling,
    effective_rank,
    geometry_study,
    participation_ratio,
    principal_axes,
    run_loops,
)
from loopinterp.dynamics.geometry import _dimensions, _StateMoments
from loopinterp.models import LoopedTransformer, LoopedTransformerConfig, bind
from loopinterp.tasks import Addition, Batch, as_batch
from tests.dynamics.toys import LinearModel, batch_of_ones, random_state, rotation


def batch(n_examples: int = 6) -> Batch:
    """Inputs that differ from example to example."""
    ones = batch_of_ones(n_examples)
    ones.inputs.copy_(torch.arange(n_examples)[:, None] + torch.arange(3))
    return ones


@pytest.fixture(scope="module")
def transformer() -> LoopedTransformer:
    config = LoopedTransformerConfig(
        d_model=8,
        n_heads=2,
        n_layers=2,
        d_vocab=6,
        d_vocab_out=2,
        injection="input",
        loop_norm=True,
    )
    return LoopedTransformer(config, seed=0).eval()


@pytest.fixture(scope="module")
def result(transformer: LoopedTransformer) -> GeometryResult:
    return geometry_study(transformer, Addition(), n=3, batch_size=4, n_loops=24, n_trajectories=2)


def test_the_study_against_the_measures_on_all_states(
    transformer: LoopedTransformer, result: GeometryResult
) -> None:
    data, examples = result.data, as_batch(Addition(), n=3, batch_size=4)
    is_asked = examples.targets >= 0
    states = run_loops(bind(transformer, examples.inputs), 24)
    assert result.n_loops == 24 and data["set_size"].sel(set="embedding") == int(is_asked.sum())
    np.testing.assert_allclose(data["rank"], effective_rank(states[:, is_asked]), rtol=1e-4)
    expected = participation_ratio(states[:, is_asked])
    np.testing.assert_allclose(data["participation"], expected, rtol=1e-4)
    embedded = effective_rank(transformer.embed(examples.inputs)[is_asked]).detach()
    np.testing.assert_allclose(data["set_rank"].sel(set="embedding"), embedded, rtol=1e-4)
    centred = states[:, is_asked] - states[:, is_asked].mean(dim=1, keepdim=True)
    spread = centred.flatten(1).norm(dim=1) / states[:, is_asked].flatten(1).norm(dim=1)
    np.testing.assert_allclose(data["spread"], spread, rtol=1e-4)
    np.testing.assert_array_equal(data["settling"], classify_settling(states).settling)
    axes = principal_axes(states[:, :2][:, :, is_asked[:2].any(0)], 3)
    np.testing.assert_allclose(data["explained"], axes.explained, rtol=1e-3)
    right = transformer.readout(states[7]).argmax(-1) == examples.targets
    np.testing.assert_array_equal(data["exact"].sel(loop=7), (right | ~is_asked).all(dim=1))


def test_layers_are_followed_over_the_same_loops(
    transformer: LoopedTransformer, result: GeometryResult
) -> None:
    examples = as_batch(Addition(), n=3, batch_size=4)
    is_asked = examples.targets >= 0
    _, cache = transformer.run_with_cache(examples.inputs, n_loops=3)
    after = cache.stack("resid_post", layer=1).detach() * is_asked[..., None]
    moved = (after[2] - after[1]).flatten(1).norm(dim=1) / after[2].flatten(1).norm(dim=1)
    residual = result.data["layer_residual"].sel(loop=3, layer=1)
    np.testing.assert_allclose(residual, moved, rtol=1e-4)
    assert result.data["layer_residual"].sel(loop=slice(0, 1)).isnull().all()
    pairs = result.of_pairs("layer_cosine")
    assert pairs["pair"].values.tolist() == ["0 and 1"] and not result.no_layers
    np.testing.assert_array_equal(pairs.isnull()[0], ~is_asked)


def test_parts_of_a_batch_give_the_same(
    transformer: LoopedTransformer, result: GeometryResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loopinterp.dynamics.measures.CHUNK_BYTES", 1)
    parts = geometry_study(transformer, Addition(), n=3, batch_size=4, n_loops=24, n_trajectories=2)
    assert parts.data.sizes == result.data.sizes
    for name in result.data.data_vars:
        if str(name).startswith("control"):  # other draws
            means = (of.data[name].mean("draw") for of in (parts, result))
            np.testing.assert_allclose(*means, rtol=0.2)
            continue
        atol = 1e-3 if name == "path" else 1e-4
        np.testing.assert_allclose(parts.data[name], result.data[name], rtol=1e-3, atol=atol)


def test_saving_and_the_same_seed(result: GeometryResult, tmp_path: Path) -> None:
    loaded = load_result(result.save(tmp_path))
    assert isinstance(loaded, GeometryResult) and loaded.data.identical(result.data)


def test_limits_and_paths_of_a_contraction_in_the_plane() -> None:
    model = LinearModel(0.5 * torch.eye(2), threshold=1.0)
    result = geometry_study(model, batch(), n_trajectories=3, positions="all")
    # e = (token, 1): all states lie on a line through inputs that differ in one feature.
    assert result.no_layers == "no hooks"
    np.testing.assert_allclose(result.data["rank"][1:], 1, rtol=1e-6)
    assert result.data["rank"][0] == 0 and (result.data["limit_status"] == Status.CONVERGED).all()
    np.testing.assert_allclose(result.data["set_rank"].sel(set="limits"), 1, rtol=1e-6)
    assert (result.data["settling"] == SettlingClass.SETTLING).all() and result.converged().all()
    path, end = result.data["path"], result.data["path_limit"]
    np.testing.assert_allclose(path.isel(loop=-1), end, atol=1e-3)
    # Along orthonormal axes of the plane distances are kept.
    length = np.linalg.norm(path.isel(loop=-1) - path.isel(loop=0), axis=-1)
    limits = model.limit(batch().inputs[:3]).norm(dim=-1)
    np.testing.assert_allclose(length, limits, rtol=1e-4)
    assert result.data["control_rank"].mean() == pytest.approx(1.98, abs=0.05)
    counts = result.classes().sel(settling="settling")
    assert counts.sum() == 18 and counts.sel(answer="not asked") == 6


def test_orbits_drift_without_limits_and_a_blow_up_is_not_known() -> None:
    turning = geometry_study(LinearModel(rotation(1.0)), batch(), limit_steps=30)
    counted = turning.data["counted"]
    assert (turning.data["settling"].where(counted, 2) == SettlingClass.DRIFTING).all()
    assert (turning.data["regime"].where(counted, 1) == Regime.ORBIT).all()
    assert turning.data["path_limit"].isnull().all() and not turning.converged().any()
    assert turning.data["set_rank"].sel(set="limits").isnull()
    assert turning.data["set_size"].sel(set="limits") == 0

    burst = geometry_study(LinearModel(1e6 * torch.eye(2)), batch(), n_loops=20, limit_steps=5)
    assert np.isnan(burst.data["rank"][-1]) and burst.data["rank"][1] > 0
    assert burst.data["path"].isnull().all()
    assert (burst.data["limit_status"] == Status.DIVERGED).all()


def test_states_of_many_examples_are_not_held_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loopinterp.dynamics.measures.CHUNK_BYTES", 20_000)
    made: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def run(*args: Any) -> Tensor:
        states = run_loops(*args)
        made.append(weakref.ref(states))
        alive.append(sum(ref() is not None for ref in made))
        return states

    monkeypatch.setattr("loopinterp.dynamics.geometry.run_loops", run)
    geometry_study(LinearModel(0.5 * torch.eye(2)), batch(200), n_loops=20, n_trajectories=1)
    # Besides those just made, at most those of the part before.
    assert len(made) > 5 and max(alive) <= 2


@pytest.mark.parametrize(
    "wrong",
    [{"n_loops": 11}, {"n_trajectories": 0}, {"limit_steps": 0}, {"limit_tol": 0.0}, {"seed": -1}],
)
def test_bad_options_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(wrong))):
        geometry_study(LinearModel(0.5 * torch.eye(2)), batch(), **wrong)


@pytest.mark.parametrize("shape", [(30, 4), (3, 8), (1, 5)])
def test_ranks_against_numpy(shape: tuple[int, int]) -> None:
    states = random_state(*shape) + 100
    values = states.numpy() - states.numpy().mean(axis=0)
    singular = np.linalg.svd(values, compute_uv=False)
    if shape[0] == 1:
        expected = 0.0, 0.0
    else:
        variance = singular**2
        expected = np.exp(scipy.stats.entropy(singular)), variance.sum() ** 2 / (variance**2).sum()
    ranks = effective_rank(states), participation_ratio(states)
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
    moments = _StateMoments()
    moments.add(states[:, :4])
    moments.add(states[:, 4:11])
    moments.add(states[:, 11:])
    assert moments.count == 20
    centred = states - states.mean(dim=1, keepdim=True)
    expected = torch.linalg.svdvals(centred).flip(-1)
    torch.testing.assert_close(moments.singular_values(), expected)
    spread = centred.norm(dim=(1, 2)) / states.norm(dim=(1, 2))
    torch.testing.assert_close(moments.spread(), spread)


def test_what_is_not_finite_has_no_values_and_spoils_no_other_set() -> None:
    states = random_state(2, 10, 3)
    states[1, 4, 0] = float("inf")
    moments = _StateMoments()
    moments.add(states)
    singular = moments.singular_values()
    assert singular[0].isfinite().all() and singular[1].isnan().all()


def test_a_small_spread_far_from_zero_is_measured() -> None:
    states = 1e6 + 1e-3 * random_state(50, 4)
    centred = states - states.mean(dim=0)
    moments = _StateMoments()
    moments.add(states[:7])
    moments.add(states[7:])
    expected = torch.linalg.svdvals(centred).flip(0)
    torch.testing.assert_close(moments.singular_values(), expected, rtol=1e-4, atol=0.0)


def test_the_control_has_as_many_vectors() -> None:
    sets = {name: _StateMoments() for name in ("loops", "embedding", "limits")}
    sets["loops"].add(random_state(3, 6, 40))
    sets["embedding"].add(random_state(3, 40))
    sets["limits"].add(random_state(0, 40))
    arrays = _dimensions(sets, torch.Generator().manual_seed(0))
    assert arrays["set_size"].tolist() == [3, 0] and arrays["rank"].shape == (3,)
    # Three vectors about their mean span two dimensions, however many features there are.
    assert arrays["control_rank"][0].mean().item() == pytest.approx(2, abs=0.05)
    assert arrays["set_rank"][1].isnan() and arrays["control_participation"][1].isnan().all()
