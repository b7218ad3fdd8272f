"""Local stability: what becomes of a small disturbance at the limits and cycles of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from loopinterp.core.errors import check_integer, check_number
from loopinterp.core.progress import track
from loopinterp.core.results import Result, study
from loopinterp.dynamics.convergence import RITZ_TOLERANCE
from loopinterp.dynamics.growth import lyapunov_exponents, of_each, transient_growth
from loopinterp.dynamics.limits import LIMIT_LOOPS, find_limits, noise_like
from loopinterp.dynamics.measures import correctness, exact_match, likeliest
from loopinterp.dynamics.regimes import LEAST_LOOPS, classify_regimes
from loopinterp.dynamics.runs import (
    chunks,
    counted_examples,
    described,
    gather,
    run_length,
    run_loops,
    state_bytes,
)
from loopinterp.dynamics.spectra import (
    fixed_point_condition,
    largest_singular_values,
    leading_eigenvalues,
    turn_of,
)
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

STATES_HELD = 200
"""States that a chunk of examples needs at once, for the spaces of the Krylov methods."""

_AT = "where batch"


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
        eigenvalue_real: Real part of the eigenvalues of largest modulus, largest first.
        eigenvalue_imag: Their imaginary part.
        eigenvalue_residual: Relative residual of their Ritz pairs.
        singular_value: Largest singular values.
        singular_residual: Their relative residuals.
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
        **dict.fromkeys(
            ("eigenvalue_real", "eigenvalue_imag", "eigenvalue_residual"), f"{_AT} eigenvalue"
        ),
        **dict.fromkeys(("singular_value", "singular_residual"), f"{_AT} singular"),
        **dict.fromkeys(("solve_largest", "solve_smallest", "solve_known"), _AT),
        **dict.fromkeys(("growth", "growth_at", "growth_closed"), _AT),
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


def local_stability_study(
    model: LoopedModel,
    data: Batch | Task,
    *,
    n_loops: int | None = None,
    k: int = 6,
    limit_tol: float = 1e-5,
    tol: float = 1e-3,
    max_vectors: int = 60,
    max_products: int = 300,
    growth_loops: int = 8,
    lyapunov_loops: int = 64,
    n: int | None = None,
    batch_size: int | None = None,
    seed: int = 0,
) -> LocalStabilityResult:
    r"""Linearise the loop at each example's limit or cycle, at its initial and at a random state.

    The limit is sought from the end of the run by plain iteration, so that it is where the model
    itself goes; or a cycle, where it comes back to itself.

    Args:
        model: Any looped model.
        data: Examples with targets, or a task to draw them from.
        n_loops: Loops of the run, at least 12; by default a quarter more than the longest T(n),
            and at least 24.
        k: Eigenvalues and singular values of each Jacobian.
        limit_tol: Relative tolerance of limits and cycles.
        tol: Relative residual at which a value has converged.
        max_vectors: Most vectors held by the Krylov methods; twice as many for I - J.
        max_products: Most products for the eigenvalues of a Jacobian.
        growth_loops: Largest power of J for the transient growth.
        lyapunov_loops: Loops counted for the Lyapunov exponent.
        n: Problem length, where a task is given; see :func:`~loopinterp.tasks.as_batch`.
        batch_size: Examples, where a task is given; 8 are enough for most questions.
        seed: Seed of the random states, of all starting vectors, and of what is drawn.

    Raises:
        InputError: If an option is out of range, an example asks nothing, the initial state is
            not finite, or the loop cannot be differentiated.
    """
    drawn = {"n": n, "batch_size": batch_size, "seed": seed}
    need_one_map(model)
    batch, _ = counted_examples(model, data, needs_loops=n_loops is None, of_states=True, **drawn)
    n_loops = run_length(batch, n_loops, times=1.25, usual=24, least=LEAST_LOOPS)
    check_number("limit_tol", limit_tol, above=0)
    options: dict[str, Any] = {
        "k": check_integer("k", k, least=1),
        "tol": tol,
        "max_vectors": max_vectors,
        "max_products": max_products,
        "growth_loops": growth_loops,
    }
    settings = {"n_loops": n_loops, "limit_tol": limit_tol, "lyapunov_loops": lyapunov_loops}
    settings |= {**options, "n_examples": len(batch)}
    generator = torch.Generator().manual_seed(seed)
    with study(seed, **described(model, batch), **settings) as watch, torch.no_grad():
        parts = []
        n_states = max(n_loops + 1, STATES_HELD)
        for rows in track(
            list(chunks(len(batch), n_states * state_bytes(model, batch))), "stability"
        ):
            iteration = bind(model, batch.inputs[rows])
            states = run_loops(iteration, n_loops)
            limits = find_limits(iteration, states[-1], max_loops=LIMIT_LOOPS, tol=limit_tol)
            finite = limits.state.flatten(1).isfinite().all(1)
            at = torch.where(of_each(finite, limits.state), limits.state, 0)
            regimes = classify_regimes(states.flatten(2)).regime.to(torch.int8)
            part = {"turn": limits.period.to(torch.int32), "regime": regimes}
            answer = likeliest(iteration.read(states[-1], n_loops))
            right = correctness(answer, batch.targets[rows])
            part["right"] = exact_match(right).to(torch.int8)
            part["right"][(right < 0).all(dim=-1)] = -1
            part["lyapunov"] = _lyapunov(iteration.step, states[-1], lyapunov_loops, seed)
            where = (at, iteration.h0, noise_like(at, generator))
            part |= _spectra(iteration, where, part["turn"], seed=seed, **options)
            parts.append(part)
        return LocalStabilityResult.of(
            watch, coords={"where": WHERE}, **gather(LocalStabilityResult, parts)
        )


def _lyapunov(step: Callable[[Tensor], Tensor], state: Tensor, n_loops: int, seed: int) -> Tensor:
    """The largest exponent with its interval, [batch, estimate]; NaN for what diverges."""
    finite = state.flatten(1).isfinite().all(1)
    safe = torch.where(of_each(finite, state), state, 0)
    exponents = lyapunov_exponents(step, safe, n_loops, seed=seed)
    ends = torch.cat([exponents.values, exponents.low, exponents.high], dim=1).float()
    return torch.where(finite[:, None], ends, float("nan"))


def _spectra(
    iteration: Iteration,
    where: tuple[Tensor, ...],
    turn: Tensor,
    *,
    seed: int,
    k: int,
    growth_loops: int,
    **options: Any,
) -> dict[str, Tensor]:
    """What is read from the Jacobian, for examples of one period together: [where, batch, …]."""
    arrays: dict[str, Tensor] = {}
    for p in turn[turn > 0].unique().tolist():
        rows = (turn == p).nonzero().flatten()
        step = turn_of(iteration.select(rows).step, p)
        for place, state in enumerate(where):
            values = _at_state(step, state[rows], k, growth_loops, options | {"seed": seed})
            for name, value in values.items():
                value = value.float().cpu()
                blank = value.new_full((len(where), len(turn), *value.shape[1:]), float("nan"))
                arrays.setdefault(name, blank)[place, rows.cpu()] = value
    if not arrays:
        sizes = {name: axes.split()[2:] for name, axes in LocalStabilityResult.VARIABLES.items()}
        shape = (len(where), len(turn))
        arrays = {
            name: torch.full((*shape, *[k] * len(rest)), float("nan"), dtype=torch.float32)
            for name, rest in sizes.items()
            if LocalStabilityResult.VARIABLES[name].startswith(_AT)
        }
    for name in ("solve_known", "growth_closed"):
        arrays[name] = arrays[name] == 1
    return arrays


def _at_state(
    step: Callable[[Tensor], Tensor],
    state: Tensor,
    k: int,
    growth_loops: int,
    options: dict[str, Any],
) -> dict[str, Tensor]:
    """The numbers of one kind of state, each [batch, ...]."""
    products = options.pop("max_products")
    spectrum = leading_eigenvalues(step, state, k, max_products=products, **options)
    singular = largest_singular_values(step, state, k, **options)
    options["max_vectors"] *= 2
    solve = fixed_point_condition(step, state, **options | {"tol": 10 * options["tol"]})
    growth = transient_growth(step, state, growth_loops, seed=options["seed"])
    return {
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
