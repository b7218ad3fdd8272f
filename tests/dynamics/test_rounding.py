"""Runs in half precision: rounding is told from movement, by maps whose limits are known."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from loopinterp.adapters import adapt
from loopinterp.dynamics import (
    ConvergenceResult,
    Regime,
    SettlingClass,
    Status,
    attention_stabilisation_study,
    classify_regimes,
    classify_settling,
    convergence_study,
    extrapolation_study,
    find_fixed_point,
    find_rotation,
    geometry_study,
    local_stability_study,
    reachability_study,
    spectral_radius,
)
from loopinterp.dynamics.convergence import compare_with_float32
from loopinterp.models import LoopedTransformer, LoopedTransformerConfig, bind
from loopinterp.models.iteration import computing_dtype, in_float32, is_coarse
from loopinterp.tasks import Batch, as_batch
from loopinterp.zoo import pretrained_run
from tests.adapters.kinds import KINDS
from tests.adapters.published import hrm, trm
from tests.dynamics.toys import LinearModel

HALF = (torch.bfloat16, torch.float16)
N_LOOPS = 40


class Affine(nn.Module):
    """``step(h, e) = centre + A (h - centre) + shift``, from ``start``; eight features."""

    repeatable = True

    def __init__(self, matrix: Tensor, *, start: Tensor, centre: float = 1.0, shift: float = 0.0):
        super().__init__()
        self.matrix = nn.Parameter(matrix)
        self.start = nn.Parameter(start)
        self.centre, self.shift = centre, shift

    def embed(self, inputs: Tensor) -> Tensor:
        return self.start.expand(*inputs.shape, -1)

    def initial_state(self, e: Tensor) -> Tensor:
        return e.clone()

    def step(self, h: Tensor, e: Tensor) -> Tensor:
        return self.centre + (h - self.centre) @ self.matrix.T + self.shift

    def readout(self, h: Tensor) -> Tensor:
        return torch.stack([torch.zeros_like(h[..., 0]), h[..., 0]], dim=-1)


def decided(result: ConvergenceResult) -> np.ndarray:
    found = result.decided_by_rounding()
    assert found is not None
    return found.values


def batch() -> Batch:
    inputs = torch.tensor([[0, 1, 2], [2, 0, 1]])
    n = torch.full((2,), 3)
    return Batch(inputs, torch.ones_like(inputs), n, n)


def rotation_of(angle: float) -> Tensor:
    """Eight features, in four planes."""
    cos, sin = (float(f(torch.tensor(angle))) for f in (torch.cos, torch.sin))
    return torch.block_diag(*[torch.tensor([[cos, -sin], [sin, cos]])] * 4)


def contraction() -> Affine:
    """The limit is 1 at all features, the spectral radius 0.8."""
    start = torch.linspace(-1, 3, 8)
    return Affine(0.8 * rotation_of(0.7), start=start)


def cycle(size: float) -> Affine:
    """A cycle of four states around 1; of a quarter turn, which is exact in every dtype."""
    return Affine(rotation_of(torch.pi / 2).round(), start=1 + size * torch.tensor([1.0, 0] * 4))


def drift(speed: float) -> Affine:
    return Affine(torch.eye(8), start=torch.ones(8), shift=speed)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_a_contraction_converges_to_its_limit_in_every_precision(dtype: torch.dtype) -> None:
    result = convergence_study(contraction().to(dtype), batch(), n_loops=N_LOOPS)
    assert result.settled_share() == 1
    assert (result.data["limit_status"] == Status.CONVERGED).all()
    # The weights in half precision are others: up to a rounding of each.
    error = torch.finfo(dtype).eps
    np.testing.assert_allclose(result.data["spectral_radius"], 0.8, rtol=max(2 * error, 1e-4))
    findings = result.findings()
    assert findings[0].good is True
    assert ("rounding" in result.data) == is_coarse(dtype)
    if is_coarse(dtype):
        assert not decided(result).any()
        assert (result.data["float32_regime"] == Regime.FIXED_POINT).all()
        # One loop makes three roundings of a state near 1, each of at most half an eps.
        assert (result.data["rounding"] <= 3 * error).all()


@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 0.03125), (torch.float16, 2**-8)])
def test_a_cycle_above_rounding_does_not_converge(dtype: torch.dtype, size: float) -> None:
    """Four units of rounding wide: the float32 cycle is the same, bit by bit."""
    whole, half = (
        convergence_study(cycle(size).to(kind), batch(), n_loops=N_LOOPS)
        for kind in (torch.float32, dtype)
    )
    for result in (whole, half):
        assert (result.data["regime"] == Regime.ORBIT).all() and result.settled_share() == 0
        # A cycle this narrow is told from a slow spiral in bfloat16's range only.
        assert not result.data["limit_status"].isin([Status.CONVERGED]).any()
    np.testing.assert_array_equal(half.data["limit_status"], whole.data["limit_status"])
    assert not decided(half).any()


@pytest.mark.parametrize("dtype", HALF)
def test_a_drift_of_one_unit_of_rounding_does_not_converge(dtype: torch.dtype) -> None:
    eps = torch.finfo(dtype).eps
    result = convergence_study(drift(eps).to(dtype), batch(), n_loops=N_LOOPS)
    assert (result.data["regime"] == Regime.DRIFT).all() and result.settled_share() == 0
    assert not decided(result).any()
    # Below half a unit rounding stops the run, and the result says so.
    stopped = convergence_study(drift(eps / 4).to(dtype), batch(), n_loops=N_LOOPS)
    assert (stopped.data["regime"] == Regime.FIXED_POINT).all()
    assert (stopped.data["float32_regime"] == Regime.DRIFT).all()
    assert decided(stopped).all()
    first, note = stopped.findings()[:2]
    assert first.good is None and "100% decided by rounding" in note.value


@pytest.mark.parametrize("dtype", HALF)
def test_movement_that_rounding_makes_is_convergence_to_rounding(dtype: torch.dtype) -> None:
    """Noise of one rounding about a limit: no fixed point in half precision, one in float32."""
    model, x = contraction(), batch().inputs
    generator = torch.Generator().manual_seed(0)
    states = torch.ones(N_LOOPS + 1, 2, 3, 8)  # the limit
    noise = torch.randn(states.shape, generator=generator) * torch.finfo(dtype).eps / 4
    at, _ = compare_with_float32((states + noise).to(dtype), bind(model, x))
    assert (at.regime == Regime.CONVERGED_TO_ROUNDING).all() and at.period.isnan().all()
    # Noise that is as large, without a limit in float32, is none.
    at, _ = compare_with_float32((states + noise).to(dtype), bind(drift(0.02), x))
    assert (at.regime != Regime.CONVERGED_TO_ROUNDING).all()


@pytest.mark.parametrize("dtype", HALF)
def test_classes_of_states_alone_know_the_dtype(dtype: torch.dtype) -> None:
    eps, loops = torch.finfo(dtype).eps, torch.arange(61.0)[:, None, None]
    flicker = (1 + eps * (loops % 2)).expand(-1, 3, 8).to(dtype)
    slide = (1 + eps * loops).expand(-1, 3, 8).to(dtype)
    assert (classify_regimes(flicker).regime == Regime.CONVERGED_TO_ROUNDING).all()
    assert (classify_regimes(slide).regime == Regime.DRIFT).all()
    assert (classify_settling(flicker).settling == SettlingClass.SETTLING).all()
    assert (classify_settling(slide).settling == SettlingClass.DRIFTING).all()
    assert np.isnan(find_rotation(flicker).explained)
    assert (classify_regimes(flicker.float()).regime == Regime.ORBIT).all()


@pytest.mark.parametrize("dtype", HALF)
def test_a_search_in_half_precision_ends_at_rounding_but_not_on_a_drift(dtype: torch.dtype) -> None:
    eps = torch.finfo(dtype).eps
    start = torch.ones(1, 8, dtype=dtype)

    def ends(f: Callable[[Tensor], Tensor], **options: Any) -> Status:
        return find_fixed_point(f, start, 1e-6, 60, patience=20, **options).statuses[0]

    unit = torch.tensor(1 + eps).to(dtype)
    for solver in ("picard", "anderson", "broyden"):
        # Between 1 and its neighbour lies the fixed point of no state.
        flicker = ends(lambda x: torch.where(x > 1, 1, unit).to(dtype), solver=solver)
        assert flicker == Status.CONVERGED_TO_ROUNDING
    assert ends(lambda x: x + eps) == Status.OUT_OF_BUDGET
    assert ends(lambda x: 2 - x + 4 * eps) in (Status.CYCLE, Status.STALLED)


def test_figures_and_findings_of_a_run_that_converges_to_rounding() -> None:
    run = pretrained_run("addition")
    batch = as_batch(run.task, n=12, batch_size=8)
    result = convergence_study(run.model().bfloat16(), batch, n_loops=40, n_spectral=0)
    # Which tokens move by roundings alone depends on the processor.
    assert 0 < result.to_rounding_share() <= result.settled_share() == 1
    first, note, _ = result.findings()
    assert first.good is True and note.value == "bfloat16: 0% decided by rounding"
    drawn = [f for f in result.figures() if "Long-run" in f.title]
    assert len(drawn) == (result.to_rounding_share() < 1)  # one class alone is not drawn
    for classes in drawn:
        assert classes.data is not None
        tokens: Any = classes.data.groupby("regime")["tokens"].sum()
        share = tokens["converged to rounding"] / tokens.sum()
        assert share == pytest.approx(result.to_rounding_share())


def test_a_model_that_cannot_be_copied_is_searched_as_it_is() -> None:
    """A model without modules stays in bfloat16, and the result says what was not resolved."""
    model = LinearModel(0.8 * rotation_of(0.7).bfloat16())
    result = convergence_study(model, batch(), n_loops=N_LOOPS)
    assert in_float32(model, batch().inputs) is None and result.decided_by_rounding() is None
    ends = result.data["limit_status"]
    assert ends.isin([Status.CONVERGED, Status.CONVERGED_TO_ROUNDING]).all()
    assert result.settled_share() == 1
    assert result.findings()[1].value == "bfloat16: resolved to 0.016"


def test_solvers_and_jacobians_of_a_model_are_those_of_float32() -> None:
    half = contraction().bfloat16()
    whole = copy.deepcopy(half).float()
    inputs = batch().inputs
    here, there = (find_fixed_point(model, inputs, solver="anderson") for model in (half, whole))
    assert here.state.dtype == torch.float32 and torch.equal(here.state, there.state)
    assert torch.equal(spectral_radius(half, inputs).radius, spectral_radius(whole, inputs).radius)
    assert half.matrix.dtype == torch.bfloat16  # the model itself is as it was


def _transformer() -> LoopedTransformer:
    config = LoopedTransformerConfig(
        d_model=16, n_heads=2, d_vocab=6, d_vocab_out=2, loop_norm=True, injection="input"
    )
    return LoopedTransformer(config, seed=0).eval()


@pytest.mark.parametrize(
    "study",
    [
        lambda m, b: reachability_study(
            m, b, n_loops=24, kicks=(0.1,), n_noise=1, n_others=1, n_draws=1
        ),
        lambda m, b: local_stability_study(
            m, b, k=1, n_loops=12, max_vectors=10, growth_loops=2, lyapunov_loops=8
        ),
        lambda m, b: geometry_study(m, b, n_loops=24, limit_steps=40),
        lambda m, b: attention_stabilisation_study(m, b, n_loops=12),
    ],
)
def test_studies_of_limits_are_those_of_the_same_weights_in_float32(
    study: Callable[[Any, Batch], Any],
) -> None:
    half = _transformer().bfloat16()
    here, there = study(half, batch()), study(copy.deepcopy(half).float(), batch())
    for name in there.data:
        np.testing.assert_array_equal(here.data[name], there.data[name], err_msg=str(name))
    config = here.provenance.config
    assert (config["state_dtype"], config["computed_in"]) == ("bfloat16", "float32")
    assert here.findings()[1].value == "weights rounded to bfloat16, run in float32"
    assert "state_dtype" not in there.provenance.config


def test_answers_are_compared_with_float32() -> None:
    half = _transformer().bfloat16()
    result = extrapolation_study(half, batch(), n_loops=20)
    whole = extrapolation_study(copy.deepcopy(half).float(), batch(), n_loops=20)
    np.testing.assert_array_equal(result.data["float32_exact"], whole.data["exact"])
    assert "float32_exact" not in whole.data and whole.decided_by_rounding() is None


def test_autocast_counts_as_half_precision() -> None:
    model = contraction()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = convergence_study(model, batch(), n_loops=N_LOOPS, n_spectral=0)
        assert computing_dtype(torch.ones(1)) == torch.bfloat16
        assert in_float32(model, batch().inputs) is model
    assert result.provenance.config["state_dtype"] == "bfloat16"
    assert (result.data["limit_status"] == Status.CONVERGED).all()
    assert result.settled_share() == 1 and (result.data["rounding"] > 1e-5).any()


@pytest.mark.parametrize("name", KINDS)
def test_an_adapter_has_a_copy_in_float32(name: str) -> None:
    # The activations of HRM and TRM have a dtype of their own.
    own = {"hrm": hrm.tiny, "trm": trm.tiny}
    build = partial(own[name], forward_dtype="bfloat16") if name in own else KINDS[name].build
    model = adapt(build().bfloat16())
    tokens = torch.randint(4, (2, 6), generator=torch.Generator().manual_seed(0))
    fine = in_float32(model, tokens)
    assert fine is not None and fine is not model
    bound = bind(fine, tokens).at(0)
    assert bound.step(bound.h0).dtype == torch.float32
    weights = dict(model.named_parameters())
    for weight, wide in zip(weights.values(), fine.parameters(), strict=True):
        assert torch.equal(weight.float(), wide)
