from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from loopinterp.core.errors import InputError
from loopinterp.core.results import load_result
from loopinterp.dynamics import (
    ConvergenceResult,
    Regime,
    Status,
    classify_regimes,
    convergence_study,
)
from loopinterp.models import LoopedTransformer, LoopedTransformerConfig
from loopinterp.tasks import IGNORE, Addition, Batch
from loopinterp.zoo import pretrained_run
from tests.dynamics.toys import LinearModel, MapModel, batch_of_ones, rotation


@pytest.fixture(scope="module")
def halving() -> ConvergenceResult:
    """h <- h/2 + e with e = 1: h_t = 2 - 2^(1-t); the answer is right once h_t > 1.8 (loop 4)."""
    model = LinearModel(0.5 * torch.eye(3), threshold=1.8)
    return convergence_study(model, batch_of_ones(), n_loops=20)


def test_a_contraction_is_measured_exactly(halving: ConvergenceResult) -> None:
    loops = np.arange(21)
    state = 2 - 2.0 ** (1 - loops)
    expected = np.r_[np.nan, (state[1:] - state[:-1]) / state[1:]]
    np.testing.assert_allclose(halving.mean_residual(), expected, rtol=1e-4)
    np.testing.assert_allclose(halving.data["residual"][:, 0, 1], expected, rtol=1e-4)
    np.testing.assert_allclose(halving.data["residual_max"][:, 0], expected, rtol=1e-4)
    np.testing.assert_allclose(halving.data["distance"][:, 0, 0], 0.5**loops, atol=3e-5)
    np.testing.assert_allclose(halving.data["contraction"][2:10], 0.5, rtol=1e-3)
    np.testing.assert_allclose(halving.data["cosine"][2:10], 1, rtol=1e-3)
    assert halving.data["contraction"][:2].isnull().all()
    np.testing.assert_allclose(halving.data["asymptotic_rate"], 0.5, rtol=0.02)
    np.testing.assert_allclose(halving.data["spectral_radius"], 0.5, rtol=1e-3)
    first = next(t for t in loops[1:] if expected[t] < 0.03)
    assert (halving.data["settled_at"] == first).all()
    assert halving.settled_share() == 1
    assert (halving.data["limit_status"] == Status.CONVERGED).all()
    assert halving.regime_counts()["fixed point"] == 4


def test_accuracy_stands_beside_convergence(halving: ConvergenceResult) -> None:
    assert halving.exact_match().sel(estimate="value").values.tolist() == [0.0] * 4 + [1.0] * 17
    assert (halving.data["right"][:, :, 0] == -1).all()
    assert (halving.data["stable_at"] == 4).all()
    assert halving.data["counted"].values.tolist() == [[False, True, True]] * 2


def test_fates_part_rest_from_right(halving: ConvergenceResult) -> None:
    assert (halving.fates() == "rests right").all()
    # Asked for class 1 from 1.99 on, the loop rests at 2 only after T(n) = 4; from 2.1 on, never.
    for threshold, fate in ((1.99, "rests right"), (2.1, "rests wrong")):
        model = LinearModel(0.5 * torch.eye(3), threshold=threshold)
        assert (convergence_study(model, batch_of_ones(), n_loops=20).fates() == fate).all()
    turning = MapModel(lambda h, e: torch.where(h == 0, e, h) @ rotation(math.pi / 4).T)
    # At T(n) = 4 half a turn is made and the answer is wrong; after 16 loops two whole ones.
    result = convergence_study(turning, batch_of_ones(), n_loops=16)
    assert (result.fates() == "moves on, right").all()
    # What is right at T(n) and lost later.
    right = halving.data["right"].copy()
    right[-1] = np.where(right[-1] < 0, -1, 0)
    lost = dataclasses.replace(halving, data=halving.data.assign(right=right)).fates()
    fate = "rests wrong, was right at T(n)"
    assert (lost == fate).all()


