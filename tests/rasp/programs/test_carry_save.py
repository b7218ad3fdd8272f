"""Carry-save: at every loop, the partial sum and the pending carries add up to the answer."""

from __future__ import annotations

import torch

from loopinterp.rasp import get_program
from loopinterp.tasks import Addition


def test_sum_and_pending_carries_always_add_up():
    task = Addition()
    n = 40
    batch = task.sample(n, batch_size=60, generator=torch.Generator().manual_seed(0))
    trace = get_program("carry_save").trace(batch.inputs, n_loops=n)
    a, b = task.operands(batch)

    def integers(bits: torch.Tensor) -> list[int]:
        return [sum(bit << i for i, bit in enumerate(row)) for row in bits[:, 1:].tolist()]

    totals = [x + y for x, y in zip(integers(a), integers(b))]
    for t in range(n + 1):
        partial = integers(trace.variables["sum"][t])
        pending = integers(trace.variables["carry"][t])
        for total, s, c in zip(totals, partial, pending):
            assert (s + 2 * c) % 2**n == total % 2**n
    assert not trace.variables["carry"][n - 1, :, 1:n].any()
