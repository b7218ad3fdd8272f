"""Batched fixed-point solvers: plain iteration, and three that find points that it does not."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Annotated, Any

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from loopinterp.core.settings import Settings, settings
from loopinterp.dynamics.jacobian import Linearised
from loopinterp.dynamics.krylov import orthogonalise
from loopinterp.dynamics.measures import share_of_size

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    Differences = Float[Tensor, "batch window size"]
    Flat = Float[Tensor, "batch size"]


_Map = Callable[["Tensor"], "Tensor"]
"""A map on flat states ``[batch, size]``."""


class Status(IntEnum):
    """How the search ended for one example.

    - ``CONVERGED``: the residual is within the tolerance.
    - ``OUT_OF_BUDGET``: ``max_iter`` steps were made.
    - ``DIVERGED``: a value is not finite, or the state outgrew the limit.
    - ``STALLED``: the residual stopped falling.
    - ``CYCLE``: plain iteration returns to the same states.
    - ``CONVERGED_TO_ROUNDING``: in half precision, the map moves the state by no more than
      rounding, also in several steps.
    """

    RUNNING = 0
    CONVERGED = 1
    OUT_OF_BUDGET = 2
    DIVERGED = 3
    STALLED = 4
    CYCLE = 5
    CONVERGED_TO_ROUNDING = 6


@settings
class Termination(Settings):
    r"""When an example is done, from its residual :math:`\|f(x) - x\| / \|f(x)\|` in float64.

    Attributes:
        tol, atol: Converged when :math:`\|f(x)-x\| \le` ``tol`` :math:`\|f(x)\|` + ``atol``.
        divergence: Diverged when :math:`\|f(x)\| >` ``divergence`` :math:`(1 + \|x_0\|)`.
        patience: Stalled when the best residual has not fallen by one percent in this many steps
            (``None``: never). It should exceed the number of positions.
    """

    tol: PositiveFloat = 1e-5
    atol: PositiveFloat = 1e-8
    max_iter: PositiveInt = 200
    divergence: PositiveFloat = 1e6
    patience: PositiveInt | None = 100

    def __call__(self, state: SolverState) -> Int[Tensor, " batch"]:
        status = torch.full_like(state.since_best, Status.RUNNING)
        if self.patience is not None:
            status.masked_fill_(state.since_best >= self.patience, Status.STALLED)
        if state.n_steps >= self.max_iter:
            status.masked_fill_(status == Status.RUNNING, Status.OUT_OF_BUDGET)
        status.masked_fill_(state.gap <= self.tol * state.size + self.atol, Status.CONVERGED)
        too_large = state.size > self.divergence * (1 + state.start_norm)  # [batch]
        finite = state.size.isfinite() & state.gap.isfinite()
        return status.masked_fill_(too_large | ~finite, Status.DIVERGED)


@dataclass(frozen=True)
class SolverState:
    """State of a search, with the solver's own ``memory``; norms are in float64.

    Attributes:
        x, fx: The iterate of each example, and the map there.
        gap, size: Norms of ``fx - x`` and of ``fx``.
        best, since_best: Smallest :attr:`scaled_gap`, and steps since it last fell by one percent.
        done: Examples that have ended; a solver need not move them.
    """

    x: Float[Tensor, "batch size"]
    fx: Float[Tensor, "batch size"]
    gap: Float[Tensor, " batch"]
    size: Float[Tensor, " batch"]
    start_norm: Float[Tensor, " batch"]
    evaluations: Int[Tensor, " batch"]
    best: Float[Tensor, " batch"]
    since_best: Int[Tensor, " batch"]
    done: Bool[Tensor, " batch"]
    n_steps: int = 0
    memory: Any = None

    @property
    def residual(self) -> Float[Tensor, " batch"]:
        return share_of_size(self.gap, self.size).to(_at_least_single(self.x).dtype)

    @property
    def scaled_gap(self) -> Float[Tensor, " batch"]:
        """The residual; over the norm of x0, if greater, so that it falls on the way to 0."""
        return share_of_size(self.gap, torch.maximum(self.size, self.start_norm))

    def keep(self, old: SolverState, rows: Bool[Tensor, " batch"]) -> SolverState:
        """This state, with some examples as in ``old``."""
        if not rows.any():
            return self
        values = {}
        for name in ("x", "fx", "gap", "size", "best", "since_best", "evaluations"):
            new = getattr(self, name)  # [batch] or [batch, size]
            mask = rows.reshape(-1, *[1] * (new.ndim - 1))
            values[name] = torch.where(mask, getattr(old, name), new)
        return replace(self, **values)


class Solver(ABC):
    """A batched fixed-point solver; examples are independent."""

    @property
    def follows_the_map(self) -> bool:
        """Whether each iterate is the map of the previous one."""
        return False

    @abstractmethod
    def init(self, f: _Map, x0: Float[Tensor, "batch size"]) -> SolverState:
        """The state before the first step, with ``f`` evaluated at ``x0``."""

    @abstractmethod
    def step(self, f: _Map, state: SolverState) -> SolverState:
        """One new iterate of the unfinished examples, with the map there."""


def start(f: _Map, x0: Float[Tensor, "batch size"], memory: Any = None) -> SolverState:
    fx = f(x0)
    gap, size = distance(fx, x0), distance(fx)
    zeros = torch.zeros(len(x0), dtype=torch.int64, device=x0.device)
    state = SolverState(
        x0, fx, gap, size, distance(x0), zeros + 1, gap, zeros, zeros.bool(), memory=memory
    )
    return replace(state, best=state.scaled_gap)


def advance(f: _Map, state: SolverState, x: Float[Tensor, "batch size"]) -> SolverState:
    fx = f(x)
    gap, size = distance(fx, x), distance(fx)
    scaled_gap = share_of_size(gap, torch.maximum(size, state.start_norm))
    better = scaled_gap < 0.99 * state.best
    return replace(
        state,
        x=x,
        fx=fx,
        gap=gap,
        size=size,
        evaluations=state.evaluations + 1,
        n_steps=state.n_steps + 1,
        best=torch.where(better, scaled_gap, state.best),
        since_best=torch.where(better, 0, state.since_best + 1),
    )


def distance(
    x: Float[Tensor, "batch size"], other: Float[Tensor, "batch size"] | float = 0.0
) -> Float[Tensor, " batch"]:
    """Euclidean distance of each example to another point, in float64."""
    return torch.linalg.vector_norm(x.double() - other, dim=-1)


def _at_least_single(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    return x.to(torch.promote_types(x.dtype, torch.float32))


@settings
class Picard(Settings, Solver):
    r"""Picard iteration, :math:`x_{k+1} = (1 - \beta) x_k + \beta f(x_k)` with damping.

    With :math:`\beta = 1` it is the looped model's own iteration. A smaller :math:`\beta` damps
    oscillations.
    """

    damping: Annotated[float, Field(gt=0, le=1)] = 1.0

    @property
    def follows_the_map(self) -> bool:
        return self.damping == 1

    def init(self, f: _Map, x0: Float[Tensor, "batch size"]) -> SolverState:
        return start(f, x0)

    def step(self, f: _Map, state: SolverState) -> SolverState:
        # fx itself, not x + (fx - x), so that iterates equal the model's states bit by bit.
        x = state.fx if self.damping == 1 else state.x + self.damping * (state.fx - state.x)
        return advance(f, state, x)


@settings
class SecantSolver(Settings, Solver):
    r"""A plain step corrected by the last differences of :math:`x_k` and :math:`g_k = f(x_k)-x_k`.

    .. math:: x_{k+1} = x_k + \beta g_k - (\Delta X + \beta \Delta G) \gamma

    Args:
        window: Differences kept; two states of memory each.
        mixing: :math:`\beta`.
        restart: Differences are dropped when the residual exceeds this many times the best one.
    """

    window: PositiveInt
    mixing: Annotated[float, Field(gt=0, le=1)] = 1.0
    restart: Annotated[float, Field(ge=1)] = 100.0

    @abstractmethod
    def coefficients(self, dx: Differences, dg: Differences, g: Flat) -> Float[Tensor, "batch _"]:
        r""":math:`\gamma` of every example, from differences newest first (unused ones zero)."""

    def init(self, f: _Map, x0: Flat) -> SolverState:
        empty = _at_least_single(x0).new_zeros(x0.shape[0], 0, x0.shape[1])
        return start(f, x0, memory=(empty, empty))

    def step(self, f: _Map, state: SolverState) -> SolverState:
        dx, dg = state.memory
        before = _at_least_single(state.x)
        g = _at_least_single(state.fx) - before
        gamma = self.coefficients(dx, dg, g).nan_to_num(0, 0, 0).to(g)  # [batch, window]
        plain = before + self.mixing * g
        # The mixed step without the part that the kept differences already explain, [batch, size]
        x = plain - torch.einsum("bwn,bw->bn", dx + self.mixing * dg, gamma)
        x = torch.where(x.isfinite().all(dim=-1, keepdim=True), x, plain).to(state.x)
        new = advance(f, state, x)
        # Zero clears the memory of a restarted example
        keep = (~(new.scaled_gap > self.restart * new.best)).to(g)[:, None, None]
        after = _at_least_single(x)
        dx = _push(dx, after - before)[:, : self.window] * keep
        dg = _push(dg, (_at_least_single(new.fx) - after) - g)[:, : self.window] * keep
        return replace(new, memory=(dx, dg))


def _solve_small(matrix: Float[Tensor, "batch window window"], target: Tensor) -> Tensor:
    """Solve each small system; an unknown with an empty row is zero."""
    empty = (matrix == 0).all(dim=-1)
    return torch.linalg.solve_ex(matrix + torch.diag_embed(empty.to(matrix)), target)[0]


def _push(history: Differences, new: Flat) -> Float[Tensor, "batch longer size"]:
    new = torch.where(new.isfinite().all(dim=-1, keepdim=True), new, 0)  # [batch, size]
    return torch.cat([new[:, None], history], dim=1)


@settings
class Anderson(SecantSolver):
    r"""Anderson acceleration of type II with mixing and regularisation :math:`\lambda`.

    A :class:`SecantSolver` with

    .. math::

        \gamma = \operatorname{argmin}_\gamma \|g_k - \Delta G \gamma\|^2 + \lambda \|\gamma\|^2.

    Source: Walker and Ni, 2011 (doi 10.1137/10078356X); Bai et al., 2019 (arXiv 1909.01377).
    """

    window: PositiveInt = 5
    regularisation: NonNegativeFloat = 1e-10

    def coefficients(self, dx: Differences, dg: Differences, g: Flat) -> Float[Tensor, "batch _"]:
        # The regularised least squares of every example, in float64 on unit columns.
        scale = dg.norm(dim=-1, keepdim=True)
        unit = (dg / torch.where(scale > 0, scale, 1)).nan_to_num(0, 0, 0).double()
        gram = unit @ unit.mT  # [batch, window, window]
        gram = gram + self.regularisation * torch.diag_embed((scale.squeeze(-1) > 0).double())
        gamma = _solve_small(gram, torch.einsum("bwn,bn->bw", unit, g.nan_to_num(0, 0, 0).double()))
        return gamma / torch.where(scale > 0, scale, 1).squeeze(-1)


@settings
class Broyden(SecantSolver):
    r"""Broyden's good method for :math:`g(x) = f(x) - x = 0`, with a limited memory.

    The Jacobian starts as :math:`B_0 = -I / \beta` and is updated for each kept step :math:`s_i`
    and change :math:`y_i` of :math:`g`,
    :math:`B \leftarrow B + (y_i - B s_i) s_i^\top / s_i^\top s_i`. It is a :class:`SecantSolver`
    with, in closed form over the window (oldest first) and :math:`L` the part of :math:`S^\top S`
    strictly below its diagonal:

    .. math:: \gamma = (S^\top Y + L / \beta)^{-1} S^\top g_k.

    Source: Broyden, 1965 (doi 10.1090/S0025-5718-1965-0198670-6); Byrd, Nocedal and Schnabel, 1994
    (doi 10.1007/BF01582063), section 6.
    """

    window: PositiveInt = 100
    # Single steps far off belong to the method, more so than to Anderson's.
    restart: Annotated[float, Field(ge=1)] = 1e4

    def coefficients(self, dx: Differences, dg: Differences, g: Flat) -> Float[Tensor, "batch _"]:
        # In float64 on steps of unit length.
        scale = dx.norm(dim=-1, keepdim=True)
        scale = torch.where(scale > 0, scale, 1)
        s, y = ((d / scale).nan_to_num(0, 0, 0).double() for d in (dx, dg))  # [batch, window, size]
        # Newest first, so what is strictly below the diagonal when oldest first stands above it.
        matrix = s @ y.mT + (s @ s.mT).triu(1) / self.mixing
        target = torch.einsum("bwn,bn->bw", s, g.nan_to_num(0, 0, 0).double())
        return _solve_small(matrix, target) / scale.squeeze(-1)


@settings
class NewtonKrylov(Settings, Solver):
    r"""Inexact Newton on :math:`g(x) = f(x) - x = 0`. Steps solve :math:`(I - J) d = g` by GMRES to

    .. math::

        \|g - (I - J) d\| \le \eta_k \|g\|, \qquad
        \eta_k = 0.9 \, (\|g_k\| / \|g_{k-1}\|)^2 \le \eta_0,

    then halve :math:`d` until the residual falls, or else make a plain step.

    Args:
        max_vectors: Largest Krylov space; each vector costs a product and a state.
        forcing: :math:`\eta_0`.
        backtracks: Most halvings; few are best where loops carry information along.

    Source: Eisenstat and Walker, 1996 (doi 10.1137/0917003), choice 2; Knoll and Keyes, 2004 (doi
    10.1016/j.jcp.2003.08.010).
    """

    max_vectors: PositiveInt = 20
    forcing: Annotated[float, Field(gt=0, lt=1)] = 0.5
    backtracks: NonNegativeInt = 1

    def init(self, f: _Map, x0: Flat) -> SolverState:
        eta = torch.full((len(x0),), self.forcing, dtype=torch.float64, device=x0.device)
        return start(f, x0, memory=eta)

    def step(self, f: _Map, state: SolverState) -> SolverState:
        eta = state.memory
        d, products = self._solve(f, state, eta * state.gap)
        state = replace(state, evaluations=state.evaluations + products)
        x = _at_least_single(state.x)
        share = torch.ones_like(state.gap)
        new = advance(f, state, (x + d).to(state.x))
        for halving in range(self.backtracks + 1):
            # Armijo's rule: at least this share of the promised descent.
            descent = 1 - 1e-4 * share * (1 - eta)
            fails = ~(new.gap <= descent * state.gap) & ~state.done
            if not fails.any():
                break
            share = torch.where(fails, share / 2, share)
            shorter = (x + share[:, None].to(x) * d).to(state.x)
            # Where no length will do, the loop's own step: it at least goes somewhere else.
            trial = shorter if halving < self.backtracks else state.fx
            again = advance(f, state, torch.where(fails[:, None], trial, new.x))
            again = replace(again, evaluations=new.evaluations + 1)
            new = again.keep(new, ~fails)
        ratio = (new.gap / state.gap).nan_to_num(1, 1, 1)
        # Not much more exact at once than the step before: a single good step may be luck.
        floor = torch.where(0.9 * eta**2 > 0.1, 0.9 * eta**2, 0)
        eta = torch.maximum(0.9 * ratio**2, floor).clamp(1e-6, self.forcing)
        return replace(new, memory=eta)

    def _solve(
        self, f: _Map, state: SolverState, goal: Float[Tensor, " batch"]
    ) -> tuple[Flat, Int[Tensor, " batch"]]:
        """The solutions d by GMRES, and the products used for each example."""
        x = _at_least_single(state.x)
        g = _at_least_single(state.fx) - x
        most = min(self.max_vectors, x.shape[1])
        unmet = (state.gap > goal) & ~state.done & state.gap.isfinite()
        basis = g.new_zeros(len(g), most + 1, g.shape[1])  # [batch, vector, size]
        basis[:, 0] = torch.where(unmet[:, None], g / state.gap[:, None].to(g), 0)
        hessenberg = torch.zeros(len(g), most + 1, most, dtype=torch.float64)
        answer = torch.zeros(len(g), most, dtype=torch.float64)  # d in the basis
        products, linear = torch.zeros_like(state.evaluations), Linearised(f, state.x)
        for k in range(most):
            if not unmet.any():
                break
            products += unmet
            v = basis[:, k].to(state.x)
            w = _at_least_single(v) - _at_least_single(linear.push(v))
            w = torch.where(unmet[:, None], w, 0).nan_to_num(0, 0, 0)
            unit, coefficients, norm = orthogonalise(basis[:, : k + 1], w)
            basis[:, k + 1] = unit
            hessenberg[:, : k + 1, k], hessenberg[:, k + 1, k] = coefficients, norm
            # The combination of Krylov vectors that leaves least of the right-hand side, |g| e_1.
            small = hessenberg[:, : k + 2, : k + 1]
            target = torch.zeros(*small.shape[:2], 1, dtype=small.dtype)
            target[:, 0, 0] = state.gap.cpu().nan_to_num(0, 0, 0)
            # A driver that takes systems without full rank: of examples done, or exhausted.
            y = torch.linalg.lstsq(small, target, driver="gelsd").solution  # [batch, k + 1, 1]
            left = (target - small @ y).flatten(1).norm(dim=-1)
            answer[:, : k + 1] = torch.where(unmet.cpu()[:, None], y[..., 0], answer[:, : k + 1])
            unmet = unmet & (left.to(goal) > goal)
        # The step d as a combination of Krylov vectors, [batch, size]
        return torch.einsum("bkn,bk->bn", basis[:, :-1], answer.to(g)), products
