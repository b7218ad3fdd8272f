"""Planted states are of any loop and of the same token, and rare kinds come as often as others."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loopinterp.circuits.decompiler.behaviour import Runs
from loopinterp.circuits.decompiler.exchange_runs import (
    ExchangeRuns,
    exchanges,
    planted,
    repeated,
)
from loopinterp.circuits.interchange_engine import InterchangeRun
from loopinterp.models import LoopedTransformer, LoopedTransformerConfig
from loopinterp.rasp import get_program
from loopinterp.rasp.mutations.program_equivalence import inputs_of
from loopinterp.tasks import Addition

N = 5
BATCH = inputs_of(Addition(), (N,), 32, seed=0)
CARRIES = get_program("ripple").trace(BATCH.inputs, n_loops=N + 1).variables["carry"]


@given(seed=st.integers(0, 2**31), number=st.integers(1, 300))
@settings(max_examples=10, deadline=None)
def test_what_is_planted_has_the_same_token_and_is_of_another_input(seed: int, number: int) -> None:
    pairs = planted(BATCH, CARRIES, number, torch.Generator().manual_seed(seed))
    position = pairs.positions[:, 0]
    assert 0 < len(pairs) <= number
    assert (pairs.base != pairs.source).all()
    own, given = (BATCH.inputs[of, position] for of in (pairs.base, pairs.source))
    assert torch.equal(own, given)
    assert int(pairs.loop.max()) <= N + 1 and int(pairs.source_loop.max()) <= N + 1


@given(seed=st.integers(0, 2**31), number=st.integers(1, 300))
@settings(max_examples=10, deadline=None)
def test_a_second_interchange_is_no_earlier_and_has_the_token_of_its_place(
    seed: int, number: int
) -> None:
    pairs = repeated(BATCH, N + 1, number, torch.Generator().manual_seed(seed))
    second = pairs.second
    assert second is not None and second.made.all() and 0 < len(pairs) <= number
    assert (second.loop >= pairs.loop).all() and int(second.loop.max()) <= N + 1
    assert (second.source != pairs.base).all()
    own, given = (BATCH.inputs[of, second.position] for of in (pairs.base, second.source))
    assert torch.equal(own, given)


def test_rare_kinds_come_as_often_as_common_ones() -> None:
    """A carry planted at loop 0 is one that no exchange at one loop can give."""
    generator = torch.Generator().manual_seed(0)
    shares = []
    for pairs in (
        exchanges(BATCH, N + 1, 2000, generator, across_loops=True),
        planted(BATCH, CARRIES, 2000, generator),
    ):
        position = pairs.positions[:, 0]
        own = CARRIES[pairs.loop, pairs.base, position]
        put_in = CARRIES[pairs.source_loop, pairs.source, position]
        shares.append(float((own != put_in).double().mean()))
    assert shares[1] > 1.3 * shares[0]
    at_first = pairs.loop == 0
    assert (put_in[at_first] == 1).any()


def test_answers_are_read_in_their_place_where_the_readout_looks_around() -> None:
    """The interchange engine says the same, of a model whose coda attends to other positions."""
    torch.manual_seed(0)
    config = LoopedTransformerConfig(d_model=16, n_heads=2, d_vocab=6, d_vocab_out=2, n_coda=1)
    model = LoopedTransformer(config)
    runs = Runs(model, BATCH, 3)
    pairs = planted(BATCH, CARRIES[:4], 60, torch.Generator().manual_seed(0))
    made, engine = ExchangeRuns.after(runs, pairs), InterchangeRun(model, pairs)
    answers = engine.interchange()
    delays = answers.shape[1]
    same = made.exchanged.answers[:delays].transpose(0, 1) == answers
    assert same[engine.within].all()
    assert torch.equal(made.undisturbed.answers, engine.natural.long())
    alone = torch.stack([model.readout(h.flatten(0, 1)[:, None]).argmax(-1) for h in runs.states])
    assert (alone.view_as(made.undisturbed.answers) != made.undisturbed.answers).any()
