"""The sticky ripple: the plain ripple's trace, but a carry put in by hand stays."""

from __future__ import annotations

import torch

from loopinterp.rasp import Intervention, get_program
from loopinterp.tasks import Addition
from tests.rasp.programs.inputs import chains_through_bit_4

TASK, PROGRAM = Addition(), get_program("sticky_ripple")


def test_left_alone_it_does_what_the_plain_ripple_does():
    batch = TASK.sample(20, batch_size=200, generator=torch.Generator().manual_seed(0))
    mine = PROGRAM.trace(batch.inputs, n_loops=21)
    plain = get_program("ripple").trace(batch.inputs, n_loops=21)
    assert torch.equal(mine.variables["carry"], plain.variables["carry"])


def test_a_carry_put_in_stays_and_runs_on_and_one_taken_out_comes_back():
    x = chains_through_bit_4(last=10)
    clean = PROGRAM.trace(x, n_loops=13)
    mask = torch.zeros_like(x, dtype=torch.bool)
    mask[:, 5] = True
    has_carry = clean.variables["carry"][-1][:, 5].bool()
    assert has_carry.any() and not has_carry.all()
    flipped = 1 - clean.variables["carry"][6]
    patched = PROGRAM.run(x, n_loops=13, interventions=[Intervention("carry", 6, flipped, mask)])
    differs = patched.outputs != clean.outputs
    for t in range(6, 14):
        planted = differs[t][~has_carry].nonzero()[:, 1].unique().tolist()
        assert planted == list(range(5, min(5 + t - 6, 12) + 1))
        erased = differs[t][has_carry].nonzero()[:, 1].unique().tolist()
        assert erased == ([5] if t == 6 else [])
