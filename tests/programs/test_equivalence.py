"""Equivalence of programs: against plain Python, and programs compared with themselves."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from itertools import product
from operator import and_

import pytest
import torch

from loopinterp.core.errors import InputError
from loopinterp.programs import (
    Linear,
    LoopProgram,
    equivalence,
    full,
    get_program,
    list_programs,
    shift_right,
    tokens,
    var,
)
from loopinterp.programs.addition_programs import _INPUTS, generate, propagate
from loopinterp.programs.equivalence import (
    EXAMPLES,
    INTERVENTIONS,
    SCREENED,
    equivalence_at,
    every_input,
    inputs_of,
)
from loopinterp.programs.language import eq
from loopinterp.programs.mutations import (
    after_a_step,
    changed,
    forgotten_the_second_time,
    held_out_of_phase,
    negated,
    substituted,
)
from loopinterp.programs.paired_runs import PairedRuns, repeated_states
from loopinterp.programs.program import ProgramOffset, alignments, with_output_lag
from loopinterp.tasks import IGNORE, Addition
from tests.programs.injected_carries import HOLDS, simulated

pytestmark = pytest.mark.usefixtures("quick")

RIPPLE = get_program("ripple")


@pytest.mark.parametrize("name", list_programs())
def test_every_program_is_itself(name):
    program = get_program(name)
    comparison = equivalence_at(
        program, program, ProgramOffset(), lengths=(3,), interventions=SCREENED
    )
    assert comparison.equivalent
    assert comparison.interventions["changes"].any() or name == "unique_set"


@pytest.mark.parametrize(
    "name", ["ripple_held_2", "ripple_held_by_token", "ripple_held_until_kill", "sticky_ripple"]
)
def test_what_tells_a_held_ripple_from_the_plain_one_is_what_plain_python_says(name):
    n, n_loops = 4, 3
    comparison = equivalence_at(
        get_program("ripple"), get_program(name), ProgramOffset(), lengths=(n,)
    )
    assert comparison.natural_share == 0
    inputs = inputs_of(Addition(), (n,), EXAMPLES, seed=0).inputs.tolist()
    natural = [simulated("ripple", x, n_loops=n_loops) for x in inputs]
    of_first = ("source", "position", "loop", "source_loop")
    columns = ("base", *of_first, *(f"second_{name}" for name in of_first), "changes", "differ")
    rows = list(zip(*(comparison.interventions[column].tolist() for column in columns)))
    assert len(rows) == min(INTERVENTIONS, len(inputs) * (n + 1) * (n_loops + 1))
    for base, *first_and_second, changes, differ in rows:
        x, given = inputs[base], []
        for source, position, loop, source_loop in (first_and_second[:4], first_and_second[4:]):
            if loop >= 0:
                assert x[position] == inputs[source][position]
                given.append((loop, position, natural[source][source_loop][position]))
        first_loop = given[0][0]
        plain, held = (taken(rule, x, natural[base], given) for rule in ("ripple", name))
        assert differ == (plain != held)
        clean = natural[base][first_loop:]
        assert changes == (plain != clean or held != clean)
    assert 0 < sum(row[-1] for row in rows) < sum(row[-2] for row in rows)
    across = comparison.interventions["loop"] != comparison.interventions["source_loop"]
    assert 0.4 < across.mean() < 0.6
    assert 0.03 < (comparison.interventions["second_loop"] >= 0).mean() < 0.1


@pytest.mark.parametrize("name", ["ripple from one", "lookahead"])
def test_clean_runs_that_differ_are_counted(name):
    """By loop and input; before T(n) only where both decide."""
    begun = changed(RIPPLE, "from one", prepare={"carry": full(1)})
    other = begun if name == "ripple from one" else get_program(name)
    comparison = equivalence_at(RIPPLE, other, ProgramOffset(), lengths=(3,))
    batch, n_loops = inputs_of(Addition(), (3,), EXAMPLES, seed=0), other.n_loops(3)
    one, two = (x.trace(batch.inputs, n_loops).outputs.tolist() for x in (RIPPLE, other))
    differ = [
        any(
            x != y and (loop == n_loops or min(x, y) >= 0)
            for x, y, target in zip(one[loop][k], two[loop][k], batch.targets[k].tolist())
            if target != IGNORE
        )
        for loop in range(n_loops + 1)
        for k in range(len(batch))
    ]
    assert 0 < comparison.natural_share == sum(differ) / len(differ)
    assert not comparison.equivalent


def test_every_intervention_is_each_other_state_that_a_token_comes_to_at_a_position():
    n, program = 3, get_program("ripple_held_2")
    comparison = equivalence_at(RIPPLE, program, ProgramOffset(), lengths=(n,), interventions=None)
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
    expected = {
        (base, position, loop, given)
        for position in range(n + 1)
        for given in states(rows, position)
        for base, loop in product(rows, range(n_loops + 1))
        if given[0] == batch.inputs[base, position] and given != state(base, position, loop)
    }
    columns = ("base", "position", "loop", "source", "source_loop")
    interventions = [
        (base, position, loop, state(source, position, source_loop))
        for base, position, loop, source, source_loop in zip(
            *(comparison.interventions[column].tolist() for column in columns)
        )
    ]
    assert len(interventions) == len(expected) and {*interventions} == expected
    assert comparison.exhaustive and not comparison.equivalent


def test_a_program_that_errs_on_one_input_is_told_apart_by_all_interventions():
    exception = [eq(shift_right(tokens, k), token) for k, token in enumerate((1, 2, 1, 1, 2))]
    step = RIPPLE.step["carry"] & ~reduce(and_, exception)
    other = changed(RIPPLE, "excepted", step={"carry": step})
    assert equivalence(RIPPLE, other, lengths=(5,), interventions=128, exhaustive_to=0).equivalent
    comparison = equivalence(RIPPLE, other, lengths=(5,), interventions=None)
    assert not comparison.equivalent and comparison.share < 0.01


@pytest.mark.parametrize("name", ["ripple_held_2", "ripple_held_until_kill"])
def test_states_after_two_interchanges_are_those_of_every_two_one_by_one(name):
    n, held = 2, get_program(name)
    each = RIPPLE, held
    n_loops = 2
    batch = every_input(Addition(), n)
    runs = PairedRuns(RIPPLE, held, ProgramOffset(), batch, n_loops)
    counts, complete = repeated_states(runs, torch.Generator())
    clean = [p.trace(batch.inputs, n_loops).variables for p in each]

    def state(row, loop):
        return tuple(tuple(x[loop, row].tolist()) for of in clean for x in of.values())

    def step(row, values):
        after, k = [], 0
        for p in each:
            variables = {v: torch.tensor([values[k + j]]) for j, v in enumerate(p.variables)}
            k += len(variables)
            run = p.run(batch.inputs[row : row + 1], n_loops=1, variables=variables)
            after += [tuple(x[1, 0].tolist()) for x in run.variables.values()]
        return tuple(after)

    rows, loops = range(len(batch)), range(n_loops + 1)
    pool = {
        (p, int(batch.inputs[row, p]), tuple(x[p] for x in state(row, loop)))
        for row, loop, p in product(rows, loops, range(1, n + 1))
    }

    def interchanged(row, values):
        for p, token, given in pool:
            if token == batch.inputs[row, p] and given != tuple(x[p] for x in values):
                yield tuple((*x[:p], g, *x[p + 1 :]) for x, g in zip(values, given))

    expected = set()
    for row in rows:
        once, twice = set(), set()
        for loop in loops:
            once, twice = ({step(row, x) for x in some} for some in (once, twice))
            once |= set(interchanged(row, state(row, loop)))
            twice |= {y for x in once for y in interchanged(row, x)}
            expected |= {(row, loop, x) for x in twice}
    assert complete and counts.number == len(expected)
    assert counts.differ == sum(
        any(x[0][p] != x[1][p] for p in range(1, n + 1)) for _, _, x in expected
    )


@pytest.mark.parametrize(
    ("name", "variable"),
    [("ripple", "carry"), ("parity", "parity"), ("copy", "symbol")],
)
def test_what_only_another_loop_or_a_second_change_brings_out_is_told_apart(name, variable):
    program = get_program(name)

    def repeated(made):
        return made["second_loop"] >= 0

    def across_loops(made):
        second = repeated(made) & (made["second_loop"] != made["second_source_loop"])
        return (made["loop"] != made["source_loop"]) | second

    for mutation, only_by in (
        (held_out_of_phase, across_loops),
        (forgotten_the_second_time, repeated),
    ):
        comparison = equivalence_at(
            program, mutation(program, variable), ProgramOffset(), lengths=(6,)
        )
        made = comparison.interventions
        assert comparison.natural_share == 0 and made["differ"].any()
        assert only_by(made)[made["differ"]].all()
        short = equivalence(program, mutation(program, variable), lengths=(3,))
        assert short.every_single == (3,) and not short.equivalent


def test_more_inputs_than_can_be_tried_are_refused():
    with pytest.raises(InputError, match="16,384"):
        equivalence("ripple", "ripple", lengths=(8,), interventions=None)


def taken(name, tokens, carries, given, n_loops=3):
    """The carries from the first loop on at which values of other runs are put in."""
    first = given[0][0]
    carry, since, history = list(carries[first]), [0] * len(tokens), []
    for loop in range(first, n_loops + 1):
        if loop > first:
            out = [int(t == 3 or (t in (1, 2) and c)) for t, c in zip(tokens, carry)]
            for i in range(1, len(tokens)):
                since[i] = 0 if out[i - 1] else since[i] + 1
                hold = HOLDS[name](tokens[i], tokens[i - 1])
                carry[i] = int(out[i - 1] or (carry[i] and since[i] < hold))
        for when, position, value in given:
            if when == loop:
                carry[position], since[position] = value, 0
        history.append(list(carry))
    return history


def carries_out():
    """The ripple, with the carry OUT of each position as its variable."""
    carry = var("carry")
    return LoopProgram(
        name="carries_out",
        task="addition",
        inputs=_INPUTS,
        prepare={"carry": full(0)},
        step={"carry": generate | (propagate & shift_right(carry))},
        finish=propagate ^ shift_right(carry),
        n_loops=Linear(offset=-1),
    )


def test_a_program_is_found_a_loop_ahead_a_position_to_the_left_or_with_late_answers():
    first = substituted(RIPPLE.step["carry"], {var("carry"): RIPPLE.prepare["carry"]})
    ahead = changed(RIPPLE, "ahead", prepare={"carry": first})
    assert after_a_step(var("carry"), RIPPLE) == RIPPLE.step["carry"]
    for other, offset in (
        (ahead, ProgramOffset(shift=1)),
        (carries_out(), ProgramOffset(offset=-1)),
        (with_output_lag(RIPPLE, 1), ProgramOffset(lag=1)),
    ):
        assert not equivalence_at(RIPPLE, other, ProgramOffset()).equivalent
        if offset in alignments():
            comparison = equivalence(RIPPLE, other, lengths=(1, 3))
            assert comparison.equivalent
            assert comparison.program_offset == offset
    assert equivalence(carries_out(), RIPPLE, lengths=(1, 3)).program_offset == ProgramOffset(
        offset=1
    )


def test_a_negated_carry_is_equivalent_and_a_held_one_is_not_for_every_seed():
    for seed in range(2):
        assert equivalence(RIPPLE, negated(RIPPLE, "carry"), lengths=(6,), seed=seed).equivalent
        assert not equivalence(RIPPLE, "ripple_held_2", lengths=(6,), seed=seed).equivalent


def test_an_undecided_answer_at_the_end_is_no_equivalence():
    # With answers a loop late, one shot has decided nothing after its only loop.
    assert not equivalence_at(
        get_program("one_shot"), get_program("one_shot"), ProgramOffset(lag=1)
    ).equivalent


def test_programs_of_different_tasks_are_refused():
    with pytest.raises(InputError, match=r"^other:"):
        equivalence("ripple", "parity")


def test_programs_that_take_no_loop_are_compared_where_they_begin():
    at_once = replace(get_program("carry_save"), name="at_once", n_loops=Linear(slope=0))
    comparison = equivalence(at_once, at_once)
    assert comparison.equivalent and comparison.program_offset == ProgramOffset()
    with pytest.raises(InputError, match=r"^lengths:"):
        equivalence(at_once, at_once, lengths=())
