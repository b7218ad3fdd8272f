"""Local stability: growth of small perturbations, also at limits and cycles."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np
import torch
from einops import rearrange
from pydantic import Field, PositiveFloat, PositiveInt

from loopinterp.core.boundary import Loops, checked
from loopinterp.core.errors import MOST_LOOPS, check_integer
from loopinterp.core.results import Result
from loopinterp.core.settings import Seed
from loopinterp.core.text import ShortRepr, track
from loopinterp.dynamics import spectra
from loopinterp.dynamics.convergence import RITZ_TOLERANCE
from loopinterp.dynamics.fixed_point import map_and_start
from loopinterp.dynamics.jacobian import JacobianOperator, push_forward
from loopinterp.dynamics.krylov import Bidiagonal, golub_kahan
from loopinterp.dynamics.limits import LIMIT_LOOPS, find_limits, map_and_limit, noise_like
from loopinterp.dynamics.measures import (
    correctness,
    counted_examples,
    exact_match,
    gather,
    likeliest,
    limit_study,
    run_loops,
    state_chunks,
    usual_loops,
)
from loopinterp.dynamics.regimes import ClassifiedLoops, classify_regimes
from loopinterp.models.iteration import bind
from loopinterp.models.protocol import need_one_map

if TYPE_CHECKING:
    import xarray as xr
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from loopinterp.dynamics.jacobian import Positions
    from loopinterp.models.iteration import Iteration
    from loopinterp.models.protocol import LoopedModel
    from loopinterp.tasks.task import Batch, Task

WHERE = ("limit", "start", "random")
"""States of the Jacobian: the limit (or cycle), and two controls."""


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class LocalStabilityResult(Result, kind="local-stability"):
    """Eigenvalues and singular values of the loop's Jacobian, of each example.

    At the limit and, as controls, at the initial state and random states with the limit's norms. On
    a cycle of p states the Jacobian is that of p loops. NaN without a limit or cycle.

    Arrays:
        turn: 1 at a fixed point, p on a cycle, 0 without either.
        regime: :class:`Regime` code of the example's whole state.
        right: After the last loop: 1 right, 0 wrong, -1 without an answer.
        eigenvalue_real, eigenvalue_imag, eigenvalue_residual: Eigenvalues of largest modulus, with
            relative residuals.
        singular_value, singular_residual: The largest, with relative residuals.
        solve_largest, solve_smallest, solve_known: Extreme singular values of I - J; if not known,
            their ratio is a lower bound.
        growth, growth_at, growth_closed: As in :class:`TransientGrowth`.
        lyapunov: Largest Lyapunov exponent from the end of the run on, in nats per loop.
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
    def has_limit(self) -> xr.DataArray:
        return self.data["turn"] > 0

    def eigenvalues(self) -> xr.DataArray:
        return self.data["eigenvalue_real"] + 1j * self.data["eigenvalue_imag"]

    def radius(self) -> xr.DataArray:
        """Spectral radius, [where, batch]; NaN if not known to within 0.01."""
        radius = np.abs(self.eigenvalues().isel(eigenvalue=0))
        residual = self.data["eigenvalue_residual"].isel(eigenvalue=0)
        return radius.where(residual * radius <= RITZ_TOLERANCE)

    def non_normality(self) -> xr.DataArray:
        """Largest singular value over spectral radius, [where, batch]."""
        return self.data["singular_value"].isel(singular=0) / self.radius()

    def condition(self) -> xr.DataArray:
        """Condition number of I - J, or a lower bound, [where, batch]."""
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
    """Linearise the loop at each example's limit or cycle, at its initial and at a random state.

    Args:
        data: Examples; 8 are mostly enough.
        n_loops: Loops before the limit is sought, as in :func:`convergence_study`.
        k: Eigenvalues and singular values of each Jacobian.
        limit_tol: Relative tolerance of limits and cycles.
        tol, max_products: As for :func:`leading_eigenvalues`.
        max_vectors: Most vectors in the Krylov methods; twice as many for I - J.
        growth_loops: Largest power of J for the transient growth.
        lyapunov_loops: Loops counted for the Lyapunov exponent.
    """
    need_one_map(model)
    drawn = {"n": n, "batch_size": batch_size, "seed": seed}
    batch, _ = counted_examples(model, data, needs_loops=n_loops is None, of_states=True, **drawn)
    n_loops = n_loops or usual_loops(batch, times=1.25, least=24)
    options: dict[str, Any] = {"k": k, "tol": tol, "max_vectors": max_vectors}
    options |= {"max_products": max_products, "growth_loops": growth_loops}
    settings = {"n_loops": n_loops, "limit_tol": limit_tol, "lyapunov_loops": lyapunov_loops}
    settings |= {**options, "n_examples": len(batch)}
    generator = torch.Generator().manual_seed(seed)
    with limit_study(model, batch.inputs, seed, **settings) as (model, watch), torch.no_grad():
        parts = []
        n_states = max(n_loops + 1, 200)  # the spaces of the Krylov methods need 200 at once
        for rows in track(state_chunks(model, batch, n_states), "stability"):
            iteration = bind(model, batch.inputs[rows])
            states = run_loops(iteration, n_loops)
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
            watch, coords={"where": WHERE}, **gather(LocalStabilityResult, parts)
        )


