"""Expressions exchanged in programs: against traces, which know what comes after a step."""

from __future__ import annotations

import pytest
import torch

from loopinterp.rasp import (
    aggregate,
    evaluate,
    get_program,
    indices,
    list_programs,
    select,
    shift_right,
    tokens,
    var,
)
from loopinterp.rasp.expr import Select
from loopinterp.rasp.mutations.rewriting import (
    after_a_step,
    at_the_start,
    changed,
    reads_of_other_positions,
    substituted,
)
from loopinterp.rasp.programs.copy_shift import program as copy


def test_all_occurrences_are_exchanged_at_once():
    x, y = var("x"), var("y")
    assert substituted(x & (y | x), {x: y, y: x}) == y & (x | y)
    assert substituted(shift_right(x, 2, default=7), {x: tokens}) == shift_right(
        tokens, 2, default=7
    )
    assert substituted(x, {y: x}) is x


def test_a_selection_that_changes_loses_its_name_and_others_keep_theirs():
    both = aggregate(select(indices, var("at"), "==", name="next"), tokens)
    moved = substituted(both, {var("at"): var("at") + 1})
    assert moved.children[0] == select(indices, var("at") + 1, "==")
    kept = substituted(both, {tokens: indices}).children[0]
    assert isinstance(kept, Select)
    assert kept.name == "next"


@pytest.mark.parametrize("name", list_programs())
def test_an_answer_after_a_step_and_at_the_start_is_what_the_trace_says(name):
    program = get_program(name)
    g = torch.Generator().manual_seed(0)
    x = torch.randint(len(program.inputs), (20, 7), generator=g)
    trace = program.trace(x, 3)
    assert torch.equal(evaluate(at_the_start(program.finish, program), x), trace.outputs[0])
    for loop in range(3):
        state = {v: values[loop] for v, values in trace.variables.items()}
        ahead = evaluate(after_a_step(program.finish, program), x, state)
        assert torch.equal(ahead, trace.outputs[loop + 1])


def test_reads_are_the_outermost_ones_that_see_variables():
    [read] = reads_of_other_positions(copy)
    assert read == shift_right(var("symbol"))
    assert len(reads_of_other_positions(get_program("lookahead"))) == 2
    nested = {"carry": shift_right(shift_right(var("carry"))) | shift_right(tokens)}
    program = changed(get_program("ripple"), "nested", step=nested)
    assert reads_of_other_positions(program) == [shift_right(shift_right(var("carry")))]
