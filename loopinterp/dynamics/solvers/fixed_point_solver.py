"""What a fixed-point solver is: how it starts, how it steps, and when an example is done."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import torch
from pydantic import PositiveFloat, PositiveInt

from loopinterp.dynamics.measures import share_of_size
from loopinterp.settings import Settings, settings

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

Map = Callable[["Tensor"], "Tensor"]
"""The map whose fixed point is sought, on flat states ``[batch, size]``."""


class Status(IntEnum):
    """How the search ended for one example.

    ``DIVERGED``: the map gave a value that is not finite, or the state outgrew the limit.
    ``STALLED``: the residual stopped falling (a periodic orbit, or the floor of the precision).
    """

    RUNNING = 0
    CONVERGED = 1
    MAX_STEPS = 2
    DIVERGED = 3
    STALLED = 4


@settings
class Termination(Settings):
    r"""When an example is done, from its residual :math:`\|f(x) - x\| / \|f(x)\|`.

    Attributes:
        tol: Converged when :math:`\|f(x)-x\| \le` ``tol`` :math:`\|f(x)\|` + ``atol``.
        atol: Absolute part, for fixed points at or near zero.
        max_steps: Steps after which a running example is given up.
        divergence: Diverged when :math:`\|f(x)\| >` ``divergence`` :math:`(1 + \|x_0\|)`.
        patience: Stalled when the best residual has not fallen by one percent in this many
            steps. A change that travels one position a loop keeps the residual level while it
            travels, so this should exceed the number of positions. ``None``: never.
    """

    tol: PositiveFloat = 1e-5
    atol: PositiveFloat = 1e-8
    max_steps: PositiveInt = 200
    divergence: PositiveFloat = 1e6
    patience: PositiveInt | None = 100

    def __call__(self, state: SolverState) -> Int[Tensor, " batch"]:
        """Status code of every example."""
        status = torch.full_like(state.since_best, Status.RUNNING)
        if self.patience is not None:
            status[state.since_best >= self.patience] = Status.STALLED
        if state.n_steps >= self.max_steps:
            status[status == Status.RUNNING] = Status.MAX_STEPS
        gap = (state.fx - state.x).norm(dim=-1)
        size = state.fx.norm(dim=-1)
        status[gap <= self.tol * size + self.atol] = Status.CONVERGED
        finite = state.fx.isfinite().all(dim=-1)
        status[~finite | (size > self.divergence * (1 + state.start_norm))] = Status.DIVERGED
        return status


@dataclass(frozen=True)
class SolverState:
    """Where a search stands.

    Attributes:
        x: The iterate of each example.
        fx: The map at ``x``.
        residual: Relative residual of ``x``.
        best: Smallest residual so far.
        since_best: Steps since the residual last fell by one percent.
        start_norm: Norm of the starting point.
        n_steps: Steps made.
        memory: What the solver remembers beyond the iterate.
    """

    x: Float[Tensor, "batch size"]
    fx: Float[Tensor, "batch size"]
    residual: Float[Tensor, " batch"]
    best: Float[Tensor, " batch"]
    since_best: Int[Tensor, " batch"]
    start_norm: Float[Tensor, " batch"]
    n_steps: int = 0
    memory: Any = None

    def keep(self, done: Bool[Tensor, " batch"], old: SolverState) -> SolverState:
        """This state, but with the examples that were done in ``old`` left as they were."""
        rows = done[:, None]
        return replace(
            self,
            x=torch.where(rows, old.x, self.x),
            fx=torch.where(rows, old.fx, self.fx),
            residual=torch.where(done, old.residual, self.residual),
            best=torch.where(done, old.best, self.best),
            since_best=torch.where(done, old.since_best, self.since_best),
        )


class Solver(ABC):
    """A batched fixed-point solver: every example runs, and ends, on its own."""

    @abstractmethod
    def init(self, f: Map, x0: Float[Tensor, "batch size"]) -> SolverState:
        """The state before the first step: ``f`` is evaluated at ``x0``."""

    @abstractmethod
    def step(self, f: Map, state: SolverState) -> SolverState:
        """One new iterate, at the cost of one evaluation of ``f``."""


def start(f: Map, x0: Float[Tensor, "batch size"], memory: Any = None) -> SolverState:
    """The state of a solver that has evaluated ``f`` at its starting point."""
    fx = f(x0)
    residual = _residual(x0, fx)
    steps = torch.zeros(len(x0), dtype=torch.int64, device=x0.device)
    return SolverState(x0, fx, residual, residual, steps, x0.norm(dim=-1), memory=memory)


def advance(f: Map, state: SolverState, x: Float[Tensor, "batch size"]) -> SolverState:
    """The state after moving to the iterate ``x``."""
    fx = f(x)
    residual = _residual(x, fx)
    better = residual < 0.99 * state.best
    return replace(
        state,
        x=x,
        fx=fx,
        residual=residual,
        best=torch.where(better, residual, state.best),
        since_best=torch.where(better, 0, state.since_best + 1),
        n_steps=state.n_steps + 1,
    )


def _residual(x: Tensor, fx: Tensor) -> Tensor:
    return share_of_size((fx - x).norm(dim=-1), fx.norm(dim=-1))
