"""Interchange interventions on models of which it is known where each variable is kept."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from loopinterp.benchmark.ground_truth_checks import Score
from loopinterp.circuits.variable_directions import labelled_states
from loopinterp.circuits.variable_interchange import (
    ANOTHER_LOOP,
    ANOTHER_VARIABLE,
    NOTHING,
    RANDOM,
    SAME_VALUE,
    VariableInterchange,
    interchange_study,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from loopinterp.benchmark.known_models import KnownModel
    from loopinterp.rasp.program import LoopProgram
    from loopinterp.tasks.task import Batch

_WRONG = {
    "wrong variable": ANOTHER_VARIABLE,
    "wrong loop": ANOTHER_LOOP,
    "random change": RANDOM,
}


def score_interchange(known: KnownModel, *, seed: int = 0) -> dict[str, Score]:
    """The worst cell of the right exchange; whole runs after wrong ones, and as a probe says."""
    circuit, program = known.compiled.circuit, known.compiled.program
    found = exchanged(known, {v: circuit.subspace(v) for v in circuit.variables}, seed)
    nothing = found.pooled(NOTHING)[0]
    wrong = {key: found.pooled(intervention) for key, intervention in _WRONG.items()}
    scores = {key: Score(share, nothing) for key, (share, _, _, n) in wrong.items() if n}
    same, _, _, n_same = found.pooled(SAME_VALUE)
    if n_same:
        scores["same value"] = Score(same, found.pooled(RANDOM)[0])
    if found.pooled()[3]:
        most = max(score.value for key, score in scores.items() if key in _WRONG)
        scores["interchange"] = Score(float(found.iia.min()), most)
        # Probes see the loops of the run: of states that have settled there are many alike.
        seen = replace(known.batch, n_loops=torch.full_like(known.batch.n_loops, known.n_loops + 1))
        probed = probed_subspaces(known.compiled.model, program, seen)
        blind = exchanged(known, {v: rows for v, rows in probed.items() if len(rows)}, seed)
        scores["interchange by probe"] = Score(blind.pooled()[0], blind.pooled(RANDOM)[0])
    return scores


def probed_subspaces(model: Any, program: LoopProgram, batch: Batch) -> dict[str, Tensor]:
    """The subspace in which a probe finds each variable ``[rank, d_model]``."""
    return {v: labelled_states(model, program, [v], batch).subspace() for v in program.variables}


def exchanged(known: KnownModel, subspaces: Mapping[str, Tensor], seed: int) -> VariableInterchange:
    """The study of exchanges of subspaces of a known model."""
    return interchange_study(
        known.compiled.model,
        known.batch,
        known.compiled.program,
        subspaces=subspaces,
        n_loops=max(known.n_loops, 1),
        pairs_per_loop=32,
        seed=seed,
    )
