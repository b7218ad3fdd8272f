"""Equivalence of programs: against plain Python, and programs that are laid over themselves."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from itertools import product
from operator import and_

import pytest
import torch

from loopinterp.errors import InputError
from loopinterp.rasp import (
    Linear,
    LoopProgram,
    full,
    get_program,
    list_programs,
    shift_right,
    tokens,
    var,
)
from loopinterp.rasp.language import eq
from loopinterp.rasp.mutations import equivalence
from loopinterp.rasp.mutations.of_storage import negated
from loopinterp.rasp.mutations.program_equivalence import (
    EXAMPLES,
    INTERVENTIONS,
    SCREENED,
    every_input,
    inputs_of,
    told_apart,
)
from loopinterp.rasp.mutations.rewriting import after_a_step, at_the_start, changed
from loopinterp.rasp.program_alignment import Alignment, alignments, delayed
from loopinterp.rasp.programs.addition_tokens import INPUTS, generate, propagate
from loopinterp.tasks import Addition
from tests.rasp.planted_carries import HOLDS, simulated

pytestmark = pytest.mark.usefixtures("quick")

RIPPLE = get_program("ripple")


@pytest.mark.parametrize("name", list_programs())
def test_every_program_is_itself(name):
    program = get_program(name)
    found = told_apart(program, program, Alignment(), lengths=(3,), interventions=SCREENED)
    assert found.equivalent
    assert found.interventions["changes"].any() or name == "unique_set"


@pytest.mark.parametrize(
    "name", ["ripple_held_2", "ripple_held_by_token", "ripple_held_until_kill", "sticky_ripple"]
)
def test_what_tells_a_held_ripple_from_the_plain_one_is_what_plain_python_says(name):
    n, n_loops = 4, 3
    found = told_apart(get_program("ripple"), get_program(name), Alignment(), lengths=(n,))
    assert found.natural_share == 0
    inputs = inputs_of(Addition(), (n,), EXAMPLES, seed=0).inputs.tolist()
    natural = [simulated("ripple", x, n_loops=n_loops) for x in inputs]
    columns = ("base", "source", "position", "loop", "changes", "differ")
    rows = list(zip(*(found.interventions[column].tolist() for column in columns)))
    assert len(rows) == min(INTERVENTIONS, len(inputs) * n * (n_loops + 1))
    for base, source, position, loop, changes, differ in rows:
        x = inputs[base]
        assert x[position] == inputs[source][position]
        value = natural[source][loop][position]
        plain, held = (
            taken(rule, x, natural[base][loop], value, position, loop) for rule in ("ripple", name)
        )
        assert differ == (plain != held)
        assert changes == (plain != natural[base][loop:] or held != natural[base][loop:])
    assert 0 < sum(row[-1] for row in rows) < sum(row[-2] for row in rows)


def test_every_intervention_is_each_other_state_that_a_token_comes_to_at_a_position():
    n, program = 3, get_program("ripple_held_2")
    found = told_apart(RIPPLE, program, Alignment(), lengths=(n,), interventions=None)
    n_loops = program.n_loops(n)
    batch = every_input(Addition(), n)
    assert batch.inputs[:, 1:].tolist() == [list(x) for x in product(range(4), repeat=n)]
    assert torch.equal(batch.targets, Addition().targets(batch.inputs))
    each = RIPPLE.trace(batch.inputs, n_loops), program.trace(batch.inputs, n_loops)

    def state(row, position, loop):
        values = (int(x[loop, row, position]) for of in each for x in of.variables.values())
        return (int(batch.inputs[row, position]), *values)

    def states(rows, position):
        return {state(row, position, loop) for row in rows for loop in range(n_loops + 1)}

    rows = range(len(batch))
    wanted = {
        (base, position, loop, given)
        for position in range(1, n + 1)
        for given in states(rows, position)
        for base, loop in product(rows, range(n_loops + 1))
        if given[0] == batch.inputs[base, position] and given != state(base, position, loop)
    }
    columns = ("base", "position", "loop", "source", "source_loop")
    made = [
        (base, position, loop, state(source, position, source_loop))
        for base, position, loop, source, source_loop in zip(
            *(found.interventions[column].tolist() for column in columns)
        )
    ]
    assert len(made) == len(wanted) and {*made} == wanted
    assert found.exhaustive and not found.equivalent


def test_a_program_that_errs_on_one_input_is_told_apart_by_all_interventions():
    exception = [eq(shift_right(tokens, k), token) for k, token in enumerate((1, 2, 1, 1, 2))]
    step = RIPPLE.step["carry"] & ~reduce(and_, exception)
    other = changed(RIPPLE, "excepted", step={"carry": step})
    assert equivalence(RIPPLE, other, lengths=(5,), interventions=128).equivalent
    found = equivalence(RIPPLE, other, lengths=(5,), interventions=None)
    assert not found.equivalent and found.share < 0.01


def test_more_inputs_than_can_be_tried_are_refused():
    with pytest.raises(InputError, match="16,384"):
        equivalence("ripple", "ripple", lengths=(8,), interventions=None)


def taken(name, tokens, carries, value, position, loop, n_loops=3):
    """The carries from a loop on, with one value of another run, in plain Python."""
    carry = list(carries)
    carry[position] = value
    since = [0] * len(tokens)
    history = [list(carry)]
    for _ in range(n_loops - loop):
        out = [int(t == 3 or (t in (1, 2) and c)) for t, c in zip(tokens, carry)]
        for i in range(1, len(tokens)):
            since[i] = 0 if out[i - 1] else since[i] + 1
            hold = HOLDS[name](tokens[i], tokens[i - 1])
            carry[i] = int(out[i - 1] or (carry[i] and since[i] < hold))
        history.append(list(carry))
    return history


def carries_out():
    """The ripple, with the carry OUT of each position as its variable."""
    carry = var("carry")
    return LoopProgram(
        name="carries_out",
        task="addition",
        inputs=INPUTS,
        prepare={"carry": full(0)},
        step={"carry": generate | (propagate & shift_right(carry))},
        finish=propagate ^ shift_right(carry),
        n_loops=Linear(offset=-1),
    )


def test_a_program_is_found_a_loop_ahead_a_position_to_the_left_or_with_late_answers():
    ahead = changed(RIPPLE, "ahead", prepare={"carry": at_the_start(RIPPLE.step["carry"], RIPPLE)})
    assert after_a_step(var("carry"), RIPPLE) == RIPPLE.step["carry"]
    for other, laid in (
        (ahead, Alignment(shift=1)),
        (carries_out(), Alignment(offset=-1)),
        (delayed(RIPPLE, 1), Alignment(lag=1)),
    ):
        assert not told_apart(RIPPLE, other, Alignment()).equivalent
        if laid in alignments():
            found = equivalence(RIPPLE, other)
            assert found.equivalent
            assert found.laid == laid
    assert equivalence(carries_out(), RIPPLE).laid == Alignment(offset=1)


def test_a_negated_carry_is_equivalent_and_a_held_one_is_not_for_every_seed():
    for seed in range(3):
        assert equivalence(RIPPLE, negated(RIPPLE, "carry"), seed=seed).equivalent
        assert not equivalence(RIPPLE, "ripple_held_2", seed=seed).equivalent


def test_an_undecided_answer_at_the_end_is_no_equivalence():
    # With answers a loop late, one shot has decided nothing after its only loop.
    assert not told_apart(
        get_program("one_shot"), get_program("one_shot"), Alignment(lag=1)
    ).equivalent


def test_programs_of_different_tasks_are_refused():
    with pytest.raises(InputError, match="a program of addition"):
        equivalence("ripple", "parity")


def test_programs_that_take_no_loop_are_compared_where_they_begin():
    at_once = replace(get_program("carry_save"), name="at_once", n_loops=Linear(slope=0))
    found = equivalence(at_once, at_once)
    assert found.equivalent and found.laid == Alignment()
    with pytest.raises(InputError, match="lengths: expected at least one"):
        equivalence(at_once, at_once, lengths=())
