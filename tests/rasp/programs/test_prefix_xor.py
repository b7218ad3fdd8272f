"""Prefix sums: after t loops, the XOR of the last t bits."""

from __future__ import annotations

import torch

from loopinterp.rasp import get_program
from loopinterp.tasks import PrefixSum


def test_after_t_loops_a_position_holds_the_xor_of_the_last_t_bits():
    batch = PrefixSum().sample(10, batch_size=30, generator=torch.Generator().manual_seed(0))
    trace = get_program("prefix_xor").trace(batch.inputs, n_loops=12)
    for row, tokens in enumerate(batch.inputs.tolist()):
        bits = [int(token == 1) for token in tokens]
        for t in range(13):
            for pos in range(len(bits)):
                last = bits[max(pos + 1 - t, 0) : pos + 1]
                assert trace.variables["prefix"][t, row, pos] == sum(last) % 2
