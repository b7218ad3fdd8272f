"""The convergence study: does the iteration settle, where, how fast, and is it right there?"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch

from loopinterp.dynamics.checks import asked_positions, check_count, check_positive
from loopinterp.dynamics.fixed_point import find_fixed_point
from loopinterp.dynamics.jacobian import spectral_radius
from loopinterp.dynamics.measures import (
    SETTLED,
    contraction_rates,
    distance_to_limit,
    relative_residual,
    settling_time,
    update_cosine,
)
from loopinterp.dynamics.readouts import (
    correctness,
    readout_entropy,
    readout_kl,
    readout_margin,
    stable_from,
)
from loopinterp.dynamics.regimes import LEAST_LOOPS, Regime, classify_regimes
from loopinterp.dynamics.solvers.protocol import Solver, Status
from loopinterp.dynamics.solvers.registry import get_solver
from loopinterp.dynamics.trajectories import chunks, describe, run_loops
from loopinterp.models.protocol import bind
from loopinterp.results import Finding, Result, study

if TYPE_CHECKING:
    from torch import Tensor

    from loopinterp.models.protocol import Iteration, LoopedModel
    from loopinterp.results import Figure
    from loopinterp.tasks.task import Batch

PHASE = 16
"""Steps of the first phase of the search for a limit."""


@dataclass(frozen=True, kw_only=True)
class ConvergenceResult(Result):
    """How a looped model settles, token by token, with its accuracy beside it.

    The loop axis counts loops made: entry 0 is the initial state, and what belongs to an update
    (residual, contraction, cosine, KL) is NaN there.

    Attributes:
        residual: Relative residual of each token, 2-norm.
        residual_max: The same in the maximum norm over a whole sequence.
        distance: Distance to the limit over the limit's norm.
        contraction: Norm of the update over that of the update before.
        cosine: Cosine between the update and the one before.
        settled_at: Settling time; -1 where a token never settles.
        asymptotic_rate: Contraction rate of the whole sequence over the last loops above rounding.
        regime: :class:`Regime` code of each token.
        period: Loops per turn of tokens on an orbit.
        limit_status: How the search for the limit ended (:class:`Status`); where it did not
            converge, "distance" is the distance to the last state reached.
        spectral_radius: Of the Jacobian at the limit; NaN for examples beyond ``n_spectral``.
        spectral_residual: Relative residual of its Ritz pair.
        right: 1 where the answer is right, 0 where wrong, -1 where nothing is asked.
        stable_at: First loop whose answer is kept to the end.
        kl: KL divergence between the readout and that of the loop before, mean over positions.
        entropy: Entropy of the readout in nats, mean over positions.
        margin: Logit of the answer minus the runner-up's, mean over positions.
        counted: Positions that means, quantiles and figures count.
        n_loops: Loops of the run.
        threshold: Residual that counts as settled.
        answer_loops: T(n) of each example.
    """

    AXES: ClassVar[dict[str, tuple[str, ...]]] = {
        "residual": ("loop", "batch", "pos"),
        "distance": ("loop", "batch", "pos"),
        "contraction": ("loop", "batch", "pos"),
        "cosine": ("loop", "batch", "pos"),
        "right": ("loop", "batch", "pos"),
        "residual_max": ("loop", "batch"),
        "kl": ("loop", "batch"),
        "entropy": ("loop", "batch"),
        "margin": ("loop", "batch"),
        "settled_at": ("batch", "pos"),
        "stable_at": ("batch", "pos"),
        "regime": ("batch", "pos"),
        "period": ("batch", "pos"),
        "counted": ("batch", "pos"),
        "asymptotic_rate": ("batch",),
        "limit_status": ("batch",),
        "spectral_radius": ("batch",),
        "spectral_residual": ("batch",),
    }

    residual: np.ndarray
    distance: np.ndarray
    contraction: np.ndarray
    cosine: np.ndarray
    right: np.ndarray
    residual_max: np.ndarray
    kl: np.ndarray
    entropy: np.ndarray
    margin: np.ndarray
    settled_at: np.ndarray
    stable_at: np.ndarray
    regime: np.ndarray
    period: np.ndarray
    counted: np.ndarray
    asymptotic_rate: np.ndarray
    limit_status: np.ndarray
    spectral_radius: np.ndarray
    spectral_residual: np.ndarray
    n_loops: int
    threshold: float
    answer_loops: list[int]

    def mean_residual(self) -> np.ndarray:
        """Mean relative residual of the counted tokens after each loop; NaN before the first."""
        return self.residual[:, self.counted == 1].mean(axis=1)

    def exact_match(self) -> np.ndarray:
        """Share of examples that are right in every asked position, after each loop."""
        return (self.right != 0).all(axis=2).mean(axis=1)

    def settled_share(self) -> float:
        """Share of the counted tokens that settle within the run."""
        return float((self.settled_at[self.counted == 1] >= 0).mean())

    def regime_counts(self) -> dict[str, int]:
        """Counted tokens of each regime, by its name in plain words."""
        codes = self.regime[self.counted == 1]
        return {regime.label: int((codes == regime).sum()) for regime in Regime}

    def summary(self) -> list[Finding]:
        """What the study found, in plain words."""
        from loopinterp.dynamics.summaries import convergence_findings

        return convergence_findings(self)

    def figures(self) -> list[Figure]:
        """Residuals, distance by position, rates, regimes, stability, readout."""
        from loopinterp.dynamics.figures import convergence_figures

        return convergence_figures(self)


def convergence_study(
    model: LoopedModel,
    batch: Batch,
    *,
    n_loops: int | None = None,
    solver: str | Solver = "picard",
    limit_tol: float = 1e-5,
    limit_steps: int = 200,
    n_spectral: int = 8,
    spectral_vectors: int = 64,
    threshold: float = SETTLED,
    positions: Literal["asked", "all"] = "asked",
    seed: int = 0,
) -> ConvergenceResult:
    r"""Follow the state of every token through the loops, to its limit if it has one.

    The limit :math:`h^*` is sought from the last state of the run, by plain iteration unless
    another solver is named: with it, the limit is where the model itself goes.

    Args:
        model: Any looped model.
        batch: Examples with targets; best of one problem length, as figures are by position.
        n_loops: Loops of the run, at least 12; by default a quarter more than the longest T(n),
            and at least 24.
        solver: Solver for the limit.
        limit_tol: Its relative tolerance.
        limit_steps: Its largest number of steps beyond the run.
        n_spectral: Examples whose spectral radius is computed (0 for none).
        spectral_vectors: Largest Krylov space for it.
        threshold: Relative residual that counts as settled.
        positions: Count the positions where an answer is asked, or all (padding included).
        seed: Seed of the starting vectors of the spectral radius.

    Raises:
        InputError: If an option is out of range, an example asks nothing, or the initial state
            is not finite.
    """
    counted = asked_positions(batch, positions)
    if n_loops is None:
        n_loops = max(24, math.ceil(1.25 * int(batch.n_loops.max())))
    check_count("n_loops", n_loops, least=LEAST_LOOPS)
    check_count("limit_steps", limit_steps)
    check_count("n_spectral", n_spectral, least=0)
    check_positive("threshold", threshold)
    solver = get_solver(solver)
    settings = {
        "n_loops": n_loops,
        "solver": repr(solver),
        "limit_tol": limit_tol,
        "limit_steps": limit_steps,
        "threshold": threshold,
        "positions": positions,
        "n_examples": len(batch),
    }
    with study(seed, model=describe(model), **settings) as watch, torch.no_grad():
        state_bytes = _state_bytes(model, batch)
        parts = []
        for rows in chunks(len(batch), (n_loops + 1) * state_bytes):
            iteration = bind(model, batch.inputs[rows])
            states = run_loops(iteration, n_loops)
            limit, status = _limit(iteration, states, solver, limit_tol, limit_steps)
            part = _measure(states, limit, threshold)
            part |= _readouts(iteration, states, batch.targets[rows], counted[rows])
            take = min(max(n_spectral - rows.start, 0), len(limit))
            part |= _stability(iteration, limit, status, take, spectral_vectors, seed)
            parts.append({name: value.cpu() for name, value in part.items()})
        arrays = {
            name: torch.cat([p[name] for p in parts], dim=axes.index("batch")).numpy()
            for name, axes in ConvergenceResult.AXES.items()
            if name != "counted"
        }
        return ConvergenceResult(
            **arrays,
            counted=counted.to(torch.int8).cpu().numpy(),
            n_loops=n_loops,
            threshold=threshold,
            answer_loops=batch.n_loops.tolist(),
            provenance=watch.provenance(),
        )


def _state_bytes(model: LoopedModel, batch: Batch) -> int:
    """Bytes of one example's state."""
    h0 = bind(model, batch.inputs[:1]).h0
    return h0.numel() * h0.element_size()


