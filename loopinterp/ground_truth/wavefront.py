"""The carry study on models of which it is known which carry has arrived after which loop."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from sklearn.exceptions import ConvergenceWarning

from loopinterp.circuits import ProgramModel
from loopinterp.ground_truth.checks import Score
from loopinterp.ground_truth.verdicts import TASK
from loopinterp.probing import carry_study
from loopinterp.probing.probe_controls import with_random_weights
from loopinterp.tasks.addition import Addition

if TYPE_CHECKING:
    from loopinterp.ground_truth.subjects import Subject
    from loopinterp.models.protocol import LoopedModel
    from loopinterp.probing.carry_wavefront_result import CarryStudyResult

LEAST_BITS = 12
MAX_CHAIN = 6
NEAR = 0.15
"""How far apart accuracies of two probes of one fact may be: 96 pairs give 0.05 at chance."""


def score_wavefront(subject: Subject, *, seed: int = 0) -> dict[str, Score]:
    """Share of (loop, chain length) at which the carry is as decodable as the program has it.

    What is known is what the same study finds in the program itself, its variables written down
    as a state (:class:`loopinterp.circuits.ProgramModel`) and no transformer anywhere.
    """
    program, n = subject.compiled.program, subject.batch.inputs.shape[1] - 1
    if program.task != TASK or n < LEAST_BITS:
        return {}
    holds = any(f.role == "tokens" for f in subject.compiled.circuit.features)
    itself = ProgramModel(program, subject.batch.inputs, n_loops=subject.n_loops, hold_tokens=holds)
    shuffled = with_random_weights(subject.compiled.model, seed=seed)
    with warnings.catch_warnings():
        # Of the study's code lengths, which are not scored: these classes are separable.
        warnings.simplefilter("ignore", ConvergenceWarning)
        own, found = (
            _study(model, shuffled, n, seed) for model in (itself, subject.without_distractors)
        )
    apart = (abs(own.data["accuracy"] - found.data[x]) for x in ("accuracy", "random_model"))
    return {"wavefront": Score(*(float((gap <= NEAR).mean()) for gap in apart))}


def _study(model: LoopedModel, shuffled: Any, n: int, seed: int) -> CarryStudyResult:
    return carry_study(
        model,
        Addition(),
        n=n,
        max_chain=MAX_CHAIN,
        n_short=LEAST_BITS - 2,
        loops=range(MAX_CHAIN + 2),
        n_train=96,
        n_test=96,
        random_model=shuffled,
        seed=seed,
    )
