"""The comparison of programs, on models of which it is known which program they run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from loopinterp.circuits import compare_programs
from loopinterp.ground_truth.checks import Score

if TYPE_CHECKING:
    from loopinterp.ground_truth.subjects import Subject

TASK = "addition"
LEAST_BITS = 12


def score_verdict(subject: Subject, *, seed: int = 0) -> dict[str, Score]:
    """Whether the program that a model runs is the one that is named.

    One shot keeps nothing from loop to loop, so that swaps cannot tell it from random directions;
    the comparison says so itself and never names it. It is not asked for here.
    """
    program, n = subject.compiled.program, subject.batch.inputs.shape[1] - 1
    if program.task != TASK or program.name == "one_shot" or n < LEAST_BITS:
        return {}
    result = compare_programs(subject.compiled.model, n=n, per_place=24, max_chain=n - 4, seed=seed)
    own = result.programs.index(program.name)
    named = result.verdict.winner == program.name
    overall = result.iia[0, :, -1, 1]
    return {
        "verdict": Score(
            float(overall[own]) if named else 0.0, float(np.nanmax(np.delete(overall, own)))
        )
    }
