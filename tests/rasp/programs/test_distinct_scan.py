"""Distinct symbols: after t loops, those among the first t."""

from __future__ import annotations

import torch

from loopinterp.rasp import get_program
from loopinterp.rasp.programs.distinct_scan import unique_set
from loopinterp.tasks import UniqueSet


def test_after_t_loops_the_distinct_ones_of_the_first_t_symbols_are_in_place():
    task = UniqueSet()
    for distribution in task.distributions:
        g = torch.Generator().manual_seed(0)
        batch = task.sample(9, batch_size=30, generator=g, distribution=distribution)
        outputs = get_program("unique_set").trace(batch.inputs, n_loops=11).outputs
        for row, tokens in enumerate(batch.inputs.tolist()):
            for t in range(12):
                distinct = list(dict.fromkeys(tokens[1 : min(t, 9) + 1]))
                room = len(tokens) - 10
                assert outputs[t, row, 10:].tolist() == (distinct + [50] * room)[:room]


def test_another_alphabet_has_a_program_of_its_own():
    batch = UniqueSet(n_symbols=3).sample(
        6, batch_size=20, generator=torch.Generator().manual_seed(0)
    )
    outputs = unique_set(3).trace(batch.inputs, n_loops=6).outputs[-1]
    assert torch.equal(outputs[:, 7:], batch.targets[:, 7:])
