"""Limits: where a looped model goes from a state, other initial states, and equality of limits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import torch

from loopinterp.core.text import ShortRepr
from loopinterp.dynamics.fixed_point import find_fixed_point, get_solver, iteration_of
from loopinterp.dynamics.measures import correctness, exact_match, likeliest
from loopinterp.dynamics.solvers import Status

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from loopinterp.dynamics.solvers import Solver
    from loopinterp.models.iteration import Iteration

LIMIT_LOOPS = 200
"""Loops in which a model's own limit is sought."""

OWN_START = "own"
"""The initial state that the model itself makes."""

NO_LIMIT = -1
"""Number of a run that found no limit."""

ZERO = 1e-4
"""Norm below which a limit is at 0 and has no size to compare with: searches end at 1e-8 there."""


@dataclass(frozen=True, repr=False)
class Limits(ShortRepr):
    """Where the examples of a batch ended, with :class:`Status` codes and loops of the search.

    The state is a limit, of a cycle one of its states; else the last one reached. The period is
    that of a cycle, 1 at a fixed point, else 0.
    """

    state: Float[Tensor, "batch pos d_model"]
    status: Int[Tensor, " batch"]
    loops: Int[Tensor, " batch"]
    period: Int[Tensor, " batch"]

    @classmethod
    def none_like(cls, state: Float[Tensor, "batch pos d_model"]) -> Limits:
        """No limit of any example, to be filled in with :meth:`put`."""
        status = torch.full(state.shape[:1], int(Status.RUNNING), device=state.device)
        return cls(torch.zeros_like(state), status, torch.zeros_like(status), status * 0)

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
        tol: Relative tolerance of a limit; see :func:`~loopinterp.dynamics.find_fixed_point`.
        solver: Plain iteration goes where the model goes; others may find limits elsewhere.
    """
    solver = get_solver(solver)
    finite = start.isfinite().flatten(1).all(dim=1)
    state = start.clone()
    status = torch.where(finite, int(Status.OUT_OF_BUDGET), int(Status.DIVERGED))
    loops, period = torch.zeros_like(status), torch.zeros_like(status)
    # A cycle is detected within one phase, so the later ones are long.
    done, steps = 0, 16
    while done < max_loops:
        rows = (status == Status.OUT_OF_BUDGET).nonzero().flatten()
        if not len(rows):
            break
        steps = min(steps, max_loops - done)
        end = find_fixed_point(
            iteration.select(rows).step, state[rows], solver=solver, tol=tol, max_iter=steps
        )
        state[rows], status[rows] = end.state, end.status
        loops[rows] += end.n_steps
        period[rows] = torch.where(end.converged, 1, end.period)
        done, steps = done + steps, 4 * steps
    return Limits(state, status, loops, period)


def limits_of_run(
    iteration: Iteration, states: Float[Tensor, "loop batch pos d_model"], **search: Any
) -> Limits:
    """The limits that the end of a run leads to, sought as by :func:`find_limits`.

    A run that left the finite numbers and came back counts as diverged. Where the step takes the
    loop's index no one map goes on from the end, and no limit is sought.
    """
    if iteration.takes_loop:
        status = torch.full(states.shape[1:2], int(Status.OUT_OF_BUDGET), device=states.device)
        ends = Limits(states[-1], status, torch.zeros_like(status), torch.zeros_like(status))
    else:
        ends = find_limits(iteration, states[-1], **search)
    finite = states.isfinite().flatten(2).all(dim=2).all(dim=0)  # [batch]
    return replace(ends, status=torch.where(finite, ends.status, int(Status.DIVERGED)))


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
    total = torch.zeros_like(limits.state)  # sum of the states around each cycle
    for number, state in enumerate(around(iteration, limits)):
        total += torch.where((number < limits.period.clamp(min=1))[:, None, None], state, 0)
    return total / limits.period.clamp(min=1)[:, None, None]


@torch.no_grad()
def map_and_limit(model: Any, h: Any) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """A map and its state as given; or one loop of a model, and the limit over its inputs.

    Where no limit is reached it is the state after :data:`LIMIT_LOOPS` loops.
    """
    iteration = iteration_of(model, h)
    if iteration is None:
        return model, h
    return iteration.step, find_limits(iteration, iteration.h0, max_loops=LIMIT_LOOPS).state


@torch.no_grad()
def limit_distances(
    ends: Limits, others: Limits, iteration: Iteration, counted: Bool[Tensor, "batch pos"]
) -> tuple[Float[Tensor, " batch"], Float[Tensor, " batch"]]:
    """Distance over the norm, and cosine, of each limit and another one; NaN where one is none.

    Two cycles are compared where they are nearest: one state of ``ends`` and all around ``others``,
    to whose inputs the iteration is bound and whose norm it is.
    """

    def compared(state: Tensor) -> Tensor:
        return torch.where(counted[..., None], state, 0).flatten(1)  # [batch, pos * d_model]

    here = compared(ends.state)  # [batch, pos * d_model]
    distance = torch.full_like(here[:, 0], float("inf"))
    alignment = torch.full_like(distance, float("nan"))
    for state in around(iteration, others):
        there = compared(state)
        gap = (here - there).norm(dim=-1) / there.norm(dim=-1).clamp_min(ZERO)
        cosine = torch.cosine_similarity(here, there, dim=-1)
        # Of the nearest state around the other limit, [batch]
        alignment = torch.where(gap < distance, cosine, alignment)
        distance = torch.minimum(gap, distance)
    unknown, nan = ~(ends.found & others.found), float("nan")
    return distance.masked_fill(unknown, nan), alignment.masked_fill(unknown, nan)


@torch.no_grad()
def answered_right(
    iteration: Iteration, ends: Limits, targets: Int[Tensor, "batch pos"], loop: int
) -> Bool[Tensor, " batch"]:
    """Whether the whole answer is right in each state reached; on a cycle, all around it."""
    right = [
        exact_match(correctness(likeliest(iteration.read(state, loop)), targets)).bool()
        for state in around(iteration, ends)
    ]
    return torch.stack(right).all(dim=0)  # [batch]


@dataclass
class DistinctLimits:
    """Numbers the limits of each example as they come: 0 is the first, the next far from it is 1.

    A limit takes the number of the first one on record that is within ``same`` of it, relative to
    the norm at the counted positions. ``firsts`` holds, for each number, the first limit of each
    example that has it.
    """

    iteration: Iteration
    counted: Bool[Tensor, "batch pos"]
    same: float
    firsts: list[Limits] = field(default_factory=list)

    def number(self, ends: Limits, example: Int[Tensor, " row"]) -> Int[Tensor, " row"]:
        """The numbers of some limits, each of the example given; :data:`NO_LIMIT` of none."""
        numbers = torch.full_like(ends.status, NO_LIMIT)
        k = 0
        while (left := (ends.found & (numbers == NO_LIMIT)).nonzero().flatten()).numel():
            if k == len(self.firsts):
                self.firsts.append(Limits.none_like(self.iteration.h0))
            examples, first = example[left], self.firsts[k]
            # Of each example without a limit of that number, the first row that is left.
            row = torch.full_like(first.status, len(numbers))
            row.scatter_reduce_(0, examples, left, "amin")
            new = (~first.found & (row < len(numbers))).nonzero().flatten()
            first.put(new, ends.select(row[new]))
            bound = self.iteration.select(examples), self.counted[examples]
            gap, _ = limit_distances(ends.select(left), first.select(examples), *bound)
            numbers[left[gap <= self.same]] = k
            k += 1
        return numbers

    def count(self) -> Int[Tensor, " batch"]:
        """How many limits each example has so far."""
        counts = torch.zeros(len(self.counted), dtype=torch.int64, device=self.counted.device)
        for first in self.firsts:
            counts += first.found
        return counts


def other_starts(
    limit: Float[Tensor, "batch pos d_model"],
    generator: torch.Generator,
    *,
    n_noise: int,
    n_others: int,
) -> dict[str, Float[Tensor, "batch pos d_model"]]:
    """Zeros, noise of the size of the limits, and the limits of other examples ("other 1": the
    next one's), by name.
    """
    starts = {"zeros": torch.zeros_like(limit)}
    starts |= {f"noise {k + 1}": noise_like(limit, generator) for k in range(n_noise)}
    return starts | {f"other {k + 1}": limit.roll(-k - 1, 0) for k in range(n_others)}


def noise_like(
    state: Float[Tensor, "batch pos d_model"], generator: torch.Generator
) -> Float[Tensor, "batch pos d_model"]:
    """A random direction at each position, as long as the state is there."""
    noise = torch.randn(state.shape, generator=generator, dtype=torch.float64)
    unit = noise / noise.norm(dim=-1, keepdim=True)
    return unit.to(state) * state.norm(dim=-1, keepdim=True)
