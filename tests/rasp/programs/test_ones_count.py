"""Counting ones: after t loops, those among the first t bits."""

from __future__ import annotations

import torch

from loopinterp.rasp import get_program
from loopinterp.tasks import BinarySum


def test_after_t_loops_a_position_has_counted_the_first_t_bits_that_it_can_see():
    batch = BinarySum().sample(9, batch_size=30, generator=torch.Generator().manual_seed(0))
    trace = get_program("binary_sum").trace(batch.inputs, n_loops=12)
    for row, tokens in enumerate(batch.inputs.tolist()):
        for t in range(13):
            for pos in range(len(tokens)):
                seen = tokens[1 : min(t, pos) + 1]
                assert trace.variables["count"][t, row, pos] == seen.count(1)


def test_every_position_looks_at_the_same_bit_in_each_loop():
    batch = BinarySum().sample(5, batch_size=2, generator=torch.Generator().manual_seed(0))
    looks_at = get_program("binary_sum").trace(batch.inputs, n_loops=5).selectors["next_bit"]
    for loop in range(5):
        query, key = looks_at[loop, 0].nonzero().T
        assert set(key.tolist()) == {loop + 1}
        assert query.tolist() == list(range(loop + 1, batch.inputs.shape[1]))
