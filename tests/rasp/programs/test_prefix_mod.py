"""Prefix sums mod m: after t loops, the sum of the last t digits."""

from __future__ import annotations

import pytest
import torch

from loopinterp.rasp.programs.prefix_mod import prefix_mod
from loopinterp.tasks import PrefixSum


@pytest.mark.parametrize("modulus", [2, 3, 10])
def test_after_t_loops_a_position_holds_the_sum_of_the_last_t_digits(modulus):
    task = PrefixSum(modulus=modulus)
    batch = task.sample(10, batch_size=30, generator=torch.Generator().manual_seed(0))
    trace = prefix_mod(modulus).trace(batch.inputs, n_loops=12)
    for row, tokens in enumerate(batch.inputs.tolist()):
        digits = [token % modulus if token < modulus else 0 for token in tokens]
        for t in range(13):
            for pos in range(len(digits)):
                last = digits[max(pos + 1 - t, 0) : pos + 1]
                assert trace.variables["prefix"][t, row, pos] == sum(last) % modulus
    assert torch.equal(trace.outputs[-1][:, 1:], batch.targets[:, 1:])