def _finite_states(state: Tensor) -> tuple[Tensor, Tensor]:
    finite = state.flatten(1).isfinite().all(1)
    return torch.where(_per_example(finite, state), state, 0), finite


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
    """Arrays [where, batch, …], computed for equal periods together."""
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


@dataclass(frozen=True, repr=False)
class TransientGrowth(ShortRepr):
    r"""Norms of the powers of each example's Jacobian, from t = 0 on.

    ``largest`` is :math:`\max_t \|J^t\|`, at loop ``at``; no later power exceeds it if ``closed``.
    """

    norms: Float[Tensor, "loop batch"]
    converged: Bool[Tensor, "loop batch"]
    largest: Float[Tensor, " batch"]
    at: Int[Tensor, " batch"]
    closed: Bool[Tensor, " batch"]


@checked
def transient_growth(
    model: LoopedModel | Callable[[Tensor], Tensor] | Any,
    h: Tensor | Any,
    n_loops: PositiveInt = 16,
    *,
    tol: PositiveFloat = 1e-2,
    max_vectors: PositiveInt = 20,
    positions: Positions | None = None,
    seed: Seed = 0,
) -> TransientGrowth:
    r"""The largest transient growth :math:`\max_t \|J^t\|`, by products with powers of J.

    Powers end at ``n_loops``, or when every example's norm is below 1: no later one can exceed the
    largest then.

    Args:
        model, h, positions, seed: As for :func:`largest_singular_values`.
        tol: Relative residual at which a norm has converged.
        max_vectors: Most vectors for one norm; each costs ``2 t`` products.

    Source: Trefethen and Embree, Spectra and Pseudospectra, chapter 16.

    Example:
        >>> shear = torch.tensor([[0.5, 4.0], [0.0, 0.5]], dtype=torch.float64)
        >>> growth = transient_growth(lambda h: h @ shear.T, torch.zeros(1, 2).double())
        >>> round(growth.largest.item(), 3), growth.at.item(), bool(growth.closed)
        (4.062, 1, True)
    """
    step, h = map_and_limit(model, h)
    operator = JacobianOperator(step, h, positions)
    norms = [torch.ones(len(h), dtype=torch.float64)]
    known = [torch.ones(len(h), dtype=torch.bool)]
    start = None
    for loop in range(1, n_loops + 1):
        power = partial(spectra.turn_of, n_times=loop)
        space: Bidiagonal | None = None
        for space in golub_kahan(operator, power, max_vectors=max_vectors, seed=seed, start=start):
            value, residual = space.extremes(1)
            if space.upper.shape[1] > 2 and (residual[:, 0] <= tol).all():
                break
        assert space is not None  # at least one vector was made
        norms.append(torch.from_numpy(value[:, 0]))  # norm of this power of the Jacobian, [batch]
        known.append(torch.from_numpy(residual[:, 0] <= tol))
        if (torch.stack(norms).amin(0) < 1).all():
            break
        # The next power may enlarge another direction most: some of every one goes in.
        noise = operator.random_vector(torch.Generator().manual_seed(seed + loop))
        start = space.leading_right() + 0.1 * noise
        start = start / start.norm(dim=1, keepdim=True)
    every = torch.stack(norms)  # [loop, batch]
    largest, at = every.max(dim=0)
    return TransientGrowth(
        norms=every.to(h),
        converged=torch.stack(known).to(h.device),
        largest=largest.to(h),
        at=at.to(h.device),
        closed=(every.amin(0) < 1).to(h.device),
    )


@dataclass(frozen=True, repr=False)
class LyapunovExponents(ShortRepr):
    """Lyapunov exponents of each example's trajectory, largest first, in nats per loop.

    -inf if a perturbation vanishes in one loop, NaN if the trajectory is not finite. ``low`` and
    ``high`` are the 95% interval over blocks of loops, ``state`` is the last state.
    """

    values: Float[Tensor, "batch exponent"]
    low: Float[Tensor, "batch exponent"]
    high: Float[Tensor, "batch exponent"]
    state: Float[Tensor, "batch ..."]


