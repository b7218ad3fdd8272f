"""Ripples that hold a carry: plain ripples left alone, each with its own life of a planted one."""

from __future__ import annotations

import itertools

import pytest
import torch

from loopinterp.errors import InputError
from loopinterp.rasp import Intervention, get_program
from loopinterp.rasp.programs.held_ripple import FOR_EVER, held_ripple, programs
from loopinterp.tasks import Addition, carry_pairs
from tests.rasp.programs.inputs import every_input

TASK = Addition()
HOLDS = {
    "ripple": lambda token, left: 1,
    "ripple_held_2": lambda token, left: 2,
    "ripple_held_3": lambda token, left: 3,
    "ripple_held_by_token": lambda token, left: {1: 2, 2: 3}.get(token, 1),
    "ripple_held_where_propagating": lambda token, left: 99 if token in (1, 2) else 1,
    "ripple_held_until_kill": lambda token, left: 1 if left in (0, 4) else 99,
    "sticky_ripple": lambda token, left: 99,
}
"""Loops that a carry lives without support, by the position's token and its left neighbour's."""


def simulated(name, tokens, *, n_loops, plant=None):
    """The carries of every loop in plain Python; ``plant`` = (loop, position) puts one in."""
    carry, last_supported = [0] * len(tokens), [-99] * len(tokens)
    history = []
    for loop in range(n_loops + 1):
        if loop:
            out = [int(t == 3 or (t in (1, 2) and c)) for t, c in zip(tokens, carry)]
            for i in range(1, len(tokens)):
                if out[i - 1]:
                    last_supported[i] = loop
                hold = HOLDS[name](tokens[i], tokens[i - 1])
                carry[i] = int(out[i - 1] or (carry[i] and loop - last_supported[i] < hold))
        if plant is not None and plant[0] == loop:
            carry[plant[1]], last_supported[plant[1]] = 1, loop
        history.append(list(carry))
    return history


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


def test_a_sticky_carry_put_in_stays_and_runs_on_and_one_taken_out_comes_back():
    g, program = torch.Generator().manual_seed(0), get_program("sticky_ripple")
    x = carry_pairs(
        12, position=5, chain_length=1, batch_size=50, generator=g, propagate_after=7
    ).base.inputs
    clean = program.trace(x, n_loops=13)
    mask = torch.zeros_like(x, dtype=torch.bool)
    mask[:, 5] = True
    has_carry = clean.variables["carry"][-1][:, 5].bool()
    assert has_carry.any() and not has_carry.all()
    flipped = 1 - clean.variables["carry"][6]
    patched = program.run(x, n_loops=13, interventions=[Intervention("carry", 6, flipped, mask)])
    differs = patched.outputs != clean.outputs
    for t in range(6, 14):
        planted = differs[t][~has_carry].nonzero()[:, 1].unique().tolist()
        assert planted == list(range(5, min(5 + t - 6, 12) + 1))
        erased = differs[t][has_carry].nonzero()[:, 1].unique().tolist()
        assert erased == ([5] if t == 6 else [])


def test_a_late_ripple_is_the_plain_one_two_loops_later():
    inputs = every_input(TASK, 5).inputs
    late, plain = (
        get_program(name).trace(inputs, 8).variables["carry"] for name in ("late_ripple", "ripple")
    )
    assert torch.equal(late[2:], plain[:-2])
    assert not late[:2].any()


@pytest.mark.parametrize("hold", [0, -1, True, {1: 0}])
def test_a_hold_below_one_loop_is_refused(hold):
    with pytest.raises(InputError, match="at least 1 loop"):
        held_ripple("none", hold, doc="No.")
    assert held_ripple("ever", FOR_EVER, doc="Ever.").variables == ("carry",)
