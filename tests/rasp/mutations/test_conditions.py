"""When mutations act."""

from __future__ import annotations

import torch

from loopinterp.rasp import evaluate, full, get_program, var
from loopinterp.rasp.mutations.conditions import at_tokens, lateness, once_settled
from loopinterp.rasp.mutations.rewriting import ALWAYS, changed
from loopinterp.tasks import Addition
from tests.rasp.programs.inputs import every_input, task_of

RIPPLE = get_program("ripple")


def test_once_settled_holds_from_loop_i_plus_lateness_on():
    for late in (-2, 0, 3):
        when = once_settled(RIPPLE, late)
        program = changed(RIPPLE, "x", when, finish=when.holds)
        holds = program.trace(torch.zeros(1, 5, dtype=torch.int64), 8).outputs[:, 0]
        for loop, row in enumerate(holds.tolist()):
            assert row == [int(loop >= i + late) for i in range(5)]


def test_lateness_is_the_latest_change_of_any_variable_after_its_position():
    for name in ("ripple", "copy", "parity", "late_ripple", "one_shot"):
        program = get_program(name)
        inputs = every_input(task_of(program), 3).inputs
        found = lateness(program, inputs, n_loops=12)
        trace = program.trace(inputs, 12).variables
        slowest = -99
        for values in (trace[v] for v in program.step):
            for position in range(inputs.shape[1]):
                history = values[:, :, position].tolist()
                last = max((t for t in range(1, 13) if history[t] != history[t - 1]), default=0)
                slowest = max(slowest, last - position)
        assert found == slowest, name


def test_conditions_are_joined_and_choose():
    settled, tokens = once_settled(RIPPLE, 1), at_tokens(RIPPLE, [3])
    both = settled & tokens
    assert both.label == "once settled at a=1 b=1"
    assert (ALWAYS & tokens).holds == tokens.holds
    assert (ALWAYS & ALWAYS).holds is None
    x = Addition().encode([(3, 2)], n=2).inputs
    assert x.tolist() == [[4, 1, 3]]
    [countdown] = settled.prepare
    for left, expected in (([0, 0, 0], [8, 8, 7]), ([0, 0, 1], [8, 8, 8])):
        chosen = evaluate(both.choose(full(7), full(8)), x, {countdown: torch.tensor([left])})
        assert chosen.tolist() == [expected]
    assert ALWAYS.choose(var("carry"), full(0)) == var("carry")


def test_a_label_lists_few_tokens():
    program = get_program("unique_set")
    assert at_tokens(program, range(5)).label == "at s0, s1, s2 and 2 more"
