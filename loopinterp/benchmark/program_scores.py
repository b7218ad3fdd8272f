"""A program that a tool says a model runs, against the one that it does run."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pandas as pd
import torch

from loopinterp.circuits.decompiler.automaton_program import programs_of
from loopinterp.circuits.decompiler.claim import EXACT
from loopinterp.circuits.decompiler.decompilation import decompile
from loopinterp.circuits.program_comparison import compare_programs
from loopinterp.errors import InputError
from loopinterp.rasp.mutations import equivalence
from loopinterp.rasp.program import LoopProgram
from loopinterp.rasp.program_registry import get_program

if TYPE_CHECKING:
    from loopinterp.benchmark.benchmark_folder import Exercise, KnownCircuit

ProgramMethod = Callable[["Exercise"], "LoopProgram | None"]

EQUIVALENT, NONE, FALSE = "equivalent", "no program", "false name"


def score_program(method: ProgramMethod, known: KnownCircuit) -> pd.DataFrame:
    """Whether a program is the known one's equal under interchange interventions.

    Args:
        method: From an exercise to a program, or None for "none that I know". What it gives counts
            as exact: a method that knows better of a program gives None.
        known: The model.

    Returns:
        One row: the ``outcome`` (``equivalent``, ``no program`` or ``false name``), and how many
        interventions tell a false one from the true one, of those that change anything.

    Raises:
        InputError: What the method gives is neither.
    """
    program = method(known.exercise)
    if program is None:
        return pd.DataFrame([{"outcome": NONE, "told_apart": float("nan")}])
    if not isinstance(program, LoopProgram):
        raise InputError(
            "program",
            expected="a LoopProgram, or None for none",
            given=type(program).__name__,
            fix="Return the program itself.",
        )
    found = equivalence(program, known.compiled.program)
    told_apart = 0.0 if found.equivalent else max(found.share, found.natural_share)
    outcome = EQUIVALENT if found.equivalent else FALSE
    return pd.DataFrame([{"outcome": outcome, "told_apart": told_apart}])


def by_decompiling(exercise: Exercise) -> LoopProgram | None:
    """The program that is read off the model, if it is claimed to be exact.

    Its states are taken for sharp ones at first; where they give no such program, as regions.
    """
    model, task, n = exercise.model, exercise.task, exercise.n
    found = decompile(model, task, n=n)
    if found.claim.grade != EXACT:
        found = decompile(model, task, n=n, sharp=False, across_loops=True)
    return found.program if found.claim.grade == EXACT else None


def by_comparing(exercise: Exercise, *, left_out: str | None = None) -> LoopProgram | None:
    """The stock program of the task that the comparison names.

    Args:
        exercise: The model.
        left_out: A program that is not on the list, as if nobody had thought of it.
    """
    rivals = [p for p in programs_of(exercise.task) if p.name != left_out]
    if not rivals:
        return None
    generator = torch.Generator().manual_seed(0)
    batch = exercise.task.sample(torch.full((256,), exercise.n), generator=generator)
    winner = compare_programs(exercise.model, rivals, batch).verdict.winner
    return None if winner is None else get_program(winner)
