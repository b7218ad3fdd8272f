"""The latched chains: every chain is filled at the same time, and what is known is held."""

from __future__ import annotations

import torch

from loopinterp.rasp import UNKNOWN, Intervention, get_program
from loopinterp.tasks import Addition
from tests.rasp.programs.inputs import chains_through_bit_4

TASK, PROGRAM = Addition(), get_program("latched_chain")


def test_a_carry_fed_by_a_chain_of_k_is_known_after_k_plus_1_loops_and_right_from_then_on():
    batch = TASK.sample(20, batch_size=200, generator=torch.Generator().manual_seed(0))
    trace = PROGRAM.trace(batch.inputs, n_loops=21)
    right, known_at = TASK.carry_in(batch), TASK.chain_length_in(batch) + 1
    known_at[:, 0] = 0  # BOS
    for t in range(22):
        carry = trace.variables["carry"][t]
        assert torch.equal(carry != UNKNOWN, known_at <= t)
        assert torch.equal(carry[known_at <= t], right[known_at <= t])
        assert torch.equal(trace.outputs[t] == UNKNOWN, carry == UNKNOWN)
    assert torch.equal(trace.settled("carry"), known_at)


def test_what_is_known_is_held_and_only_the_front_passes_a_change_on():
    x = chains_through_bit_4(last=11)
    clean = PROGRAM.trace(x, n_loops=13)
    mask = torch.zeros_like(x, dtype=torch.bool)
    mask[:, 5] = True
    flipped = 1 - clean.variables["carry"][-1]
    for loop, reach in ((2, 13), (3, 6), (8, 6)):  # known after 2 loops, right neighbour after 3
        patched = PROGRAM.run(
            x, n_loops=13, interventions=[Intervention("carry", loop, flipped, mask)]
        )
        differs = (patched.outputs != clean.outputs).all(dim=1)
        assert differs[-1].nonzero().flatten().tolist() == list(range(5, reach))
        assert differs[loop].nonzero().flatten().tolist() == [5]


def test_it_differs_from_the_front_from_bos_before_the_end_and_not_at_the_end():
    batch = TASK.sample(16, batch_size=64, generator=torch.Generator().manual_seed(1))
    mine = PROGRAM.trace(batch.inputs, n_loops=16).outputs
    other = get_program("latched_ripple").trace(batch.inputs, n_loops=16).outputs
    assert torch.equal(mine[-1], other[-1])
    known, other_known = mine != UNKNOWN, other != UNKNOWN
    assert (known | ~other_known).all()
    assert (known[1:8] & ~other_known[1:8]).flatten(1).any(dim=1).all()
