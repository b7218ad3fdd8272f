"""Settling, stability and readouts, on models of which it is known when they settle."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from loopinterp.benchmark.ground_truth_checks import Score
from loopinterp.dynamics import convergence_study, readout_margin, stable_from
from loopinterp.rasp.compiler.assemble import LOGIT
from loopinterp.rasp.language import UNKNOWN

if TYPE_CHECKING:
    from torch import Tensor

    from loopinterp.benchmark.known_models import KnownModel
    from loopinterp.rasp.trace import Trace

EXAMPLES = 32
AFTER = 4
"""Loops after the program has settled."""


@torch.no_grad()
def score_dynamics(known: KnownModel, *, seed: int = 0) -> dict[str, Score]:
    """When each token settles, when each answer does, and how stable the end is.

    A token that never settles in the run is right where a variable of the program changes in the
    last loop too.

    Nothing where there is one class of answers only: no logit has a runner-up there.
    """
    model, program = known.compiled.model, known.compiled.program
    if model.config.d_vocab_out < 2:
        return {}
    batch = known.batch[slice(0, EXAMPLES)]
    # What is shifted through a sequence has left it after as many loops as it has positions.
    n_loops = max(known.n_loops, batch.inputs.shape[1], 12) + AFTER
    trace = program.trace(batch.inputs, n_loops=n_loops)
    result = convergence_study(
        known.without_distractors,
        batch,
        n_loops=n_loops,
        n_spectral=2,
        positions="all",
        seed=seed,
    )
    own = _settled(trace)
    # The study counts the first loop that moves nothing; the program, the last that does.
    settled_at = torch.from_numpy(result.data["settled_at"].values)
    found = torch.where(settled_at < 0, n_loops, settled_at - 1)
    scores = {"settling loop": _shares(found, own)}
    logits = model(batch.inputs, n_loops=n_loops, return_type="all_logits")
    decided = readout_margin(logits) > LOGIT / 2
    answers = torch.where(decided, logits.argmax(-1), UNKNOWN)
    scores["answer stable"] = _shares(stable_from(answers), stable_from(trace.outputs))
    radius = float(result.data["spectral_radius"].max())
    if int(own.max()) < n_loops - 1 and not math.isnan(radius):
        scores["stability"] = Score(radius, 1.0)
    return scores


def _settled(trace: Trace) -> Tensor:
    """Loops after which no variable at a position changes any more."""
    return torch.stack([trace.settled(name) for name in trace.variables]).amax(0)


def _shares(found: Tensor, own: Tensor) -> Score:
    most_common = own.flatten().mode().values
    return Score(float((found == own).float().mean()), float((own == most_common).float().mean()))
