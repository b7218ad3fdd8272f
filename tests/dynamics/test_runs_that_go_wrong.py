"""NaN, infinity, growth, overflow, noise in the start, orbits: each study says what it is."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from loopinterp.core.results import Result
from loopinterp.dynamics import (
    Regime,
    Status,
    basin_map,
    convergence_study,
    extrapolation_study,
    geometry_study,
    input_dependence_study,
    likeliest,
    local_stability_study,
    reachability_study,
)
from loopinterp.tasks import Batch
from tests.dynamics.toys import MapModel, batch_of_ones, rotation

LOOPS = 48


class Starting(MapModel):
    """A map whose state has a type and a start of its own."""

    def __init__(
        self,
        function: Callable[[Tensor, Tensor], Tensor],
        start: Callable[[Tensor], Tensor] = torch.zeros_like,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(function)
        self.start, self.dtype = start, dtype

    def embed(self, inputs: Tensor) -> Tensor:
        return super().embed(inputs).to(self.dtype)

    def initial_state(self, e: Tensor) -> Tensor:
        return self.start(e)


def breaks(value: float) -> Callable[[Tensor, Tensor], Tensor]:
    """Counts loops, and is the value from the third on."""
    return lambda h, e: torch.where(h[..., 1:] >= 3, torch.full_like(h, value), h + e)


def noise(e: Tensor) -> Tensor:
    drawn = torch.randn(e.shape[1:], generator=torch.Generator().manual_seed(7))
    return drawn.to(e).expand_as(e)  # the same for every example, whatever is beside it


TURN = rotation(math.pi / 3)
ENDLESS: dict[str, Starting] = {
    "nan": Starting(breaks(math.nan)),
    "infinity": Starting(breaks(math.inf)),
    "growth": Starting(lambda h, e: 2 * h + e),
    "overflow in bfloat16": Starting(lambda h, e: 1e4 * h + e, dtype=torch.bfloat16),
    "overflow in float16": Starting(lambda h, e: 30 * h + e, dtype=torch.float16),
}
ORBIT = Starting(lambda h, e: h @ TURN.T, start=torch.clone)
NOISE = Starting(lambda h, e: h / 2 + e, start=noise)

STUDIES: dict[str, tuple[Callable[[Any, Batch], Result], Callable[[Any], Any]]] = {
    "convergence": (
        lambda m, b: convergence_study(m, b, n_loops=LOOPS, limit_steps=LOOPS, n_spectral=1),
        lambda r: r.data["limit_status"] == Status.CONVERGED,
    ),
    "geometry": (
        lambda m, b: geometry_study(m, b, n_loops=LOOPS, limit_steps=LOOPS),
        lambda r: r.data["limit_status"] == Status.CONVERGED,
    ),
    "reachability": (
        lambda m, b: reachability_study(
            m, b, n_loops=LOOPS, kicks=(0.1, 1.0), n_noise=1, n_others=1, n_draws=1
        ),
        lambda r: r.has_limit() & (r.data["period"].sel(start="own") == 1),
    ),
    "input dependence": (
        lambda m, b: input_dependence_study(m, b, n_loops=LOOPS, n_sensitivity=1, n_probes=1),
        lambda r: r.data["status"] == Status.CONVERGED,
    ),
    "local stability": (
        lambda m, b: local_stability_study(
            m, b, n_loops=LOOPS, k=1, growth_loops=4, lyapunov_loops=8
        ),
        lambda r: r.has_limit & (r.data["turn"] == 1),
    ),
    "basins": (
        lambda m, b: basin_map(m, b, n_loops=LOOPS, points=3),
        lambda r: r.data["reached"] >= 0,
    ),
}
"""Each study, and where its result says that a fixed point was found."""


def batch() -> Batch:
    ones = batch_of_ones(3, 2, ignored=0)
    ones.inputs.copy_(torch.tensor([[1, 1], [2, 1], [3, 2]]))
    return ones


@pytest.fixture
def short_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """For runs without a limit; that of a slow cycle takes the usual length."""
    monkeypatch.setattr("loopinterp.dynamics.local_stability.LIMIT_LOOPS", 64)


@pytest.mark.usefixtures("short_search")
# What is not a number and what is infinite are found alike, and both formats of 16 bits.
@pytest.mark.parametrize(
    ("study", "run"),
    [
        (study, run)
        for k, study in enumerate(STUDIES)
        for run in (
            ("nan", "infinity")[k % 2],
            "growth",
            ("overflow in bfloat16", "overflow in float16")[k % 2],
            "orbit",
        )
    ],
)
def test_where_nothing_rests_no_limit_is_found_and_nothing_attracts(study: str, run: str) -> None:
    make, has_limit = STUDIES[study]
    result = make((ENDLESS | {"orbit": ORBIT})[run], batch())
    assert not np.asarray(has_limit(result)).any()
    text = " ".join(finding.text for finding in result.findings())
    assert not re.search(r"attract|so small|\bnan\b", text), text
    assert result.figures() is not None


@pytest.mark.parametrize("study", STUDIES)
def test_noise_in_the_start_does_not_hide_the_limit(study: str) -> None:
    make, has_limit = STUDIES[study]
    assert np.asarray(has_limit(make(NOISE, batch()))).all()


def test_a_cycle_is_told_from_a_fixed_point_by_its_period() -> None:
    stability = STUDIES["local stability"][0](ORBIT, batch()).data
    assert (stability["turn"] == 6).all() and (stability["regime"] == Regime.ORBIT).all()
    status = convergence_study(ORBIT, batch(), n_loops=LOOPS).data["limit_status"]
    assert (status == Status.CYCLE).all()


@pytest.mark.parametrize("run", ENDLESS)
def test_divergence_is_the_regime_of_what_leaves_the_finite_numbers(run: str) -> None:
    result = convergence_study(ENDLESS[run], batch(), n_loops=LOOPS, n_spectral=0)
    assert (result.data["regime"] == Regime.DIVERGENCE).all()


def test_a_readout_of_nan_is_no_right_answer() -> None:
    """``argmax`` takes NaN for the largest logit, which here is that of the right class."""
    assert likeliest(torch.tensor([[0.0, math.nan], [math.nan, math.nan]])).tolist() == [-1, -1]
    exact = extrapolation_study(ENDLESS["nan"], batch(), n_loops=8).data["exact"]
    assert exact.sel(loop=slice(1, 3)).all() and not exact.sel(loop=slice(4, None)).any()
    last = convergence_study(ENDLESS["nan"], batch(), n_loops=12, n_spectral=0)
    assert (last.data["right"].sel(loop=12) == 0).all()
