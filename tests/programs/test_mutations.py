"""Expressions replaced in programs: against traces, which know what comes after a step."""

from __future__ import annotations

import pytest
import torch

from loopinterp.programs import (
    Intervention,
    aggregate,
    equivalence,
    evaluate,
    full,
    get_program,
    indices,
    list_programs,
    select,
    shift_right,
    tokens,
    var,
)
from loopinterp.programs.expressions import Select
from loopinterp.programs.mutations import (
    ALWAYS,
    after_a_step,
    altered,
    answers_ahead,
    answers_by_the_larger,
    at_tokens,
    changed,
    delayed,
    doubled,
    every_other_loop,
    held,
    keep_choice,
    kept_shorter,
    lateness,
    negated,
    once_converged,
    read_from_a_copy,
    reading_old,
    reads_of_other_positions,
    recomputed,
    several_steps,
    substituted,
    worked_out_from_before,
)
from loopinterp.programs.program import ProgramOffset
from loopinterp.tasks import Addition
from tests.programs.inputs import every_input, task_of

pytestmark = pytest.mark.usefixtures("quick")

RIPPLE, STICKY = get_program("ripple"), get_program("sticky_ripple")


def test_all_occurrences_are_replaced_at_once():
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
    selection = substituted(both, {tokens: indices}).children[0]
    assert isinstance(selection, Select)
    assert selection.name == "next"


@pytest.mark.parametrize("name", list_programs())
def test_an_answer_after_a_step_and_at_the_start_is_what_the_trace_says(name):
    program = get_program(name)
    g = torch.Generator().manual_seed(0)
    x = torch.randint(len(program.inputs), (20, 7), generator=g)
    trace = program.trace(x, 3)
    first = substituted(program.finish, {var(v): value for v, value in program.prepare.items()})
    assert torch.equal(evaluate(first, x), trace.outputs[0])
    for loop in range(3):
        state = {v: values[loop] for v, values in trace.variables.items()}
        ahead = evaluate(after_a_step(program.finish, program), x, state)
        assert torch.equal(ahead, trace.outputs[loop + 1])


def test_reads_are_the_outermost_ones_that_see_variables():
    [read] = reads_of_other_positions(get_program("copy"))
    assert read == shift_right(var("symbol"))
    assert len(reads_of_other_positions(get_program("lookahead"))) == 2
    nested = {"carry": shift_right(shift_right(var("carry"))) | shift_right(tokens)}
    program = changed(get_program("ripple"), "nested", step=nested)
    assert reads_of_other_positions(program) == [shift_right(shift_right(var("carry")))]


def test_once_settled_holds_from_loop_i_plus_lateness_on():
    for late in (-2, 0, 3):
        when = once_converged(RIPPLE, late)
        program = changed(RIPPLE, "x", when, finish=when.holds)
        holds = program.trace(torch.zeros(1, 5, dtype=torch.int64), 8).outputs[:, 0]
        for loop, row in enumerate(holds.tolist()):
            assert row == [int(loop >= i + late) for i in range(5)]


def test_lateness_is_the_latest_change_of_any_variable_after_its_position():
    for name in ("ripple", "copy", "parity", "late_ripple", "one_shot"):
        program = get_program(name)
        inputs = every_input(task_of(program), 3).inputs
        late = lateness(program, inputs, n_loops=12)
        trace = program.trace(inputs, 12).variables
        slowest = -99
        for values in (trace[v] for v in program.step):
            for position in range(inputs.shape[1]):
                history = values[:, :, position].tolist()
                last = max((t for t in range(1, 13) if history[t] != history[t - 1]), default=0)
                slowest = max(slowest, last - position)
        assert late == slowest, name


def test_conditions_are_joined_and_choose():
    settled, tokens = once_converged(RIPPLE, 1), at_tokens(RIPPLE, [3])
    both = settled & tokens
    assert both.label == f"{settled.label} {tokens.label}" and "a=1 b=1" in tokens.label
    assert (ALWAYS & tokens).holds == tokens.holds
    assert (ALWAYS & ALWAYS).holds is None
    x = Addition().encode([(3, 2)], n=2).inputs
    assert x.tolist() == [[4, 1, 3]]
    [countdown] = settled.memory
    for left, expected in (([0, 0, 0], [8, 8, 7]), ([0, 0, 1], [8, 8, 8])):
        chosen = evaluate(both.choose(full(7), full(8)), x, {countdown: torch.tensor([left])})
        assert chosen.tolist() == [expected]
    assert ALWAYS.choose(var("carry"), full(0)) == var("carry")


def test_a_label_lists_few_tokens():
    program = get_program("unique_set")
    listed, more = at_tokens(program, range(5)).label.split(" and ")
    assert listed == "at " + ", ".join(["s0", "s1", "s2"]) and more == "2 more"


PROPAGATING = at_tokens(RIPPLE, [1, 2])


