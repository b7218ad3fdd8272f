"""The plain ripple: right by chain length, and nothing held."""

from __future__ import annotations

import torch

from loopinterp.rasp import Intervention, get_program
from loopinterp.tasks import Addition
from tests.rasp.programs.inputs import chains_through_bit_4

TASK, PROGRAM = Addition(), get_program("ripple")


def test_a_carry_counts_the_bits_that_a_loop_has_let_it_see():
    batch = TASK.sample(20, batch_size=200, generator=torch.Generator().manual_seed(0))
    trace = PROGRAM.trace(batch.inputs, n_loops=21)
    a, b = TASK.operands(batch)
    for t in range(22):
        # The carry made by the t bits before each position alone, in Python integers.
        for row in range(0, 200, 20):
            for pos in range(21):
                window = range(max(pos - t, 0), pos)
                x = sum(int(a[row, j]) << k for k, j in enumerate(window))
                y = sum(int(b[row, j]) << k for k, j in enumerate(window))
                expected = (x + y) >> len(window)
                assert trace.variables["carry"][t, row, pos] == expected


def test_a_changed_carry_is_mended_and_the_change_runs_on():
    x = chains_through_bit_4(last=10)
    clean = PROGRAM.trace(x, n_loops=12)
    mask = torch.zeros_like(x, dtype=torch.bool)
    mask[:, 5] = True
    change = Intervention("carry", 6, 1 - clean.variables["carry"][6], mask)
    patched = PROGRAM.run(x, n_loops=12, interventions=[change])
    differs = patched.outputs != clean.outputs
    for t in range(6, 13):
        wrong = differs[t].any(dim=0).nonzero().flatten().tolist()
        assert wrong == ([5 + t - 6] if 5 + t - 6 <= 12 else [])
        assert differs[t][:, wrong].all()