def test_right_from_counts_to_the_end(halving: ConvergenceResult) -> None:
    # Positions: not asked, right from 2 on, right and then lost.
    right = np.tile([[-1, 0, 1], [-1, 0, 1], [-1, 1, 0]], (2, 1, 1)).swapaxes(0, 1)
    data = halving.data.isel(loop=slice(3)).assign(right=(("loop", "batch", "pos"), right))
    first = dataclasses.replace(halving, data=data).right_from()
    np.testing.assert_array_equal(first, [[np.nan, 2, np.inf]] * 2)


def test_readouts_are_those_of_the_states(halving: ConvergenceResult) -> None:
    lead = (2 - 2.0 ** (1 - np.arange(21))) - 1.8
    np.testing.assert_allclose(halving.data["margin"][:, 0], np.abs(lead), atol=1e-5)
    share = 1 / (1 + np.exp(-lead))
    entropy = -share * np.log(share) - (1 - share) * np.log(1 - share)
    np.testing.assert_allclose(halving.data["entropy"][:, 1], entropy, atol=1e-5)
    kl = share[1:] * np.log(share[1:] / share[:-1])
    kl += (1 - share[1:]) * np.log((1 - share[1:]) / (1 - share[:-1]))
    np.testing.assert_allclose(halving.data["kl"][1:, 0], kl, atol=1e-6)


def test_a_rotation_is_an_orbit_without_a_limit() -> None:
    result = convergence_study(LinearModel(rotation(math.pi / 3)), batch_of_ones(), n_loops=40)
    assert result.regime_counts()["orbit"] == 4
    assert (result.data["period"] == 6).all()
    assert (result.data["limit_status"] == Status.CYCLE).all()
    assert result.settled_share() == 0
    np.testing.assert_allclose(result.data["cosine"][2:], 0.5, atol=1e-4)
    assert result.data["spectral_radius"].isnull().all()


def test_what_never_comes_to_rest_is_not_settled() -> None:
    """A straight line moves by 1/t of its size, an orbit about a far point by little at a turn."""
    line = MapModel(lambda h, e: h + e)
    # The plane turns about (40, 0), by 60 degrees a loop: from 1 away, 1 of 40.
    turn, centre = rotation(math.pi / 3), torch.tensor([40.0, 0.0])
    orbit = MapModel(lambda h, e: (h - centre) @ turn.T + centre)
    orbit.initial_state = lambda e: centre + torch.tensor([1.0, 0.0]).expand_as(e)
    for model, name in ((line, "drift"), (orbit, "orbit")):
        result = convergence_study(model, batch_of_ones(), n_loops=60)
        assert result.regime_counts()[name] == 4
        assert (result.data["settled_at"] > 0).all()  # by the residual alone it settles
        assert result.settled_share() == 0
        settling = result.findings()[0]
        assert (settling.value, settling.good) == ("0% converge", False)
        assert result.below_threshold().count() == 4


def test_divergence_is_a_result_and_not_an_error() -> None:
    growing = LinearModel(3.0 * torch.eye(2))
    result = convergence_study(growing, batch_of_ones(), n_loops=100)
    assert not np.isfinite(result.data["residual"][-1]).all()
    assert result.regime_counts()["divergence"] == 4
    assert (result.data["limit_status"] == Status.DIVERGED).all()
    assert result.data["spectral_radius"].isnull().all()


def test_one_diverging_example_leaves_the_others_alone() -> None:
    # The first token decides: 1 contracts, 9 doubles.
    model = MapModel(lambda h, e: h * torch.where(e[..., :1] > 5, 2.0, 0.5) + e)
    batch = batch_of_ones(n_examples=3)
    inputs = batch.inputs.clone()
    inputs[1] = 9
    batch = dataclasses.replace(batch, inputs=inputs)
    result = convergence_study(model, batch, n_loops=30)
    assert result.data["limit_status"].values.tolist() == [
        Status.CONVERGED,
        Status.DIVERGED,
        Status.CONVERGED,
    ]
    assert (result.data["regime"][[0, 2]] == Regime.FIXED_POINT).all()
    np.testing.assert_allclose(result.data["spectral_radius"][[0, 2]], 0.5, rtol=1e-3)


