"""The convergence study: does the iteration converge, how fast, and to a right answer?"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from loopinterp.core.boundary import checked
from loopinterp.core.intervals import share_of
from loopinterp.core.results import Result, study
from loopinterp.core.settings import Seed
from loopinterp.core.text import track
from loopinterp.dynamics import measures
from loopinterp.dynamics.fixed_point import get_solver
from loopinterp.dynamics.limits import limits_of_run
from loopinterp.dynamics.measures import (
    AfterLoops,
    Counted,
    beside_float32,
    counted_examples,
    gather,
    run_loops,
    state_chunks,
    usual_loops,
)
from loopinterp.dynamics.regimes import (
    LEAST_LOOPS,
    ClassifiedLoops,
    Regime,
    RegimeCriteria,
    Regimes,
    classify_regimes,
)
from loopinterp.dynamics.solvers import Solver, Status
from loopinterp.dynamics.spectra import spectral_radius
from loopinterp.models.iteration import bind, no_autocast
from loopinterp.models.protocol import takes_loop
from loopinterp.models.study_examples import answered_after

if TYPE_CHECKING:
    import xarray as xr
    from jaxtyping import Float
    from torch import Tensor

    from loopinterp.dynamics.limits import Limits
    from loopinterp.models.iteration import Iteration
    from loopinterp.models.protocol import LoopedModel
    from loopinterp.tasks.task import Batch, Task

RITZ_TOLERANCE = 0.01
"""Largest error of a Ritz value for a known spectral radius."""

FATES = (
    "rests right",
    "rests wrong",
    "rests wrong, was right at T(n)",
    "moves on, right",
    "moves on, wrong",
    "moves on, wrong, was right at T(n)",
)
"""Convergence of an example ("rests") and correctness."""


_CONVERGED = (Regime.FIXED_POINT, Regime.CONVERGED_TO_ROUNDING)

_OF_HALF_PRECISION = ("rounding", "float32_regime", "float32_settled_at")
"""Arrays of a run in half precision."""


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class ConvergenceResult(AfterLoops, Result, kind="convergence"):
    """Convergence of a looped model, token by token, with its accuracy.

    Loop 0 is the initial state. In half precision, limits and spectral radii are those of the same
    weights in float32.

    Arrays:
        residual, residual_max: Relative residual of a token (2-norm), of a sequence (maximum norm).
        distance: Relative distance to the limit (or the last state).
        contraction, cosine: Ratio of the norms of two successive updates, and their cosine.
        right: 1 right, 0 wrong, -1 not asked.
        kl, entropy, margin: Of the readout, means over counted positions: KL divergence from the
            previous loop, entropy (nats), distance of the two largest logits.
        settled_at: First loop from which the residual stays below ``threshold``; -1 for never. Not
            yet convergence (:meth:`settling_times`).
        stable_at: First loop whose answer is kept to the end of the run.
        regime, period: :class:`Regime` code; loops per turn of tokens on an orbit.
        counted: Positions that means and figures count.
        asymptotic_rate: Contraction rate of the last loops.
        limit_status: :class:`Status` of the search for the limit.
        spectral_radius, spectral_residual: Of the Jacobian at the first limits; known if their
            product is <= 0.01.
        answer_loops: T(n) of each example.
        rounding: In half precision: largest relative difference of one late loop from float32.
        float32_regime, float32_settled_at: In half precision: of the same weights in float32.

    Attributes:
        threshold: Residual below which a token counts as converged.
        answered_after: The loops after which the answer is read, in words.
        one_map: Whether all loops apply one map; else no limit is sought.
    """

    VARIABLES: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("residual", "distance", "contraction"), "loop batch pos"),
        **dict.fromkeys(("cosine", "right"), "loop batch pos"),
        **dict.fromkeys(("residual_max", "kl", "entropy", "margin"), "loop batch"),
        **dict.fromkeys(("settled_at", "stable_at", "regime", "period", "counted"), "batch pos"),
        **dict.fromkeys(("asymptotic_rate", "limit_status", "answer_loops"), "batch"),
        **dict.fromkeys(("spectral_radius", "spectral_residual"), "batch"),
        **dict.fromkeys(_OF_HALF_PRECISION, "batch pos"),
    }
    OPTIONAL: ClassVar[frozenset[str]] = frozenset(_OF_HALF_PRECISION)

    threshold: float
    answered_after: str = "T(n)"
    one_map: bool = True

    def of_counted(self, name: str) -> xr.DataArray:
        """An array of tokens, NaN at uncounted positions."""
        return self.data[name].where(self.data["counted"])

    def mean_residual(self) -> xr.DataArray:
        """Mean relative residual of counted tokens after each loop."""
        residual = self.data["residual"].where(self.data["counted"], 0)
        total = residual.sum(("batch", "pos"), skipna=False)
        return total / self.data["counted"].sum()

    def exact_match(self) -> xr.DataArray:
        """Share of examples with every asked position right, [loop, estimate]."""
        return share_of((self.data["right"] != 0).all("pos"), "batch")

    def right_from(self) -> xr.DataArray:
        """First loop from which a token stays right; infinity if wrong, NaN if not asked."""
        right = self.data["right"]
        last_wrong = ((right == 0) * (right["loop"] + 1)).max("loop").astype(float)
        final = right.isel(loop=-1)
        return last_wrong.where(final != 0, np.inf).where(final >= 0)

    def settling_times(self) -> xr.DataArray:
        """``settled_at`` of tokens that converge, also to rounding; infinity elsewhere."""
        at = self.data["settled_at"]
        return at.astype(float).where((at >= 0) & self.data["regime"].isin(_CONVERGED), np.inf)

    def below_threshold(self) -> xr.DataArray:
        """``settled_at`` of counted tokens of any regime; NaN for never."""
        at = self.data["settled_at"].astype(float)
        return at.where((at >= 0) & self.data["counted"])

    def settled_share(self) -> float:
        return float((self.settling_times() < np.inf).where(self.data["counted"]).mean())

    def to_rounding_share(self) -> float:
        """Share of counted tokens that converge to rounding."""
        to_rounding = self.of_counted("regime") == Regime.CONVERGED_TO_ROUNDING
        return float(to_rounding.sum() / self.data["counted"].sum())

    def decided_by_rounding(self) -> xr.DataArray | None:
        """Tokens that converge in one precision only, [batch, pos]; None for a run in float32."""
        if "float32_regime" not in self.data:
            return None
        here, there = (
            (self.data[f"{run}settled_at"] >= 0) & self.data[f"{run}regime"].isin(_CONVERGED)
            for run in ("", "float32_")
        )
        return (here != there) & self.data["counted"]

    def fates(self) -> xr.DataArray:
        """One of :data:`FATES` for each example, [batch].

        An example rests if all its counted tokens converge.
        """
        exact = (self.data["right"] != 0).all("pos")
        first, last = exact.sel(loop=self.data["answer_loops"]), exact.isel(loop=-1)
        rests = ((self.settling_times() < np.inf) | ~self.data["counted"]).all("pos")
        place = 3 * ~rests + np.where(last, 0, np.where(first, 2, 1))  # index into FATES, [batch]
        return place.copy(data=np.array(FATES)[place.values])

    def regime_counts(self) -> dict[str, int]:
        """Counted tokens of each regime, by label."""
        codes = self.of_counted("regime")
        return {regime.label: int((codes == regime).sum()) for regime in Regime}


@checked
def convergence_study(
    model: LoopedModel,
    data: Batch | Task,
    *,
    n_loops: ClassifiedLoops | None = None,
    solver: str | Solver = "picard",
    limit_tol: PositiveFloat = 1e-5,
    limit_steps: PositiveInt = 200,
    n_spectral: NonNegativeInt = 8,
    threshold: PositiveFloat = measures.SETTLED,
    positions: Counted = "asked",
    n: PositiveInt | None = None,
    batch_size: PositiveInt | None = None,
    seed: Seed = 0,
) -> ConvergenceResult:
    """Follow the state of every token through the loops, to its limit if it has one.

    A run in half precision is compared, loop by loop, with the same weights in float32, which also
    search for the limits.

    Args:
        data: Examples, best of one length.
        n_loops: By default a quarter more than the longest T(n), and at least 24.
        solver: Continues from the end of the run. Only plain iteration surely finds the limit that
            the model reaches.
        limit_tol, limit_steps: Relative tolerance of the limit; most steps beyond the run.
        n_spectral: Examples with a limit whose spectral radius is computed.
        threshold: Residual below which a token counts as converged.
    """
    drawn = {"n": n, "batch_size": batch_size, "seed": seed}
    batch, counted = counted_examples(
        model, data, positions, needs_loops=n_loops is None, of_states=True, **drawn
    )
    n_loops = n_loops or usual_loops(batch, times=1.25, least=24)
    solver = get_solver(solver)
    settings = {"n_loops": n_loops, "solver": repr(solver), "limit_tol": limit_tol}
    settings |= {"limit_steps": limit_steps, "threshold": threshold, "positions": positions}
    settings["n_examples"] = len(batch)
    search: dict[str, Any] = {"max_loops": limit_steps, "tol": limit_tol, "solver": solver}
    about, precise = beside_float32(model, batch.inputs)
    if precise is not None:
        about["limits_in"] = "float32"
    with study(seed, **about, **settings) as watch, torch.no_grad():
        parts = []
        for rows in track(state_chunks(model, batch, n_loops + 1), "convergence"):
            iteration = bind(model, batch.inputs[rows])
            states = run_loops(iteration, n_loops)
            with nullcontext() if precise is None else no_autocast(states.device):
                exact = iteration if precise is None else bind(precise, batch.inputs[rows])
                limits = limits_of_run(exact, states.to(exact.h0.dtype), **search)
                part = _of_states(states, limits.state, threshold)
                part["limit_status"] = limits.status.to(torch.int8)
                part |= _spectra_at(exact, limits, n_spectral, seed)
                n_fixed_points = int((limits.status == Status.CONVERGED).sum())
                n_spectral = max(0, n_spectral - n_fixed_points)
                if precise is not None:
                    part |= _at_rounding(states, exact, threshold)
            parts.append(part | _readouts(iteration, states, batch.targets[rows], counted[rows]))
        return ConvergenceResult.of(
            watch,
            coords={"loop": range(n_loops + 1)},
            **gather(ConvergenceResult, parts),
            counted=counted,
            answer_loops=batch.n_loops,
            threshold=threshold,
            answered_after=answered_after(model),
            one_map=not takes_loop(model),
        )


def _spectra_at(
    iteration: Iteration, limits: Limits, most: int, seed: int
) -> dict[str, Float[Tensor, " batch"]]:
    """Spectral radii at the first limits that are fixed points, at most so many; NaN elsewhere."""
    radius = torch.full((len(limits.state),), float("nan"), dtype=torch.float32)
    part = {"spectral_radius": radius, "spectral_residual": radius.clone()}
    with_limit = (limits.status == Status.CONVERGED).nonzero().flatten()[:most]
    if len(with_limit):
        step, at = iteration.select(with_limit).step, limits.state[with_limit]
        spectrum = spectral_radius(step, at, max_vectors=64, seed=seed)
        part["spectral_radius"][with_limit.cpu()] = spectrum.radius.float().cpu()
        part["spectral_residual"][with_limit.cpu()] = spectrum.residual.float().cpu()
    return part


def _at_rounding(states: Tensor, exact: Iteration, threshold: float) -> dict[str, Tensor]:
    regimes, rounding = compare_with_float32(states, exact, threshold=threshold)
    whole = run_loops(exact, len(states) - 1)  # in float32
    whole_residual = measures.relative_residual(whole, allow_nonfinite=True)
    whole_settled_at = measures.settling_time(whole_residual, threshold=threshold)
    residual = measures.relative_residual(states, allow_nonfinite=True)
    # The residual over the threshold of each token, so that one threshold serves all.
    relative = residual * threshold / _small_movement(rounding, threshold)
    return {
        "settled_at": measures.settling_time(relative, threshold=threshold).to(torch.int32),
        "regime": regimes.regime.to(torch.int8),
        "period": regimes.period.float(),
        "rounding": rounding.float(),
        "float32_regime": classify_regimes(whole).regime.to(torch.int8),
        "float32_settled_at": whole_settled_at.to(torch.int32),
    }


@torch.no_grad()
def compare_with_float32(
    states: Float[Tensor, "loop batch pos d_model"],
    precise: Iteration,
    *,
    threshold: float = measures.SETTLED,
) -> tuple[Regimes, Float[Tensor, "batch pos"]]:
    r"""Classify a half-precision run, with the loop in float32 as the reference.

    One loop in the run's dtype is :math:`\tilde f(h) = f(h) + \epsilon(h)`, with f the loop in
    float32 of the same weights; :math:`\|\epsilon(h)\| / \|f(h)\|` is the *rounding* of a loop.
    Movement of that size does not tell whether a run converges. A run in float32 from one of its
    late states does.

    Args:
        states: Its states after 0..T loops, at least 12.
        precise: The loop in float32 on the same inputs.
        threshold: Relative residual below which a trajectory counts as converged.

    Returns:
        The regimes, and the largest rounding of the late loops. A trajectory that moves, though the
        run in float32 converges, has *converged to rounding* if its residual is small and its
        movement leads nowhere.
    """
    n_loops = len(states) - 1
    window = max(LEAST_LOOPS // 2, n_loops // 2)
    first = n_loops - max(LEAST_LOOPS, window)  # the state that the run in float32 starts from
    reference = [states[first].float()]
    for loop in range(first, n_loops):
        reference.append(precise.step(reference[-1], loop))
    other = classify_regimes(torch.stack(reference), RegimeCriteria(window=window))
    own = classify_regimes(states, RegimeCriteria(window=window, rounding=0))

    last = n_loops - max(1, window // 3)
    late = states[last:].float()
    differences = []  # that one loop makes, [batch, pos] each
    for loop, (state, after) in enumerate(pairwise(late), last):
        exact = precise.step(state, loop)
        gap = (after - exact).norm(dim=-1)
        differences.append(measures.share_of_size(gap, exact.norm(dim=-1)))
    rounding = torch.stack(differences).amax(dim=0)  # [batch, pos]
    residual = measures.relative_residual(late, allow_nonfinite=True)  # [loop, batch, pos]
    small = (residual < _small_movement(rounding, threshold)).all(dim=0)
    # From first to last the way is within two roundings, or under half of the path, [batch, pos]
    path = (late[1:] - late[:-1]).norm(dim=-1).sum(dim=0)
    net = (late[-1] - late[0]).norm(dim=-1)
    leads_nowhere = (net <= 2 * rounding * late[-1].norm(dim=-1)) | (net < 0.5 * path)
    to_rounding = (other.regime == Regime.FIXED_POINT) & small & leads_nowhere
    to_rounding &= own.regime != Regime.FIXED_POINT
    regime = torch.where(to_rounding, int(Regime.CONVERGED_TO_ROUNDING), own.regime)
    return Regimes(regime, own.period.float().masked_fill(to_rounding, float("nan"))), rounding


def _small_movement(rounding: Tensor, threshold: float) -> Float[Tensor, "batch pos"]:
    # A residual is the difference of two states, each with its rounding.
    return (2 * rounding).clamp(min=threshold)


def _of_states(states: Tensor, limit: Tensor, threshold: float) -> dict[str, Tensor]:
    sequence = states.flatten(2)  # [loop, batch, pos * d_model]
    diverging: Any = {"allow_nonfinite": True}
    residual, regimes = measures.relative_residual(states, **diverging), classify_regimes(states)
    largest = measures.relative_residual(sequence, norm="max", **diverging)
    distance = measures.distance_to_limit(states.to(limit.dtype), limit, relative=True, **diverging)
    return {
        "residual": _from_loop(residual, 1),
        "residual_max": _from_loop(largest, 1),
        "distance": distance.float(),
        "contraction": _from_loop(measures.contraction_rates(states, **diverging).per_loop, 2),
        "cosine": _from_loop(measures.update_cosine(states, **diverging), 2),
        "settled_at": measures.settling_time(residual, threshold=threshold).to(torch.int32),
        "asymptotic_rate": measures.contraction_rates(sequence, **diverging).asymptotic.float(),
        "regime": regimes.regime.to(torch.int8),
        "period": regimes.period.float(),
    }


def _readouts(
    iteration: Iteration, states: Tensor, targets: Tensor, counted: Tensor
) -> dict[str, Tensor]:
    answers, gaps, entropies, margins = [], [], [], []
    before: Tensor | None = None

    def mean(values: Tensor) -> Tensor:
        return torch.where(counted, values, 0).sum(dim=1) / counted.sum(dim=1)

    for loop, state in enumerate(states):
        logits = iteration.read(state, loop)
        answers.append(measures.likeliest(logits))
        entropies.append(mean(measures.readout_entropy(logits, allow_nonfinite=True)))
        margins.append(mean(measures.readout_margin(logits, allow_nonfinite=True)))
        if before is not None:
            pair = torch.stack([before, logits])
            gaps.append(mean(measures.readout_kl(pair, allow_nonfinite=True)[0]))
        before = logits
    answer = torch.stack(answers)  # [loop, batch, pos]
    return {
        "right": measures.correctness(answer, targets),
        "stable_at": measures.stable_from(answer).to(torch.int32),
        "kl": _from_loop(torch.stack(gaps), 1),
        "entropy": torch.stack(entropies).float(),
        "margin": torch.stack(margins).float(),
    }


def _from_loop(values: Tensor, first: int) -> Tensor:
    """Prepend NaN so that entry ``t`` belongs to the state after ``t`` loops."""
    values = values.float()
    missing = values.new_full((first, *values.shape[1:]), float("nan"))  # [first, batch]
    return torch.cat([missing, values])
