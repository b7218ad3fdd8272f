"""Ripples that hold a carry: plain ripples left alone, each with its own life of a planted one."""

from __future__ import annotations

import itertools

import pytest
import torch

from loopinterp.errors import InputError
from loopinterp.rasp import Intervention, get_program
from loopinterp.rasp.programs.held_ripple import FOR_EVER, held_ripple, programs
from loopinterp.tasks import Addition
from tests.rasp.planted_carries import HOLDS, simulated
from tests.rasp.programs.inputs import every_input

TASK = Addition()


@pytest.mark.parametrize("program", programs, ids=lambda p: p.name)
def test_left_alone_it_does_what_the_plain_ripple_does_at_every_loop(program):
    for n in (1, 2, 5):
        inputs = every_input(TASK, n).inputs
        plain = get_program("ripple").trace(inputs, n + 1)
        mine = program.trace(inputs, n + 1)
        assert torch.equal(mine.variables["carry"], plain.variables["carry"])
        assert torch.equal(mine.outputs, plain.outputs)
        assert not mine.variables.get("age", torch.zeros(1)).any()


@pytest.mark.parametrize("name", HOLDS)
def test_a_carry_taken_whole_from_where_it_is_supported_lives_as_plain_python_says(name):
    program, n, n_loops = get_program(name), 5, 9
    inputs = every_input(TASK, n).inputs
    donors = program.trace(inputs, n_loops).variables
    for position, loop in itertools.product((2, 4), (1, 3)):
        # A donor with the same token there and a carry; the same one for all of that token.
        donor = {
            int(inputs[row, position]): row
            for row in donors["carry"][loop, :, position].nonzero()[:, 0].tolist()
        }
        base = inputs[[int(t) in donor for t in inputs[:, position]]]
        rows = [donor[int(t)] for t in base[:, position]]
        state = program.trace(base, loop).variables
        planted = {v: x[loop].clone() for v, x in state.items()}
        for v, x in planted.items():
            x[:, position] = donors[v][loop, rows, position]
        run = program.run(base, n_loops=n_loops, start_at_loop=loop, variables=planted)
        for row in range(0, len(base), 7):
            expected = simulated(name, base[row].tolist(), n_loops=n_loops, plant=(loop, position))
            assert run.variables["carry"][:, row].tolist() == expected[loop:]


@pytest.mark.parametrize("hold", [1, 2, 3, 5])
def test_a_carry_that_nothing_feeds_lives_exactly_its_hold(hold):
    program = held_ripple(f"held_{hold}", hold, doc="Held.")
    tokens = torch.tensor([[4, 0, 0, 0, 0]])
    planted = {name: torch.zeros_like(tokens) for name in program.variables}
    planted["carry"][0, 3] = 1
    run = program.run(tokens, n_loops=8, variables=planted)
    assert run.variables["carry"][:, 0, 3].tolist() == [1] * hold + [0] * (9 - hold)


def test_a_reset_takes_the_age_with_the_carry():
    # The sum bit of a planted carry at a propagating bit is 0: it is taken back at once.
    answers_0 = ~get_program("ripple").finish
    program = held_ripple("held_3_reset", 3, reset=answers_0, doc="Held, and reset.")
    tokens, carry = torch.tensor([[4, 0, 1, 0]]), torch.tensor([[0, 0, 1, 0]])
    run = program.run(tokens, n_loops=3, interventions=[Intervention("carry", 0, carry)])
    assert run.variables["carry"][:, 0, 2].tolist() == [1, 0, 0, 0]
    assert not run.variables["age"][:, 0, 2].any()


@pytest.mark.parametrize("program", programs, ids=lambda p: p.name)
def test_a_carry_that_is_taken_away_is_filled_in_again_at_once(program):
    tokens = torch.tensor([[4, 3, 1, 1, 2, 0]])
    clean = program.trace(tokens, 9).variables["carry"]
    assert clean[5, 0].tolist() == [0, 0, 1, 1, 1, 1]
    taken = clean[5].clone()
    taken[0, 3] = 0
    run = program.run(tokens, n_loops=9, interventions=[Intervention("carry", 5, taken)])
    erased = (run.variables["carry"] != clean)[:, 0]
    assert erased[5].nonzero().tolist() == [[3]]
    # The neighbour loses its support for one loop: a ripple that holds it does not notice.
    holds = HOLDS[program.name](2, 1) > 1
    assert erased[6].nonzero().tolist() == ([] if holds else [[4]])
    assert not erased[6:, 3].any()


def test_a_late_ripple_is_the_plain_one_two_loops_later():
    inputs = every_input(TASK, 5).inputs
    late, plain = (
        get_program(name).trace(inputs, 8).variables["carry"] for name in ("late_ripple", "ripple")
    )
    assert torch.equal(late[2:], plain[:-2])
    assert not late[:2].any()


@pytest.mark.parametrize("hold", [0, -1, True, {1: 0}])
def test_a_hold_below_one_loop_is_refused(hold):
    with pytest.raises(InputError, match="an integer >= 1"):
        held_ripple("none", hold, doc="No.")
    assert held_ripple("ever", FOR_EVER, doc="Ever.").variables == ("carry",)
