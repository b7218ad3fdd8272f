"""Mutations of one variable: against stock programs that were written by hand."""

from __future__ import annotations

import pytest
import torch

from loopinterp.errors import InputError
from loopinterp.rasp import Intervention, get_program
from loopinterp.rasp.mutations import equivalence
from loopinterp.rasp.mutations.conditions import at_tokens, once_settled
from loopinterp.rasp.mutations.of_a_variable import (
    delayed,
    forgetting,
    held,
    held_for_ever,
    kept_or_computed,
    kept_shorter,
    only_falls,
    only_grows,
    reading_old,
    recomputed,
)
from loopinterp.rasp.mutations.rewriting import ALWAYS
from tests.rasp.programs.inputs import every_input, task_of

pytestmark = pytest.mark.usefixtures("quick")

RIPPLE, STICKY = get_program("ripple"), get_program("sticky_ripple")
PROPAGATING = at_tokens(RIPPLE, [1, 2])


@pytest.mark.parametrize(
    ("mutated", "stock"),
    [
        (only_grows(RIPPLE, "carry", ALWAYS), "sticky_ripple"),
        (only_grows(RIPPLE, "carry", PROPAGATING), "ripple_held_where_propagating"),
        (kept_shorter(STICKY, "carry", ALWAYS, loops=1), "ripple_held_2"),
        (kept_shorter(STICKY, "carry", ALWAYS, loops=2), "ripple_held_3"),
        (held(RIPPLE, "carry", ALWAYS, loops=1), "ripple"),
    ],
    ids=lambda x: getattr(x, "name", x),
)
def test_mutations_of_ripples_are_the_programs_written_by_hand(mutated, stock):
    assert equivalence(mutated, stock).equivalent
    assert equivalence(stock, mutated).equivalent


def planted(program, *, n_loops=8):
    """The carries of a run of zeros in which one is put into position 3 after 5 loops."""
    tokens = torch.tensor([[4, 0, 0, 0, 0]])
    carry = torch.tensor([[0, 0, 0, 1, 0]])
    run = program.run(tokens, n_loops=5 + n_loops, interventions=[Intervention("carry", 5, carry)])
    return run.variables["carry"][5:, 0, 3].tolist()


def test_a_planted_carry_lives_as_the_mutation_says():
    settled = once_settled(RIPPLE, 0)
    lives = {
        held(RIPPLE, "carry", settled, loops=2): [1, 1, 0, 0, 0],
        held(RIPPLE, "carry", settled, loops=3): [1, 1, 1, 0, 0],
        held(RIPPLE, "carry", settled & PROPAGATING, loops=3): [1, 0, 0, 0, 0],
        held_for_ever(RIPPLE, "carry", settled): [1, 1, 1, 1, 1],
        only_falls(RIPPLE, "carry", settled): [1, 0, 0, 0, 0],
        forgetting(RIPPLE, "carry", settled): [1, 0, 0, 0, 0],
    }
    for program, life in lives.items():
        assert planted(program)[:5] == life, program.name


def test_what_is_delayed_comes_a_loop_later():
    inputs = every_input(task_of(RIPPLE), 4).inputs
    plain = RIPPLE.trace(inputs, 1).variables["carry"]
    late = delayed(RIPPLE, "carry", ALWAYS).trace(inputs, 2).variables["carry"]
    assert torch.equal(late[1], plain[0])
    assert torch.equal(late[2], plain[1])


def test_others_see_the_old_value_and_a_position_its_own():
    program = reading_old(get_program("carry_save"), "carry", ALWAYS)
    inputs = every_input(task_of(program), 3).inputs
    carry, total = (program.trace(inputs, 3).variables[v] for v in ("carry", "sum"))
    for loop in (1, 2):
        arriving = carry[loop - 1].roll(1, dims=1)
        arriving[:, 0] = 0
        assert torch.equal(total[loop + 1], total[loop] ^ arriving)


def test_what_is_recomputed_does_not_keep_a_change():
    program = get_program("one_shot")
    x = every_input(task_of(program), 3).inputs
    wrong = [Intervention("last", 1, torch.zeros_like(x))]
    kept = program.run(x, n_loops=3, interventions=wrong).variables["last"]
    mended = recomputed(program, "last", ALWAYS).run(x, n_loops=3, interventions=wrong)
    assert not torch.equal(kept[2], kept[0])
    assert torch.equal(mended.variables["last"][2], kept[0])


def test_only_what_is_kept_at_times_can_be_kept_shorter():
    kept = {
        (name, v)
        for name in ("ripple", "sticky_ripple", "latched_ripple", "copy", "token_addition")
        for v in get_program(name).step
        if kept_or_computed(get_program(name), v)
    }
    assert kept == {
        ("sticky_ripple", "carry"),
        ("latched_ripple", "carry"),
        ("copy", "symbol"),
        ("token_addition", "pair"),
    }
    with pytest.raises(InputError, match="kept at some positions"):
        kept_shorter(RIPPLE, "carry", ALWAYS, loops=2)