@pytest.mark.parametrize(
    ("mutated", "stock"),
    [
        (altered(RIPPLE, "carry", ALWAYS, how="only grows"), "sticky_ripple"),
        (
            altered(RIPPLE, "carry", PROPAGATING, how="only grows"),
            "ripple_held_where_propagating",
        ),
        (kept_shorter(STICKY, "carry", ALWAYS, loops=1), "ripple_held_2"),
        (kept_shorter(STICKY, "carry", ALWAYS, loops=2), "ripple_held_3"),
        (held(RIPPLE, "carry", ALWAYS, loops=1), "ripple"),
    ],
    ids=lambda x: getattr(x, "name", x),
)
def test_mutations_of_ripples_are_the_programs_written_by_hand(mutated, stock):
    found = equivalence(mutated, stock, lengths=(1, 4))  # at which every interchange is made
    assert found.equivalent and found.program_offset == ProgramOffset()


def injected(program, *, n_loops=8):
    """The carries of a run of zeros in which one is put into position 3 after 5 loops."""
    tokens = torch.tensor([[4, 0, 0, 0, 0]])
    carry = torch.tensor([[0, 0, 0, 1, 0]])
    run = program.run(tokens, n_loops=5 + n_loops, interventions=[Intervention("carry", 5, carry)])
    return run.variables["carry"][5:, 0, 3].tolist()


def test_an_injected_carry_lives_as_the_mutation_says():
    settled = once_converged(RIPPLE, 0)
    lives = {
        held(RIPPLE, "carry", settled, loops=2): [1, 1, 0, 0, 0],
        held(RIPPLE, "carry", settled, loops=3): [1, 1, 1, 0, 0],
        held(RIPPLE, "carry", settled & PROPAGATING, loops=3): [1, 0, 0, 0, 0],
        altered(RIPPLE, "carry", settled, how="held for ever"): [1, 1, 1, 1, 1],
        altered(RIPPLE, "carry", settled, how="only falls"): [1, 0, 0, 0, 0],
        altered(RIPPLE, "carry", settled, how="forgotten"): [1, 0, 0, 0, 0],
    }
    for program, life in lives.items():
        assert injected(program)[:5] == life, program.name


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
    kept_values = program.run(x, n_loops=3, interventions=wrong).variables["last"]
    repaired = recomputed(program, "last", ALWAYS).run(x, n_loops=3, interventions=wrong)
    assert not torch.equal(kept_values[2], kept_values[0])
    assert torch.equal(repaired.variables["last"][2], kept_values[0])


def test_only_what_is_kept_at_times_can_be_kept_shorter():
    variables = {
        (name, v)
        for name in ("ripple", "sticky_ripple", "latched_ripple", "copy", "token_addition")
        for v in get_program(name).step
        if keep_choice(get_program(name), v)
    }
    assert variables == {
        ("sticky_ripple", "carry"),
        ("latched_ripple", "carry"),
        ("copy", "symbol"),
        ("token_addition", "pair"),
    }


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
def test_in_clean_runs_what_is_worked_out_from_before_is_the_original(name):
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


STEPS = [(name, v) for name in list_programs() for v in get_program(name).step]


@pytest.mark.parametrize(("name", "variable"), STEPS)
def test_negated_and_doubled_variables_say_the_same_at_every_loop(name, variable):
    program = get_program(name)
    x = some_inputs(program)
    trace = program.trace(x, 6)
    stored = negated(program, variable).trace(x, 6)
    twice = doubled(program, variable).trace(x, 6)
    assert torch.equal(stored.outputs, trace.outputs)
    assert torch.equal(1 - stored.variables[variable], trace.variables[variable])
    assert torch.equal(twice.outputs, trace.outputs)
    for name in (variable, f"{variable}_copy"):
        assert torch.equal(twice.variables[name], trace.variables[variable])


@pytest.mark.parametrize("trust", ["copy", "larger", "smaller"])
@pytest.mark.parametrize("name", list_programs())
def test_a_copy_is_what_is_read_at_every_loop(name, trust):
    program = get_program(name)
    x = some_inputs(program)
    trace = program.trace(x, 4)
    for read in reads_of_other_positions(program):
        copied = read_from_a_copy(program, read, trust=trust).trace(x, 4)
        assert torch.equal(copied.outputs, trace.outputs)
        for loop in range(5):
            state = {v: values[loop] for v, values in trace.variables.items()}
            assert torch.equal(copied.variables["copied"][loop], evaluate(read, x, state))


def test_a_reader_with_a_copy_is_not_reached_by_a_change():
    program = get_program("prefix_xor")
    [read] = reads_of_other_positions(program)
    x = torch.tensor([[2, 0, 0, 0, 0]])
    injected = [Intervention("prefix", 2, torch.tensor([[0, 1, 0, 0, 0]]))]
    reached = {
        trust: read_from_a_copy(program, read, trust=trust)
        .run(x, n_loops=3, interventions=injected)
        .variables["prefix"][3, 0]
        .tolist()
        for trust in ("copy", "larger", "smaller")
    }
    changed, untouched = [0, 0, 1, 0, 0], [0] * 5
    assert reached == {"copy": untouched, "larger": changed, "smaller": untouched}