def test_where_the_run_leaves_all_bounds_there_is_no_distance_to_a_limit() -> None:
    # From 1, token 1 goes to the last state 2 by halves; token 9 triples, and ends in infinity.
    model = MapModel(lambda h, e: h * torch.where(e[..., :1] > 5, 3.0, 0.5) + 1)
    model.initial_state = lambda e: torch.ones_like(e)
    batch = batch_of_ones(n_examples=1)
    batch = dataclasses.replace(batch, inputs=torch.tensor([[1, 1, 9]]))
    result = convergence_study(model, batch, n_loops=100)
    assert result.data["limit_status"].item() == Status.DIVERGED
    distance = result.data["distance"].sel(batch=0)
    np.testing.assert_allclose(distance[:20, :2], 0.5 ** np.arange(1, 21)[:, None].repeat(2, 1))
    assert not np.isfinite(distance.isel(pos=2)).any()


def test_a_position_that_does_not_count_does_not_spoil_the_means_of_the_readout() -> None:
    model = MapModel(lambda h, e: h * torch.where(e[..., :1] > 5, 3.0, 0.5) + e)
    single = convergence_study(model, batch_of_ones(1), n_loops=100)
    batch = dataclasses.replace(batch_of_ones(1), inputs=torch.tensor([[9, 1, 1]]))
    beside = convergence_study(model, batch, n_loops=100)
    for name in ("kl", "entropy", "margin"):
        np.testing.assert_array_equal(beside.data[name], single.data[name], err_msg=name)


def test_solvers_agree_on_the_limit_of_a_contraction() -> None:
    model = LinearModel(rotation(1.0, scale=0.8), threshold=0.0)
    plain, fast = (
        convergence_study(model, batch_of_ones(), n_loops=12, solver=solver)
        for solver in ("picard", "anderson")
    )
    np.testing.assert_allclose(plain.data["distance"], fast.data["distance"], atol=1e-3)


def _transformer_batch() -> tuple[LoopedTransformer, Batch]:
    config = LoopedTransformerConfig(
        d_model=16,
        n_heads=2,
        d_vocab=6,
        d_vocab_out=2,
        injection="input",
        initial_state="zeros",
        loop_norm=True,
    )
    batch = Addition().sample(5, batch_size=6, generator=torch.Generator().manual_seed(0))
    return LoopedTransformer(config, seed=0), batch


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = _transformer_batch()
    full = convergence_study(model, batch, n_loops=15, n_spectral=4)
    monkeypatch.setattr("loopinterp.dynamics.measures.CHUNK_BYTES", 3 * 16 * 6 * 64)
    parts = convergence_study(model, batch, n_loops=15, n_spectral=4)
    for name in ConvergenceResult.VARIABLES.keys() - ConvergenceResult.OPTIONAL:
        np.testing.assert_allclose(
            parts.data[name], full.data[name], atol=2e-3, rtol=2e-3, err_msg=name
        )
    converged = (full.data["limit_status"] == Status.CONVERGED).values.nonzero()[0][:4]
    assert (
        len(converged)
        and full.data["spectral_radius"].notnull().values.nonzero()[0].tolist()
        == converged.tolist()
    )


def test_exact_match_is_that_of_the_model_at_every_loop() -> None:
    model, batch = _transformer_batch()
    result = convergence_study(model, batch, n_loops=12, n_spectral=0)
    answers = model(batch.inputs, n_loops=12, return_type="all_logits").argmax(dim=-1)
    right = ((answers == batch.targets) | (batch.targets == IGNORE)).all(dim=-1)
    value = result.exact_match().sel(estimate="value")
    np.testing.assert_allclose(value, right.float().mean(dim=1).numpy())
    assert result.data["spectral_radius"].isnull().all()


def test_the_default_run_is_longer_than_the_answer_takes() -> None:
    assert convergence_study(LinearModel(torch.zeros(2, 2)), batch_of_ones()).n_loops == 24
    slow = dataclasses.replace(batch_of_ones(), n_loops=torch.tensor([40, 4]))
    assert convergence_study(LinearModel(torch.zeros(2, 2)), slow).n_loops == 50


