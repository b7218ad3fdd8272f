"""Parity by shifting: the running parity of the bits that have come by."""

from __future__ import annotations

import torch

from loopinterp.rasp import get_program
from loopinterp.tasks import Parity


def test_after_t_loops_a_position_has_added_the_t_bits_before_it():
    batch = Parity().sample(10, batch_size=30, generator=torch.Generator().manual_seed(0))
    trace = get_program("parity").trace(batch.inputs, n_loops=12)
    for row, tokens in enumerate(batch.inputs.tolist()):
        bits = [int(token == 1) for token in tokens]
        for t in range(13):
            for pos in range(len(bits)):
                seen = sum(bits[max(pos - t, 0) : pos]) % 2
                assert trace.variables["parity"][t, row, pos] == seen
                moved = bits[pos - t] if pos >= t else 0
                assert trace.variables["bit"][t, row, pos] == moved
