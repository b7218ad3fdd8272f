"""The latched ripple: one front from BOS, and everything behind it held."""

from __future__ import annotations

import torch

from loopinterp.rasp import UNKNOWN, Intervention, get_program
from loopinterp.tasks import Addition
from tests.rasp.programs.inputs import chains_through_bit_4

TASK, PROGRAM = Addition(), get_program("latched_ripple")


def changed_outputs(loop: int) -> torch.Tensor:
    """Which outputs change [loop, pos] when the carry into position 5 is flipped at a loop."""
    x = chains_through_bit_4(last=11)
    clean = PROGRAM.trace(x, n_loops=13)
    mask = torch.zeros_like(x, dtype=torch.bool)
    mask[:, 5] = True
    flipped = 1 - clean.variables["carry"][-1]
    patched = PROGRAM.run(x, n_loops=13, interventions=[Intervention("carry", loop, flipped, mask)])
    differs = patched.outputs != clean.outputs
    assert torch.equal(differs.any(dim=1), differs.all(dim=1))
    return differs.all(dim=1)


def test_position_i_is_known_after_i_loops_and_right_from_then_on():
    batch = TASK.sample(20, batch_size=200, generator=torch.Generator().manual_seed(0))
    trace = PROGRAM.trace(batch.inputs, n_loops=21)
    right = TASK.carry_in(batch)
    position = torch.arange(21)
    for t in range(22):
        carry = trace.variables["carry"][t]
        assert torch.equal(carry != UNKNOWN, (position <= t).expand_as(carry))
        assert torch.equal(carry[:, : t + 1], right[:, : t + 1])
        assert torch.equal(trace.outputs[t] == UNKNOWN, carry == UNKNOWN)


def test_a_carry_changed_behind_the_front_is_held_and_touches_nothing_else():
    for loop in (6, 9):
        differs = changed_outputs(loop)
        assert differs[loop:, 5].all()
        assert not differs[:, [i for i in range(13) if i != 5]].any()


def test_a_carry_changed_at_the_front_is_taken_over_by_the_whole_chain():
    differs = changed_outputs(5)
    for t in range(5, 14):
        assert differs[t].nonzero().flatten().tolist() == list(range(5, min(t, 12) + 1))


def test_a_carry_set_ahead_of_the_front_counts_as_known_and_starts_a_front_of_its_own():
    differs = changed_outputs(2)
    assert differs[2].nonzero().flatten().tolist() == [5]
    assert differs[3].nonzero().flatten().tolist() == [5, 6]
