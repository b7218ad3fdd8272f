"""Local stability: what becomes of a small disturbance at the limits and cycles of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from pydantic import PositiveFloat, PositiveInt

from loopinterp.core.boundary import Loops, checked
from loopinterp.core.progress import track
from loopinterp.core.results import Result, study
from loopinterp.core.settings import Seed
from loopinterp.dynamics import runs, spectra
from loopinterp.dynamics.convergence import RITZ_TOLERANCE
from loopinterp.dynamics.growth import lyapunov_exponents, of_each, transient_growth
from loopinterp.dynamics.limits import LIMIT_LOOPS, find_limits, noise_like
from loopinterp.dynamics.measures import correctness, exact_match, likeliest
from loopinterp.dynamics.regimes import ClassifiedLoops, classify_regimes
from loopinterp.models.iteration import bind
from loopinterp.models.protocol import need_one_map

if TYPE_CHECKING:
    import xarray as xr
    from torch import Tensor

    from loopinterp.models.iteration import Iteration
    from loopinterp.models.protocol import LoopedModel
    from loopinterp.tasks.task import Batch, Task

WHERE = ("limit", "start", "random")
"""States at which the Jacobian is taken: the limit (or cycle), and its two controls."""


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class LocalStabilityResult(Result, kind="local-stability"):
    r"""Eigenvalues and singular values of the loop's Jacobian, of each example.

    The axis ``where`` names the state: the limit; and as controls the initial state, and random
    states whose tokens have the norms that they have at the limit. On a cycle of p states the
    Jacobian is that of p loops, from one of them and from the controls alike, and its eigenvalues
    are the multipliers. Where neither was found all three are NaN.

    Arrays:
        turn: Loops of one turn: 1 at a limit, p on a cycle, 0 where neither was found.
        regime: :class:`Regime` code of the example's whole state.
        right: 1 where the answer is right after the last loop, 0 where wrong, -1 of a readout of
            one number, which is no answer.
        eigenvalue_real, eigenvalue_imag: Eigenvalues of largest modulus, largest first.
        eigenvalue_residual: Relative residual of their Ritz pairs.
        singular_value, singular_residual: Largest singular values, and their relative residuals.
        solve_largest: Largest singular value of I - J.
        solve_smallest: The smallest one; an upper bound where ``solve_known`` is False.
        solve_known: Whether their ratio is known; elsewhere it is a lower bound.
        growth: Largest transient growth, :math:`\max_t \|J^t\|`.
        growth_at: The power t at which it is.
        growth_closed: Whether no later power can exceed it.
        lyapunov: Largest Lyapunov exponent of the trajectory from the end of the run, in nats per
            loop, with its interval over blocks of loops; whatever the regime.
    """

    VARIABLES: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("turn", "regime", "right"), "batch"),
        **dict.fromkeys(("eigenvalue_real", "eigenvalue_imag"), "where batch eigenvalue"),
        "eigenvalue_residual": "where batch eigenvalue",
        **dict.fromkeys(("singular_value", "singular_residual"), "where batch singular"),
        **dict.fromkeys(("solve_largest", "solve_smallest", "solve_known"), "where batch"),
        **dict.fromkeys(("growth", "growth_at", "growth_closed"), "where batch"),
        "lyapunov": "batch estimate",
    }

    @property
    def found(self) -> xr.DataArray:
        """Whether a limit or a cycle was found, [batch]."""
        return self.data["turn"] > 0

    def eigenvalues(self) -> xr.DataArray:
        """The leading eigenvalues, complex, [where, batch, eigenvalue]."""
        return self.data["eigenvalue_real"] + 1j * self.data["eigenvalue_imag"]

    def radius(self) -> xr.DataArray:
        """Spectral radius, [where, batch]; NaN where it is not known to within 0.01."""
        radius = np.abs(self.eigenvalues().isel(eigenvalue=0))
        residual = self.data["eigenvalue_residual"].isel(eigenvalue=0)
        return radius.where(residual * radius <= RITZ_TOLERANCE)

    def non_normality(self) -> xr.DataArray:
        """Largest singular value over spectral radius, [where, batch]."""
        return self.data["singular_value"].isel(singular=0) / self.radius()

    def condition(self) -> xr.DataArray:
        """Condition number of I - J, or a lower bound of it, [where, batch]."""
        return self.data["solve_largest"] / self.data["solve_smallest"]


@checked
def local_stability_study(
    model: LoopedModel,
    data: Batch | Task,
    *,
    n_loops: ClassifiedLoops | None = None,
    k: PositiveInt = 6,
    limit_tol: PositiveFloat = 1e-5,
    tol: PositiveFloat = 1e-3,
    max_vectors: PositiveInt = 60,
    max_products: PositiveInt = 300,
    growth_loops: PositiveInt = 8,
    lyapunov_loops: Loops = 64,
    n: PositiveInt | None = None,
    batch_size: PositiveInt | None = None,
    seed: Seed = 0,
) -> LocalStabilityResult:
    r"""Linearise the loop at each example's limit or cycle, at its initial and at a random state.

    The limit is sought from the end of the run by plain iteration, so that it is where the model
    itself goes; or a cycle, where it comes back to itself.

    Args:
        data: Examples with targets, 8 are mostly enough; or a task to draw them from.
        n_loops: By default a quarter more than the longest T(n), and at least 24.
        k: Eigenvalues and singular values of each Jacobian.
        limit_tol: Relative tolerance of limits and cycles.
        tol, max_products: As for :func:`leading_eigenvalues`.
        max_vectors: Most vectors held by the Krylov methods; twice as many for I - J.
        growth_loops: Largest power of J for the transient growth.
        lyapunov_loops: Loops counted for the Lyapunov exponent.
    """
    need_one_map(model)
    drawn = {"n": n, "batch_size": batch_size, "seed": seed}
    batch, _ = runs.counted_examples(
        model, data, needs_loops=n_loops is None, of_states=True, **drawn
    )
    n_loops = n_loops or runs.usual_loops(batch, times=1.25, least=24)
    options: dict[str, Any] = {"k": k, "tol": tol, "max_vectors": max_vectors}
    options |= {"max_products": max_products, "growth_loops": growth_loops}
    settings = {"n_loops": n_loops, "limit_tol": limit_tol, "lyapunov_loops": lyapunov_loops}
    settings |= {**options, "n_examples": len(batch)}
    generator = torch.Generator().manual_seed(seed)
    with study(seed, **runs.described(model, batch), **settings) as watch, torch.no_grad():
        parts = []
        n_states = max(n_loops + 1, 200)  # the spaces of the Krylov methods need 200 at once
        for rows in track(runs.state_chunks(model, batch, n_states), "stability"):
            iteration = bind(model, batch.inputs[rows])
            states = runs.run_loops(iteration, n_loops)
            limits = find_limits(iteration, states[-1], max_loops=LIMIT_LOOPS, tol=limit_tol)
            at, _ = _finite_states(limits.state)
            regimes = classify_regimes(states.flatten(2)).regime.to(torch.int8)
            part = {"turn": limits.period.to(torch.int32), "regime": regimes}
            answer = likeliest(iteration.read(states[-1], n_loops))
            right = correctness(answer, batch.targets[rows])
            part["right"] = exact_match(right).to(torch.int8)
            part["right"][(right < 0).all(dim=-1)] = -1
            last, finite = _finite_states(states[-1])
            run = lyapunov_exponents(iteration.step, last, lyapunov_loops, seed=seed)
            exponents = torch.cat([run.values, run.low, run.high], dim=1).float()
            part["lyapunov"] = torch.where(finite[:, None], exponents, float("nan"))
            where = (at, iteration.h0, noise_like(at, generator))
            part |= _spectra(iteration, where, part["turn"], seed=seed, **options)
            parts.append(part)
        return LocalStabilityResult.of(
            watch, coords={"where": WHERE}, **runs.gather(LocalStabilityResult, parts)
        )


def _finite_states(state: Tensor) -> tuple[Tensor, Tensor]:
    """The states with zeros in place of those that are not finite, and which are finite."""
    finite = state.flatten(1).isfinite().all(1)
    return torch.where(of_each(finite, state), state, 0), finite


def _spectra(
    iteration: Iteration,
    where: tuple[Tensor, ...],
    turn: Tensor,
    *,
    k: int,
    growth_loops: int,
    max_products: int,
    **krylov: Any,
) -> dict[str, Tensor]:
    """What is read from the Jacobian, for examples of one period together: [where, batch, …]."""
    arrays: dict[str, Tensor] = {}
    for name, axes in LocalStabilityResult.VARIABLES.items():
        if axes.startswith("where"):
            shape = (len(where), len(turn), *[k] * len(axes.split()[2:]))
            arrays[name] = torch.full(shape, float("nan"), dtype=torch.float32)
    for p in turn[turn > 0].unique().tolist():
        rows = (turn == p).nonzero().flatten()
        step = spectra.turn_of(iteration.select(rows).step, p)
        for place, states in enumerate(where):
            state = states[rows]  # of one kind, [row, pos, d_model]
            spectrum = spectra.leading_eigenvalues(
                step, state, k, max_products=max_products, **krylov
            )
            singular = spectra.largest_singular_values(step, state, k, **krylov)
            wider = {"tol": 10 * krylov["tol"], "max_vectors": 2 * krylov["max_vectors"]}
            solve = spectra.fixed_point_condition(step, state, **krylov | wider)
            growth = transient_growth(step, state, growth_loops, seed=krylov["seed"])
            values = {
                "eigenvalue_real": spectrum.values.real,
                "eigenvalue_imag": spectrum.values.imag,
                "eigenvalue_residual": spectrum.residuals,
                "singular_value": singular.values,
                "singular_residual": singular.residuals,
                "solve_largest": solve.largest,
                "solve_smallest": solve.smallest,
                "solve_known": solve.converged,
                "growth": growth.largest,
                "growth_at": growth.at,
                "growth_closed": growth.closed,
            }
            for name, value in values.items():
                arrays[name][place, rows.cpu()] = value.float().cpu()
    for name in ("solve_known", "growth_closed"):
        arrays[name] = arrays[name] == 1
    return arrays