@checked
def lyapunov_exponents(
    model: LoopedModel | Callable[[Tensor], Tensor] | Any,
    h: Tensor | Any,
    n_loops: Loops,
    k: PositiveInt = 1,
    *,
    discard: Annotated[int, Field(ge=0, le=MOST_LOOPS)] | None = None,
    n_blocks: Annotated[int, Field(ge=2)] = 8,
    seed: Seed = 0,
) -> LyapunovExponents:
    r"""The k largest Lyapunov exponents of the trajectory from a state, by the QR method.

    With k tangent vectors, made orthogonal after each loop, :math:`J(h_t) Q_t = Q_{t+1} R_{t+1}`,

    .. math:: \lambda_i = \frac{1}{T} \sum_t \log |R_{t,ii}|

    At a fixed point this is :math:`\log |\lambda_i(J)|`; above 0, close trajectories separate. The
    interval is Student's t over ``n_blocks`` block means.

    Args:
        model: A map, such as ``bind(model, inputs).step``, or a looped model.
        h: First state of each trajectory.
        n_loops: Counted loops, at least one per block.
        k: Number of exponents.
        discard: Uncounted first loops; by default a quarter of ``n_loops``.

    Source: Benettin, Galgani, Giorgilli and Strelcyn, Meccanica 15 (1980).

    Example:
        >>> halve = lambda x: torch.stack([x[:, 0] / 2, x[:, 1] / 4], dim=1)
        >>> lyapunov_exponents(halve, torch.ones(1, 2), n_loops=40, k=2, discard=40).values.exp()
        tensor([[0.5000, 0.2500]])
    """
    from scipy.stats import t as student

    step, h = map_and_start(model, h)
    check_integer("n_loops", n_loops, least=n_blocks)
    discard = n_loops // 4 if discard is None else discard
    operator = JacobianOperator(step, h, n_values=k)
    generator = torch.Generator().manual_seed(seed)
    tangents, _ = _qr(torch.stack([operator.random_vector(generator) for _ in range(k)], dim=-1))
    state, dead = operator.h, torch.zeros(len(h), dtype=torch.bool, device=h.device)
    total = torch.zeros(n_blocks, len(h), k, dtype=torch.float64, device=h.device)  # log growth
    loops = torch.zeros(n_blocks, dtype=torch.float32)
    for loop in range(discard + n_loops):
        # Images J q of the tangents, [batch, size, k]; QR makes them orthonormal again.
        each = rearrange(tangents, "batch size k -> k batch size")
        carried = [push_forward(step, state, tangent.reshape(state.shape)) for tangent in each]
        pushed = torch.stack([product.flatten(1) for _, product in carried], dim=-1)
        tangents, upper = _qr(pushed.reshape(tangents.shape))
        state = carried[0][0]
        lost = ~(state.flatten(1).isfinite().all(1) & tangents.flatten(1).isfinite().all(1))
        if lost.any():  # what has left the finite numbers stays at 0, and counts as NaN
            dead |= lost
            state = torch.where(_per_example(dead, state), 0, state)
            tangents = torch.where(_per_example(dead, tangents), 0, tangents)
        if loop >= discard:
            block = (loop - discard) * n_blocks // n_loops  # blocks of equal numbers of loops
            total[block] += upper.diagonal(dim1=1, dim2=2).abs().double().log()
            loops[block] += 1
    means = total / loops[:, None, None].to(total)  # [block, batch, k]
    value = total.sum(0) / n_loops
    # Half-width of the interval from blocks, [batch, k]
    half = float(student.ppf(0.975, n_blocks - 1)) * means.std(dim=0) / n_blocks**0.5
    half = torch.where(value.isfinite(), half, 0)
    ends = (value, value - half, value + half)
    ends = [torch.where(dead[:, None], float("nan"), end) for end in ends]
    return LyapunovExponents(*(end.to(h.dtype) for end in ends), state=state)


def _qr(columns: Tensor) -> tuple[Tensor, Tensor]:
    q, r = torch.linalg.qr(columns.to(torch.promote_types(columns.dtype, torch.float32)))
    return q.to(columns.dtype), r


def _per_example(flags: Bool[Tensor, " batch"], values: Tensor) -> Bool[Tensor, "batch ..."]:
    return flags.reshape(-1, *[1] * (values.ndim - 1))
