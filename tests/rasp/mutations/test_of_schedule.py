"""Mutations of the schedule, against the original's own trace at other loops."""

from __future__ import annotations

import pytest
import torch

from loopinterp.rasp import get_program, list_programs
from loopinterp.rasp.mutations.conditions import at_tokens
from loopinterp.rasp.mutations.of_schedule import (
    answers_ahead,
    answers_by_the_larger,
    every_other_loop,
    several_steps,
    worked_out_from_before,
)
from loopinterp.rasp.mutations.rewriting import ALWAYS, reads_of_other_positions

pytestmark = pytest.mark.usefixtures("quick")


def some_inputs(program):
    g = torch.Generator().manual_seed(0)
    return torch.randint(len(program.inputs), (30, 8), generator=g)


@pytest.mark.parametrize("name", list_programs())
def test_each_schedule_is_the_originals_trace_at_other_loops(name):
    program = get_program(name)
    x = some_inputs(program)
    outputs = program.trace(x, 12).outputs
    for steps in (2, 3):
        fast = several_steps(program, steps, ALWAYS).trace(x, 4).outputs
        assert torch.equal(fast, outputs[: 4 * steps + 1 : steps])
    slow = every_other_loop(program, ALWAYS).trace(x, 6).outputs
    assert torch.equal(slow, outputs[[0, 1, 1, 2, 2, 3, 3]])
    assert torch.equal(answers_ahead(program).trace(x, 6).outputs, outputs[1:8])


@pytest.mark.parametrize("name", list_programs())
def test_left_alone_what_is_worked_out_from_before_is_the_original(name):
    program = get_program(name)
    x = some_inputs(program)
    outputs = program.trace(x, 6).outputs
    for read in reads_of_other_positions(program):
        for when in (ALWAYS, at_tokens(program, [1])):
            mutated = worked_out_from_before(program, read, when)
            assert torch.equal(mutated.trace(x, 6).outputs, outputs)


def test_a_change_reaches_others_a_loop_later_and_two_positions_further():
    program = get_program("prefix_xor")
    [read] = reads_of_other_positions(program)
    mutated = worked_out_from_before(program, read, ALWAYS)
    x = torch.tensor([[2, 0, 0, 0, 0, 0]])
    state = {name: values[3] for name, values in mutated.trace(x, 3).variables.items()}
    state["prefix"][0, 1] = 1
    after = mutated.run(x, n_loops=6, start_at_loop=3, variables=state).variables["prefix"][:, 0]
    assert [row.nonzero()[:, 0].tolist() for row in after] == [[1], [], [3], []]


def test_the_answer_reads_the_larger_of_two_loops():
    program = get_program("prefix_xor")
    x = some_inputs(program)
    outputs = program.trace(x, 6).outputs
    both = answers_by_the_larger(program, "prefix").trace(x, 6).outputs
    assert torch.equal(both[1:], torch.maximum(outputs[1:], outputs[:-1]))
