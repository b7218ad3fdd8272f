"""The carry study on models of which it is known which carry has arrived after which loop."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from sklearn.exceptions import ConvergenceWarning

from loopinterp.benchmark.ground_truth_checks import Score
from loopinterp.circuits.program_model import ProgramModel
from loopinterp.probing import carry_study, with_random_weights
from loopinterp.tasks.addition import Addition

if TYPE_CHECKING:
    from loopinterp.benchmark.known_models import KnownModel
    from loopinterp.models.looped_model import LoopedModel
    from loopinterp.probing import CarryStudyResult

TASK = "addition"
LEAST_BITS = 12
MAX_CHAIN = 6
NEAR = 0.15
"""How far apart accuracies of two probes of one fact may be: 96 pairs give 0.05 at chance."""


def score_wavefront(known: KnownModel, *, seed: int = 0) -> dict[str, Score]:
    """Share of (loop, chain length) at which the carry is as decodable as the program has it.

    What is known is what the same study finds in the program itself, its variables written down
    as a state (:class:`~loopinterp.circuits.ProgramModel`) and no transformer anywhere.
    """
    program, n = known.compiled.program, known.batch.inputs.shape[1] - 1
    if program.task != TASK or n < LEAST_BITS:
        return {}
    holds = any(f.role == "tokens" for f in known.compiled.circuit.features)
    itself = ProgramModel(program, max_length=n + 1, hold_tokens=holds)
    shuffled = with_random_weights(known.compiled.model, seed=seed)
    with warnings.catch_warnings():
        # Of the study's code lengths, which are not scored: these classes are separable.
        warnings.simplefilter("ignore", ConvergenceWarning)
        own, found = (
            _study(model, shuffled, n, seed) for model in (itself, known.without_distractors)
        )
    shares = [
        float((abs(own.data["accuracy"] - found.data[name]) <= NEAR).mean())
        for name in ("accuracy", "random_model")
    ]
    return {"wavefront": Score(*shares)}


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
