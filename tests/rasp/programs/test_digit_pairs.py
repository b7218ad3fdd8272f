"""Addition of a + b =: what has passed is added, lowest digit first."""

from __future__ import annotations

import torch

from loopinterp.rasp import get_program
from loopinterp.tasks import TokenAddition


def test_after_t_loops_the_carry_at_the_equals_sign_is_that_of_the_t_lowest_digits():
    n, g = 9, torch.Generator().manual_seed(0)
    operands = torch.randint(2**n, (50, 2), generator=g).tolist()
    batch = TokenAddition().encode([(a, b) for a, b in operands], n=n)
    trace = get_program("token_addition").trace(batch.inputs, n_loops=n + 4)
    equals = 2 * n + 2
    for row, (a, b) in enumerate(operands):
        for t in range(n + 5):
            seen = 2 ** min(t, n)
            assert trace.variables["carry"][t, row, equals] == (a % seen + b % seen) // seen


def test_everything_behind_the_plus_stands_still_after_n_loops():
    n = 6
    batch = TokenAddition().sample(n, batch_size=50, generator=torch.Generator().manual_seed(0))
    trace = get_program("token_addition").trace(batch.inputs, n_loops=n + 9)
    for values in trace.variables.values():
        assert (values[n:, :, n + 1 :] == values[n, :, n + 1 :]).all()
