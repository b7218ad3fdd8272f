"""The comparison of programs, on models of which it is known which program they run."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from loopinterp.benchmark.ground_truth_checks import Score
from loopinterp.circuits.program_comparison import compare_programs
from loopinterp.rasp.program_registry import get_program, list_programs

if TYPE_CHECKING:
    from loopinterp.benchmark.known_models import KnownModel
    from loopinterp.rasp.program import LoopProgram


def score_verdict(known: KnownModel, *, seed: int = 0) -> dict[str, Score]:
    """Whether the program that a model runs is the one that is named, of all of its task.

    Nothing where no exchange changes an answer of the program: there it says nothing to be tried.
    """
    program = known.compiled.program
    result = compare_programs(known.compiled.model, rivals_of(program), known.batch, seed=seed)
    share = result.data["whole_run"].sel(stratum="all", estimate="value").isel(model=0)
    own, others = float(share.sel(program=program.name)), share.drop_sel(program=program.name)
    if math.isnan(own):
        return {}
    named = result.verdict.winner == program.name
    best_other = float(others.max()) if others.size else math.nan
    return {"verdict": Score(own if named else 0.0, best_other)}


def rivals_of(program: LoopProgram) -> list[LoopProgram]:
    """A program, and the stock programs that solve the same task with the same settings."""
    stock = [get_program(name) for name in list_programs(program.task) if name != program.name]
    asked = program.inputs, program.task_settings
    return [program, *(p for p in stock if (p.inputs, p.task_settings) == asked)]
