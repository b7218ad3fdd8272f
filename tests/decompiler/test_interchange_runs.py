"""Runs after interchanges, against the interchange engine."""

from __future__ import annotations

import torch

from loopinterp.compiler import compile_program
from loopinterp.decompiler.interchange_runs import InterchangeTrajectories, Runs
from loopinterp.interventions.engine import InterchangeRun
from loopinterp.interventions.pairs import balanced_pairs
from loopinterp.models import LoopedTransformer, LoopedTransformerConfig
from loopinterp.programs import get_program
from loopinterp.programs.equivalence import inputs_of
from loopinterp.tasks import Addition

N = 5
BATCH = inputs_of(Addition(), (N,), 32, seed=0)
CARRIES = get_program("ripple").trace(BATCH.inputs, n_loops=N + 1).variables["carry"]


def test_half_of_the_interchanges_are_effective_and_clean_runs_are_the_model_s() -> None:
    model = compile_program(get_program("ripple"), max_length=6).model
    runs = Runs(model, inputs_of(Addition(), (N,), 80, seed=0), Addition().n_loops(N))
    drawn = InterchangeTrajectories.drawn(runs, 4000, torch.Generator().manual_seed(0))
    effective = (drawn.differ & drawn.counted).any(-1).any(0)
    assert 0.4 < effective.double().mean() < 0.6
    answers = model(drawn.clean.tokens, n_loops=6).argmax(-1)
    assert torch.equal(drawn.clean.answers[-1], answers)


def test_answers_are_read_in_their_place_where_the_readout_looks_around() -> None:
    """The interchange engine says the same, of a model whose coda attends to other positions."""
    torch.manual_seed(0)
    config = LoopedTransformerConfig(d_model=16, n_heads=2, d_vocab=6, d_vocab_out=2, n_coda=1)
    model = LoopedTransformer(config)
    runs = Runs(model, BATCH, 3)
    pairs = balanced_pairs(BATCH, CARRIES[:4], 60, torch.Generator().manual_seed(0))
    after, engine = InterchangeTrajectories.after(runs, pairs), InterchangeRun(model, pairs)
    answers = engine.interchange()
    delays = answers.shape[1]
    same = after.changed.answers[:delays].transpose(0, 1) == answers
    assert same[engine.within].all()
    assert torch.equal(after.clean.answers, engine.natural.long())
    alone = torch.stack([model.readout(h.flatten(0, 1)[:, None]).argmax(-1) for h in runs.states])
    assert (alone.view_as(after.clean.answers) != after.clean.answers).any()