def _limit(
    iteration: Iteration, states: Tensor, solver: Solver, tol: float, max_steps: int
) -> tuple[Tensor, Tensor]:
    """The limit of each example, sought from its last state; and how the search ended."""
    finite = states.isfinite().flatten(2).all(dim=2).all(dim=0)
    limit = torch.where(finite[:, None, None], states[-1], states[0])
    status = torch.where(finite, int(Status.MAX_STEPS), int(Status.DIVERGED))
    done, steps = 0, PHASE
    # In phases of growing length, so that examples that have arrived leave the batch.
    while done < max_steps and (rows := (status == Status.MAX_STEPS).nonzero().flatten()).numel():
        steps = min(steps, max_steps - done)
        found = find_fixed_point(
            iteration.select(rows).step, limit[rows], solver=solver, tol=tol, max_steps=steps
        )
        limit[rows], status[rows] = found.state, found.status
        done, steps = done + steps, 2 * steps
    return limit, status.to(torch.int8)


def _measure(states: Tensor, limit: Tensor, threshold: float) -> dict[str, Tensor]:
    """Everything that is read from the states alone."""
    sequence = states.flatten(2)
    options: dict[str, Any] = {"allow_nonfinite": True}
    residual = relative_residual(states, **options)
    regimes = classify_regimes(states)
    return {
        "residual": _from_loop(residual, 1),
        "residual_max": _from_loop(relative_residual(sequence, norm="max", **options), 1),
        "distance": distance_to_limit(states, limit, relative=True, **options).float(),
        "contraction": _from_loop(contraction_rates(states, **options).per_loop, 2),
        "cosine": _from_loop(update_cosine(states, **options), 2),
        "settled_at": settling_time(residual, threshold=threshold).to(torch.int32),
        "asymptotic_rate": contraction_rates(sequence, **options).asymptotic.float(),
        "regime": regimes.regime.to(torch.int8),
        "period": regimes.period.float(),
    }


