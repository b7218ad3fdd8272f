"""Where a looped model goes from a state: to a limit, or to none in the loops given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch

from loopinterp.dynamics.fixed_point import find_fixed_point
from loopinterp.dynamics.model_maps import iteration_of
from loopinterp.dynamics.solvers.fixed_point_solver import Status
from loopinterp.dynamics.solvers.solver_registry import get_solver
from loopinterp.short_repr import ShortRepr

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from loopinterp.dynamics.solvers.fixed_point_solver import Solver
    from loopinterp.models.looped_model import Iteration

LIMIT_LOOPS = 200
"""Loops in which a model's own limit is sought."""

PHASE = 16
"""Loops of the first phase of a search."""


@dataclass(frozen=True, repr=False)
class Limits(ShortRepr):
    """Where the examples of a batch ended.

    Attributes:
        state: The limit of each example, of a cycle one of its states; of one without a limit, the
            last state reached.
        status: How the search ended, as :class:`Status` codes.
        loops: Steps until it ended.
        period: Loops per turn of an example on a cycle, 1 at a fixed point, else 0.
    """

    state: Float[Tensor, "batch pos d_model"]
    status: Int[Tensor, " batch"]
    loops: Int[Tensor, " batch"]
    period: Int[Tensor, " batch"]

    @classmethod
    def none_like(cls, state: Float[Tensor, "batch pos d_model"]) -> Limits:
        """No limit of any example, for them to be put in (:meth:`put`)."""
        status = torch.full(state.shape[:1], int(Status.RUNNING), device=state.device)
        return cls(torch.zeros_like(state), status, torch.zeros_like(status), status * 0)

    @classmethod
    def unsought(cls, state: Float[Tensor, "batch pos d_model"]) -> Limits:
        """The ends of runs from which no limit is sought, as no one map goes on from there."""
        status = torch.full(state.shape[:1], int(Status.OUT_OF_BUDGET), device=state.device)
        return cls(state, status, torch.zeros_like(status), torch.zeros_like(status))

    def select(self, rows: Int[Tensor, " row"] | slice) -> Limits:
        """Those of some examples."""
        return Limits(*(getattr(self, f.name)[rows] for f in fields(self)))

    def put(self, rows: Int[Tensor, " row"], limits: Limits) -> None:
        """Put limits in the place of those of some examples."""
        for f in fields(self):
            getattr(self, f.name)[rows] = getattr(limits, f.name)

    @property
    def found(self) -> Bool[Tensor, " batch"]:
        """Which examples ended at a fixed point or on a cycle."""
        return (self.status == Status.CONVERGED) | (self.status == Status.CYCLE)


def find_limits(
    iteration: Iteration,
    start: Float[Tensor, "batch pos d_model"],
    *,
    max_loops: int,
    tol: float = 1e-5,
    solver: str | Solver = "picard",
) -> Limits:
    """Follow each example from a state until it no longer moves, or only turns in a cycle.

    Examples that have arrived leave the batch, so that a few slow ones cost little. One whose
    first state is not finite counts as diverged.

    Args:
        iteration: A model bound to its input.
        start: The states to go from.
        max_loops: Steps after which an example is given up.
        tol: Relative tolerance of a limit; see :func:`~loopinterp.dynamics.find_fixed_point`.
        solver: Plain iteration goes where the model goes; others may find limits elsewhere.
    """
    solver = get_solver(solver)
    finite = start.isfinite().flatten(1).all(dim=1)
    state = start.clone()
    status = torch.where(finite, int(Status.OUT_OF_BUDGET), int(Status.DIVERGED))
    loops, period = torch.zeros_like(status), torch.zeros_like(status)
    # A cycle is told within one phase, so the later ones are long.
    done, steps = 0, PHASE
    while (
        done < max_loops and (rows := (status == Status.OUT_OF_BUDGET).nonzero().flatten()).numel()
    ):
        steps = min(steps, max_loops - done)
        found = find_fixed_point(
            iteration.select(rows).step, state[rows], solver=solver, tol=tol, max_iter=steps
        )
        state[rows], status[rows] = found.state, found.status
        loops[rows] += found.n_steps
        period[rows] = torch.where(found.converged, 1, found.period)
        done, steps = done + steps, 4 * steps
    return Limits(state, status, loops, period)


def around(iteration: Iteration, limits: Limits) -> Iterator[Float[Tensor, "batch pos d_model"]]:
    """The states of the limits: one of a fixed point, and of cycles one after the other.

    There are as many as the longest period; a shorter cycle goes round more than once.
    """
    state, cycles = limits.state, (limits.period > 1)[:, None, None]
    yield state
    for _ in range(int(limits.period.max()) - 1):
        state = torch.where(cycles, iteration.step(state), state)
        yield state


def centre(iteration: Iteration, limits: Limits) -> Float[Tensor, "batch pos d_model"]:
    """The fixed points themselves, and the mean state of each cycle over one turn."""
    total = torch.zeros_like(limits.state)
    for number, state in enumerate(around(iteration, limits)):
        total += torch.where((number < limits.period.clamp(min=1))[:, None, None], state, 0)
    return total / limits.period.clamp(min=1)[:, None, None]


@torch.no_grad()
def map_and_limit(model: Any, h: Any) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """A map and its state as given; or one loop of a model, and where its own loops have come.

    Args:
        model: A map from states to states, or any looped model.
        h: A state; of a looped model its inputs, or a batch of them. The state is then that after
            :data:`LIMIT_LOOPS` at most: the limit, if they reach one.

    Raises:
        InputError: If a model's step takes the loop's index, or it does not repeat itself.
    """
    iteration = iteration_of(model, h)
    if iteration is None:
        return model, h
    return iteration.step, find_limits(iteration, iteration.h0, max_loops=LIMIT_LOOPS).state
