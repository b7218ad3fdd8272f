"""Whether interchange interventions at whole positions separate two programs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Annotated

import numpy as np
import torch
from jaxtyping import Int
from pydantic import Field, PositiveInt
from torch import Tensor

from loopinterp.core.boundary import checked
from loopinterp.core.errors import InputError, need
from loopinterp.core.settings import Seed
from loopinterp.programs.paired_runs import (
    AT_A_TIME,
    PairedRuns,
    RepeatedStates,
    decided_difference,
    repeated_states,
)
from loopinterp.programs.program import LoopProgram, ProgramOffset, alignments, with_output_lag
from loopinterp.programs.stock_programs import get_program
from loopinterp.tasks.task import IGNORE, Batch, Task
from loopinterp.tasks.task_registry import get_task

EXAMPLES, INTERVENTIONS, SCREENED = 64, 4096, 512
"""Inputs of each length and distribution; interventions of a length, and to screen an offset."""


@dataclass(frozen=True, eq=False)
class Equivalence:
    """Whether interchange interventions separate two programs."""

    program: str
    other: str  # in the place of a model
    program_offset: ProgramOffset  # at which they differ least
    lengths: tuple[int, ...]  # of the inputs
    every_single: tuple[int, ...]  # lengths at which every single interchange was made
    # Lengths at which every two interchanges of one run were made, if no single one differs.
    every_repeated: tuple[int, ...]
    natural_share: float  # of (input, loop): answers of clean runs that differ
    # One entry an intervention: length; columns of ``paired_runs.Interventions``; whether it
    # ``changes`` an answer of either program, and whether the two answers ``differ`` afterwards.
    interventions: dict[str, np.ndarray] = field(repr=False)
    repeated: RepeatedStates = field(repr=False)  # states after two interchanges, if followed

    @property
    def equivalent(self) -> bool:
        """Whether no difference was found.

        If none of N drawn interventions differs, fewer than 3 / N of all do (95%).
        """
        return self.natural_share == 0 and self.share == 0

    @property
    def difference(self) -> float:
        """:attr:`share` plus ``natural_share``."""
        return self.share + self.natural_share

    @property
    def exhaustive(self) -> bool:
        """Whether a difference was found, or every interchange at these lengths was made."""
        return not self.equivalent or self.every_single == self.every_repeated == self.lengths

    @property
    def share(self) -> float:
        """Share of effective interventions that differ.

        If only two interchanges together separate the programs: the share of states after them.
        """
        differ, changes = self.interventions["differ"], self.interventions["changes"]
        return float(differ.sum() / max((differ | changes).sum(), 1)) or self.repeated.share


@checked
def equivalence(
    program: LoopProgram | str,
    other: LoopProgram | str,
    *,
    lengths: Annotated[Sequence[PositiveInt], Field(min_length=1)] = (1, 2, 3, 4, 5, 6),
    interventions: PositiveInt | None = INTERVENTIONS,
    exhaustive_to: int = 5,
    seed: Seed = 0,
) -> Equivalence:
    """Look for an interchange intervention that separates two programs, given by name or as they
    are.

    An interchange takes all variables at one position from a source input with the same token
    there, after the same loop or another one; a run has one or two. Both programs continue until
    the other's T(n). They are equivalent if all scored answers that both decide agree, at every
    loop from then on and in clean runs (where both must decide at T(n)). The best program offset
    counts: a loop earlier or later, variables one position to the left, or answers one loop late.

    Args:
        lengths: Lengths of the inputs.
        interventions: The most at each length beyond ``exhaustive_to``, or where inputs cannot be
            listed; half have a source of another loop, a tenth a second interchange. None for all.
        exhaustive_to: At lengths up to this one every interchange is made, and every second one
            from each resulting state (a sample if there are too many).

    Raises:
        InputError: If the tasks differ, or there are too many inputs for all interventions.

    Source: interchange interventions, Geiger et al., arXiv 2106.02997.

    Example:
        >>> held = equivalence("ripple", "ripple_held_2", lengths=(4,))
        >>> held.equivalent, held.natural_share, held.share > 0.1
        (False, 0.0, True)
    """
    first, second = get_program(program), get_program(other)
    alike = (first.task, first.task_settings) == (second.task, second.task_settings)
    expected = f"a program of {first.task}, with the settings {dict(first.task_settings)}"
    got = f"{second.name}, of {second.task} with {dict(second.task_settings)}"
    fix = "Compare programs that read the same inputs and answer the same question."
    need(alike, "other", expected, got, fix)
    at_offset = partial(equivalence_at, first, second, lengths=tuple(lengths), seed=seed)
    # The program must have begun when the other is done.
    longest = max(map(second.n_loops, lengths))
    fitting = [offset for offset in alignments() if longest + offset.shift >= 0]
    few = min(interventions or SCREENED, SCREENED)
    screened = [at_offset(offset, interventions=few) for offset in fitting]
    difference = attrgetter("difference")
    candidates = [x for x in screened if x.equivalent] or [min(screened, key=difference)]
    results = (
        at_offset(x.program_offset, interventions=interventions, exhaustive_to=exhaustive_to)
        for x in candidates
    )
    return min(results, key=difference)


def equivalence_at(
    program: LoopProgram,
    other: LoopProgram,
    offset: ProgramOffset,
    *,
    lengths: tuple[int, ...] = (2, 4, 6),
    interventions: int | None = INTERVENTIONS,
    exhaustive_to: int = 0,
    seed: int = 0,
) -> Equivalence:
    task = get_task(program.task, **program.task_settings)
    late = with_output_lag(program, offset.lag)
    generator = torch.Generator().manual_seed(seed)
    clean_differences: list[Tensor] = []
    columns: dict[str, list[Tensor]] = {}
    # None at lengths at which the program has not begun when the other is done.
    all_runs: dict[int, PairedRuns | None] = {}
    for n in lengths:
        n_loops = other.n_loops(n)
        batch = every_input(task, n, seed=seed) if interventions is None else None
        if interventions is not None and n <= exhaustive_to:
            batch = _all_inputs(task, n, n_loops, seed)
        if max(-offset.shift, 0) > n_loops:
            all_runs[n] = None
            continue
        inputs = batch or inputs_of(task, (n,), EXAMPLES, seed=seed)
        runs = PairedRuns(late, other, offset, inputs, n_loops)
        expected, answers = runs.clean_answers()
        differ = decided_difference(expected, answers)  # [loop, input, pos]
        differ[-1:] = expected[-1:] != answers[-1:]  # at T(n), undecided is no answer
        clean_differences.append((differ & (inputs.targets != IGNORE)).any(-1).flatten())
        interchanges = runs.every_single() if batch else runs.drawn(interventions or 0, generator)
        for some in interchanges.split(AT_A_TIME):
            for name, column in runs.intervened(some).items():
                columns.setdefault(name, []).append(column)
        columns.setdefault("length", []).append(torch.full_like(interchanges.base, n))
        if batch:
            all_runs[n] = runs
    found = Equivalence(
        program=program.name,
        other=other.name,
        program_offset=offset,
        lengths=lengths,
        every_single=tuple(all_runs),
        every_repeated=(),
        natural_share=float(torch.cat(clean_differences).double().mean()),
        interventions={name: torch.cat(parts).numpy() for name, parts in columns.items()},
        repeated=RepeatedStates(),
    )
    if not found.equivalent:
        return found
    # No difference so far: every two interchanges in one run.
    repeated, complete = _repeated(all_runs, generator)
    return dataclasses.replace(found, every_repeated=complete, repeated=repeated)


def _repeated(
    all_runs: dict[int, PairedRuns | None], generator: torch.Generator
) -> tuple[RepeatedStates, tuple[int, ...]]:
    """States after two interchanges, up to a length at which some differ; lengths with all."""
    total, complete = RepeatedStates(), []
    for n, runs in all_runs.items():
        states, every = (
            (RepeatedStates(), True) if runs is None else repeated_states(runs, generator)
        )
        total += states
        complete += [n] if every else []
        if states.differ:
            break
    return total, tuple(complete)


def _all_inputs(task: Task, n: int, n_loops: int, seed: int) -> Batch | None:
    n_inputs, most_states = math.prod(map(len, _symbols(task, n, seed))), 2**16
    if n_inputs * task.n_positions(n) * (n_loops + 1) > most_states:  # (input, position, loop)
        return None
    try:
        return every_input(task, n, seed=seed)
    except InputError:  # not every combination of symbols is an input of the task
        return None


def inputs_of(task: Task, lengths: tuple[int, ...], examples: int, *, seed: int) -> Batch:
    """``examples`` inputs of each length and distribution of the task."""
    generator = torch.Generator().manual_seed(seed)
    n = torch.tensor(lengths).repeat_interleave(examples)
    parts = [task.sample(n, generator=generator, distribution=d) for d in task.distributions]
    fields = ("inputs", "targets", "n", "n_loops")
    joined = (torch.cat([getattr(part, field) for part in parts]) for field in fields)
    return Batch(*joined, task=task)


def _symbols(task: Task, n: int, seed: int) -> list[Int[Tensor, " symbol"]]:
    return [column.unique() for column in inputs_of(task, (n,), 8 * EXAMPLES, seed=seed).inputs.T]


def every_input(task: Task, n: int, *, seed: int = 0) -> Batch:
    """All combinations of symbols of a length, also those that no input of the task has.

    Raises:
        InputError: If there are more than 16,384.
    """
    symbols, most = _symbols(task, n, seed), 2**14
    number = math.prod(map(len, symbols))
    expected = f"lengths of which {task.name} has at most {most:,} inputs"
    fix = "Pass shorter ones, or a number of interventions."
    need(number <= most, "lengths", expected, f"{n}, with {number:,}", fix)
    inputs = torch.cartesian_prod(*symbols).view(number, len(symbols))
    each = torch.full((number,), n), torch.full((number,), task.n_loops(n))
    return Batch(inputs, task.targets(inputs), *each, task=task)
