"""What a fixed-point solver is: its start, its step, when an example is done; plain iteration."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Annotated, Any

import torch
from pydantic import Field, PositiveFloat, PositiveInt

from loopinterp.core.settings import Settings, settings
from loopinterp.dynamics.measures import share_of_size

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor


Map = Callable[["Tensor"], "Tensor"]
"""The map whose fixed point is sought, on flat states ``[batch, size]``."""


class Status(IntEnum):
    """How the search ended for one example.

    ``CONVERGED``: the residual is within the tolerance, at the very state that is given back.
    ``OUT_OF_BUDGET``: ``max_iter`` steps were made, and nothing else is known.
    ``DIVERGED``: the map gave a value that is not finite, or the state outgrew the limit.
    ``STALLED``: the residual stopped falling (an open orbit, chaos, or the floor of the precision).
    ``CYCLE``: the loop returns to the same states again and again. Only plain iteration finds
    cycles: the iterates of other solvers are no trajectory of the map.
    """

    RUNNING = 0
    CONVERGED = 1
    OUT_OF_BUDGET = 2
    DIVERGED = 3
    STALLED = 4
    CYCLE = 5


@settings
class Termination(Settings):
    r"""When an example is done, from its residual :math:`\|f(x) - x\| / \|f(x)\|`.

    Norms are taken in float64, so that they do not overflow where the state does not.

    Attributes:
        tol: Converged when :math:`\|f(x)-x\| \le` ``tol`` :math:`\|f(x)\|` + ``atol``.
        atol: Absolute part, for fixed points at or near zero.
        max_iter: Steps after which a running example is given up.
        divergence: Diverged when :math:`\|f(x)\| >` ``divergence`` :math:`(1 + \|x_0\|)`.
        patience: Stalled when the best residual has not fallen by one percent in this many
            steps. A change that travels one position a loop keeps the residual level while it
            travels, so this should exceed the number of positions. ``None``: never.
    """

    tol: PositiveFloat = 1e-5
    atol: PositiveFloat = 1e-8
    max_iter: PositiveInt = 200
    divergence: PositiveFloat = 1e6
    patience: PositiveInt | None = 100

    def __call__(self, state: SolverState) -> Int[Tensor, " batch"]:
        """Status code of every example."""
        status = torch.full_like(state.since_best, Status.RUNNING)
        if self.patience is not None:
            status[state.since_best >= self.patience] = Status.STALLED
        if state.n_steps >= self.max_iter:
            status[status == Status.RUNNING] = Status.OUT_OF_BUDGET
        status[state.gap <= self.tol * state.size + self.atol] = Status.CONVERGED
        too_large = state.size > self.divergence * (1 + state.start_norm)  # [batch]
        status[too_large | ~state.size.isfinite() | ~state.gap.isfinite()] = Status.DIVERGED
        return status


@dataclass(frozen=True)
class SolverState:
    """Where a search stands; norms are in float64.

    Attributes:
        x, fx: The iterate of each example, and the map there.
        gap, size: Norms of ``fx - x`` and of ``fx``.
        evaluations: Evaluations of the map so far.
        best: Smallest relative residual so far.
        since_best: Steps since the residual last fell by one percent.
        done: Examples that have ended: a solver need not move them.
        memory: What the solver remembers beyond the iterate.
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
        """Relative residual of ``x``."""
        return share_of_size(self.gap, self.size).to(at_least_single(self.x).dtype)

    def keep(self, old: SolverState, rows: Bool[Tensor, " batch"]) -> SolverState:
        """This state, but with some examples left as they were in ``old``."""
        each = ("gap", "size", "best", "since_best", "evaluations")
        # [batch] each
        values = {name: torch.where(rows, getattr(old, name), getattr(self, name)) for name in each}
        x = torch.where(rows[:, None], old.x, self.x)
        fx = torch.where(rows[:, None], old.fx, self.fx)
        return replace(self, x=x, fx=fx, **values)


class Solver(ABC):
    """A batched fixed-point solver: every example runs, and ends, on its own."""

    @property
    def follows_the_map(self) -> bool:
        """Whether each iterate is the map of the one before, so that a return is a cycle."""
        return False

    @abstractmethod
    def init(self, f: Map, x0: Float[Tensor, "batch size"]) -> SolverState:
        """The state before the first step: ``f`` is evaluated at ``x0``."""

    @abstractmethod
    def step(self, f: Map, state: SolverState) -> SolverState:
        """One new iterate of the examples that are not done, and the map there."""


def start(f: Map, x0: Float[Tensor, "batch size"], memory: Any = None) -> SolverState:
    """The state of a solver that has evaluated ``f`` at its starting point."""
    fx = f(x0)
    gap, size = distance(fx, x0), distance(fx)
    zeros = torch.zeros(len(x0), dtype=torch.int64, device=x0.device)
    best, done = share_of_size(gap, size), zeros.bool()
    return SolverState(x0, fx, gap, size, distance(x0), zeros + 1, best, zeros, done, memory=memory)


def advance(f: Map, state: SolverState, x: Float[Tensor, "batch size"]) -> SolverState:
    """The state after moving to the iterate ``x``, at one evaluation of the map."""
    fx = f(x)
    gap, size = distance(fx, x), distance(fx)
    residual = share_of_size(gap, size)
    better = residual < 0.99 * state.best
    best = torch.where(better, residual, state.best)
    since_best = torch.where(better, 0, state.since_best + 1)
    counts = {"evaluations": state.evaluations + 1, "n_steps": state.n_steps + 1}
    return replace(
        state, x=x, fx=fx, gap=gap, size=size, best=best, since_best=since_best, **counts
    )


def distance(
    x: Float[Tensor, "batch size"], other: Float[Tensor, "batch size"] | float = 0.0
) -> Float[Tensor, " batch"]:
    """Euclidean distance of each example to another point, in float64."""
    return torch.linalg.vector_norm(x.double() - other, dim=-1)


def at_least_single(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """The tensor in float32, or in its own type where that is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


@settings
class Picard(Settings, Solver):
    r"""Picard iteration, :math:`x_{k+1} = (1 - \beta) x_k + \beta f(x_k)`.

    With ``damping`` :math:`\beta` = 1 this is what the looped model does, so it finds only fixed
    points that the model reaches: unstable ones repel it. Less damps oscillations.
    """

    damping: Annotated[float, Field(gt=0, le=1)] = 1.0

    @property
    def follows_the_map(self) -> bool:
        return self.damping == 1

    def init(self, f: Map, x0: Float[Tensor, "batch size"]) -> SolverState:
        return start(f, x0)

    def step(self, f: Map, state: SolverState) -> SolverState:
        # fx itself, not x + (fx - x): the iterates are the model's own states, bit by bit.
        x = state.fx if self.damping == 1 else state.x + self.damping * (state.fx - state.x)
        return advance(f, state, x)
