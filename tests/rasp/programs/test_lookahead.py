"""Lookahead: after t loops, what the last 2^t bits say about the carry."""

from __future__ import annotations

import torch

from loopinterp.rasp import get_program
from loopinterp.tasks import Addition


def test_spans_double_and_say_what_their_bits_do():
    task = Addition()
    batch = task.sample(20, batch_size=40, generator=torch.Generator().manual_seed(0))
    trace = get_program("lookahead").trace(batch.inputs, n_loops=6)
    a, b = task.operands(batch)
    for t in range(7):
        for pos in range(21):
            assert trace.variables["span"][t, 0, pos] == min(2**t, pos + 1)
            bits = range(max(pos - 2**t, 0), pos)
            for row in range(0, 40, 8):
                x = sum(int(a[row, j]) << k for k, j in enumerate(bits))
                y = sum(int(b[row, j]) << k for k, j in enumerate(bits))
                assert trace.variables["makes"][t, row, pos] == (x + y) >> len(bits)
                whole = len(bits) == 2**t
                passes = int(whole and x ^ y == 2 ** len(bits) - 1)
                assert trace.variables["passes"][t, row, pos] == passes
