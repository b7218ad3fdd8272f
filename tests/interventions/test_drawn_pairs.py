"""Drawn interchanges have the same token at both ends; rare kinds come as often as others."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loopinterp.interventions.drawn_pairs import balanced_pairs, drawn_pairs, repeated_pairs
from loopinterp.programs import get_program
from loopinterp.programs.equivalence import inputs_of
from loopinterp.tasks import Addition

N = 5
BATCH = inputs_of(Addition(), (N,), 32, seed=0)
CARRIES = get_program("ripple").trace(BATCH.inputs, n_loops=N + 1).variables["carry"]


@given(seed=st.integers(0, 2**31), number=st.integers(1, 300))
@settings(max_examples=10, deadline=None)
def test_a_balanced_pair_has_one_token_and_two_inputs(seed: int, number: int) -> None:
    pairs = balanced_pairs(BATCH, CARRIES, number, torch.Generator().manual_seed(seed))
    position = pairs.positions[:, 0]
    assert 0 < len(pairs) <= number
    assert (pairs.base != pairs.source).all()
    tokens = (BATCH.inputs[rows, position] for rows in (pairs.base, pairs.source))
    assert torch.equal(*tokens)
    assert int(pairs.loop.max()) <= N + 1 and int(pairs.source_loop.max()) <= N + 1


@given(seed=st.integers(0, 2**31), number=st.integers(1, 300))
@settings(max_examples=10, deadline=None)
def test_a_second_interchange_is_no_earlier_and_has_the_token_of_its_place(
    seed: int, number: int
) -> None:
    pairs = repeated_pairs(BATCH, N + 1, number, torch.Generator().manual_seed(seed))
    second = pairs.second
    assert second is not None and second.made.all() and 0 < len(pairs) <= number
    assert (second.loop >= pairs.loop).all() and int(second.loop.max()) <= N + 1
    assert (second.source != pairs.base).all()
    tokens = (BATCH.inputs[rows, second.position] for rows in (pairs.base, second.source))
    assert torch.equal(*tokens)


def test_rare_kinds_come_as_often_as_common_ones() -> None:
    """A carry put in at loop 0 is one that no interchange at one loop can give."""
    generator = torch.Generator().manual_seed(0)
    shares = []
    for pairs in (
        drawn_pairs(BATCH, N + 1, 2000, generator, across_loops=True),
        balanced_pairs(BATCH, CARRIES, 2000, generator),
    ):
        position = pairs.positions[:, 0]
        replaced = CARRIES[pairs.loop, pairs.base, position]
        put_in = CARRIES[pairs.source_loop, pairs.source, position]
        shares.append(float((replaced != put_in).double().mean()))
    assert shares[1] > 1.3 * shares[0]
    at_first = pairs.loop == 0
    assert (put_in[at_first] == 1).any()