def _readouts(
    iteration: Iteration, states: Tensor, targets: Tensor, counted: Tensor
) -> dict[str, Tensor]:
    """What is read from the states, two loops at a time: large vocabularies do not add up."""
    options: dict[str, Any] = {"allow_nonfinite": True}
    answers, kl, entropy, margin = [], [], [], []
    before: Tensor | None = None
    for state in states:
        logits = iteration.readout(state)[None]
        answers.append(logits[0].argmax(dim=-1))
        entropy.append(_mean(readout_entropy(logits, **options)[0], counted))
        margin.append(_mean(readout_margin(logits, **options)[0], counted))
        if before is not None:
            kl.append(_mean(readout_kl(torch.cat([before, logits]), **options)[0], counted))
        before = logits
    answer = torch.stack(answers)
    return {
        "right": correctness(answer, targets),
        "stable_at": stable_from(answer).to(torch.int32),
        "kl": _from_loop(torch.stack(kl), 1),
        "entropy": torch.stack(entropy).float(),
        "margin": torch.stack(margin).float(),
    }


def _stability(
    iteration: Iteration, limit: Tensor, status: Tensor, take: int, vectors: int, seed: int
) -> dict[str, Tensor]:
    """Spectral radius at the limits of the first ``take`` examples that do not diverge."""
    radius = torch.full((len(limit),), float("nan"))
    residual = radius.clone()
    rows = (status[:take] != Status.DIVERGED).nonzero().flatten()
    if len(rows):
        some = iteration.select(rows)
        spectrum = spectral_radius(some.step, limit[rows], max_vectors=vectors, seed=seed)
        radius[rows.cpu()] = spectrum.radius.float().cpu()
        residual[rows.cpu()] = spectrum.residual.float().cpu()
    return {"spectral_radius": radius, "spectral_residual": residual, "limit_status": status}


def _from_loop(values: Tensor, first: int) -> Tensor:
    """Put NaN before loop ``first``, so that entry ``t`` belongs to the state after ``t`` loops."""
    missing = torch.full((first, *values.shape[1:]), float("nan"), device=values.device)
    return torch.cat([missing, values.float()])


def _mean(values: Tensor, counted: Tensor) -> Tensor:
    """Mean over the counted positions of each example."""
    return (values * counted).sum(dim=1) / counted.sum(dim=1)