def test_all_positions_can_be_counted() -> None:
    model = LinearModel(torch.zeros(2, 2))
    result = convergence_study(model, batch_of_ones(), n_loops=12, positions="all")
    assert result.data["counted"].all()
    assert sum(result.regime_counts().values()) == 6


def test_a_saved_result_is_read_back(halving: ConvergenceResult, tmp_path: Path) -> None:
    loaded = load_result(halving.save(tmp_path))
    assert isinstance(loaded, ConvergenceResult)
    assert loaded.data.identical(halving.data) and loaded.findings() == halving.findings()
    frame = loaded.to_dataframe()
    assert len(frame) == 21 * 2 * 3 and {"loop", "batch", "pos", "residual"} <= set(frame.columns)


def test_bad_input_is_refused() -> None:
    model, batch = LinearModel(torch.eye(2)), batch_of_ones()
    for options, name in [
        ({"n_loops": 11}, "n_loops"),
        ({"n_spectral": -1}, "n_spectral"),
        ({"limit_steps": 0}, "limit_steps"),
        ({"threshold": 0.0}, "threshold"),
        ({"solver": "newton"}, "solver"),
    ]:
        with pytest.raises(InputError, match=name):
            convergence_study(model, batch, **options)
    with pytest.raises(InputError, match="examples"):
        convergence_study(model, batch_of_ones(ignored=3))
    nan = MapModel(lambda h, e: h)
    nan.initial_state = lambda e: e * float("nan")
    with pytest.raises(InputError) as caught:
        convergence_study(nan, batch)
    assert caught.value.what.startswith("state")


@pytest.mark.usefixtures("no_type_checks")
def test_unknown_positions_are_refused() -> None:
    with pytest.raises(InputError, match="positions"):
        convergence_study(LinearModel(torch.eye(2)), batch_of_ones(), positions="some")  # pyright: ignore[reportArgumentType]


@pytest.mark.gpu
def test_the_study_on_the_gpu_is_that_on_the_cpu() -> None:
    model, batch = _transformer_batch()
    here = convergence_study(model, batch, n_loops=15, n_spectral=2)
    there = convergence_study(model.cuda(), batch.to("cuda"), n_loops=15, n_spectral=2)
    for name in ("residual", "distance", "right", "regime", "settled_at", "spectral_radius"):
        np.testing.assert_allclose(
            there.data[name], here.data[name], atol=1e-2, rtol=1e-2, err_msg=name
        )


@pytest.mark.parametrize(("dtype", "floor"), [(torch.bfloat16, 2**-6), (torch.float16, 2**-9)])
def test_half_precision_says_where_rounding_decides(dtype: torch.dtype, floor: float) -> None:
    """A model at rest in float32 is at rest in half precision: its last updates are rounding."""
    run = pretrained_run("parity")
    batch = run.task.sample(6, batch_size=6, generator=torch.Generator().manual_seed(0))
    whole, half = (
        convergence_study(run.model().to(kind), batch, n_loops=40, n_spectral=0)
        for kind in (torch.float32, dtype)
    )
    assert whole.settled_share() == 1 and half.settled_share() == 1
    counts = half.regime_counts()
    assert counts["fixed point"] + counts["converged to rounding"] == half.data["counted"].sum()
    assert (half.data["limit_status"] == whole.data["limit_status"]).all()
    # One loop rounds a state by about one unit: of many operations, most within float32 sums.
    assert floor / 64 < float(half.of_counted("rounding").max()) < floor
    values = [finding.value for finding in half.findings()]
    name = str(dtype).removeprefix("torch.")
    assert values[:2] == ["100% converge", f"{name}: 0% decided by rounding"]
    assert not any("rounding" in finding.value for finding in whole.findings())


def test_a_drift_in_half_precision_is_no_rest() -> None:
    states = (torch.arange(25.0)[:, None, None, None] / 64 + 1).expand(-1, 1, 1, 2)
    assert (classify_regimes(states.bfloat16()).regime == Regime.DRIFT).all()
