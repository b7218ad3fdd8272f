"""One shot: every carry at once, read where a bit last decided one by itself."""

from __future__ import annotations

import torch

from loopinterp.rasp import UNKNOWN, Intervention, get_program
from loopinterp.tasks import Addition

TASK, PROGRAM = Addition(), get_program("one_shot")


def test_every_carry_is_unknown_before_the_loop_and_right_after_it():
    batch = TASK.sample(40, batch_size=100, generator=torch.Generator().manual_seed(0))
    trace = PROGRAM.trace(batch.inputs, n_loops=3)
    assert (trace.variables["carry"][0] == UNKNOWN).all()
    for t in (1, 2, 3):
        assert torch.equal(trace.variables["carry"][t], TASK.carry_in(batch))


def test_a_carry_looks_past_its_whole_chain_and_at_nothing_else():
    batch = TASK.sample(20, batch_size=50, generator=torch.Generator().manual_seed(0))
    trace = PROGRAM.trace(batch.inputs, n_loops=1)
    start = torch.arange(21) - 1 - TASK.chain_length_in(batch)
    start[:, 0] = 0
    looks_at = trace.selectors["chain_start"][0]
    assert (looks_at.sum(dim=-1) == 1).all()
    assert torch.equal(looks_at.long().argmax(dim=-1), start.clamp(min=0))


def test_a_changed_carry_is_mended_in_the_next_loop_and_changes_no_other():
    batch = TASK.sample(9, batch_size=50, generator=torch.Generator().manual_seed(0))
    clean = PROGRAM.trace(batch.inputs, n_loops=3)
    flipped = Intervention("carry", 2, 1 - clean.variables["carry"][2])
    patched = PROGRAM.run(batch.inputs, n_loops=3, interventions=[flipped])
    assert (patched.outputs[2] != clean.outputs[2]).all()
    assert torch.equal(patched.outputs[3], clean.outputs[3])
