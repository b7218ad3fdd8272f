"""What can be compiled at all, and what shorthands stand for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from loopinterp.compiler.validation import (
    _MAX_VALUES,
    MAX_LENGTH,
    infer_domains,
    validate,
)
from loopinterp.core.errors import InputError
from loopinterp.programs import (
    aggregate,
    cumsum,
    evaluate,
    full,
    get_program,
    has_seen,
    index_select,
    indices,
    kqv,
    list_programs,
    maximum,
    sel_width,
    select,
    shift_right,
    smaller,
    tok_map,
    tokens,
    var,
    where,
)
from loopinterp.programs.expressions import Aggregate, Select, Seq, ShiftRight, Var, postorder
from tests.compiler.random_programs import programs
from tests.compiler.small_programs import every_input, program

pytestmark = pytest.mark.usefixtures("quick")

u, v = var("u"), var("v")


def nodes(source):
    return postorder(root for roots in source.roots.values() for root in roots)


@pytest.mark.parametrize("name", list_programs())
def test_no_shorthand_is_left_and_every_variable_has_a_step(name):
    source = validate(name, 8)
    assert source.program is get_program(name)
    assert not any(isinstance(node, ShiftRight) for node in nodes(source))
    assert list(source.step) == list(source.prepare) == list(source.program.prepare)


def test_a_shift_is_written_out_however_deep_it_stands():
    x = has_seen(shift_right(tokens + 1, 2, default=-1), shift_right(shift_right(tokens)))
    new = validate(program({"u": x}, {"u": u}), 4).prepare["u"]
    assert not any(isinstance(node, ShiftRight) for node in postorder([new]))
    shifts = [node for node in postorder([new]) if isinstance(node, Select) and node.name]
    assert {node.name for node in shifts} == {"shift_1", "shift_2"}
    assert all(isinstance(node, Aggregate) for node in postorder([new]) if "default" in vars(node))


def test_a_variable_without_a_step_is_kept():
    source = validate(program({"u": 0, "v": tokens}, {"u": u + 1}), 4)
    assert source.step["v"] is var("v")


@pytest.mark.parametrize("part", ["prepare", "step", "finish"])
def test_one_selection_that_looks_ahead_makes_the_whole_model_look_ahead(part):
    ahead = sel_width(select(tokens, tokens, "==", causal=False))
    parts = {"prepare": full(0), "step": u, "finish": u, part: ahead}
    source = validate(program({"u": parts["prepare"]}, {"u": parts["step"]}, parts["finish"]), 4)
    assert not source.causal
    assert validate(program({"u": sel_width(select(tokens, 0, "=="))}, {"u": u}), 4).causal


def test_selections_keep_the_names_by_which_traces_know_them():
    seen = has_seen(shift_right(tokens), tokens)
    assert isinstance(seen, Aggregate)
    source = validate(program({"u": seen}, {"u": shift_right(u)}), 4)
    names = {select.name or repr(select) for select in source.selects.values()}
    assert names == {"shift_1", repr(seen.selector)}
    written = {node for node in nodes(source) if isinstance(node, Select)}
    assert written == set(source.selects)


def test_an_error_can_say_in_which_part_an_expression_stands():
    source = validate(program({"u": tokens % 2}, {"u": u + 1}, u * 3, name="mine"), 4)
    for expression, place in (
        (tokens % 2, "tokens % 2 in prepare of program mine"),
        (u + 1, "in step of program mine"),
        (u * 3, "in finish of program mine"),
        (indices, "indices of program mine"),
    ):
        assert source.where(expression).endswith(place)


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize("length", [0, -1, MAX_LENGTH + 1, 10**9, True, 2.0, "8", None])
def test_a_length_out_of_range_is_refused(length):
    with pytest.raises(InputError) as caught:
        validate("ripple", length)
    assert caught.value.what == "max_length"


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize("thing", [None, 3, tokens, {"u": u}])
def test_only_loop_programs_are_compiled(thing):
    with pytest.raises(InputError) as caught:
        validate(thing, 8)
    assert caught.value.what == "program"


def test_an_unknown_name_is_answered_with_the_known_ones():
    with pytest.raises(InputError, match="ripple"):
        validate("riple", 8)


everything = select(0, 0, "true")


def domain(x: Seq | int, max_length: int = 4) -> list[int]:
    """The values of an expression of the tokens 0, 1, 2."""
    source = validate(program({"u": x}, {"u": u}), max_length)
    return infer_domains(source)[source.prepare["u"]].tolist()


@pytest.mark.parametrize(
    ("x", "values"),
    [
        (tokens, [0, 1, 2]),
        (indices, [0, 1, 2, 3]),
        (full(-7), [-7]),
        (tokens * indices, [0, 1, 2, 3, 4, 6]),
        (tokens % 2, [0, 1]),
        (tok_map(tokens, {0: 5}, default=-2), [-2, 5]),
        (where(tokens, indices, 9), [0, 1, 2, 3, 9]),
        (sel_width(everything), [0, 1, 2, 3, 4]),
        (has_seen(tokens, 1), [0, 1]),
        (aggregate(everything, tokens * 3, default=-1), [-1, 0, 1, 2, 3, 4, 5, 6]),
        (aggregate(everything, tokens * -2, "max", default=5), [-4, -2, 0, 5]),
        (maximum(tokens), [0, 1, 2]),
        # One key has no mean but its value.
        (index_select(tokens * 3, tokens), [0, 3, 6]),
        (shift_right(tokens * 3, default=-1), [-1, 0, 3, 6]),
        # What is read twice is the same both times.
        (tokens - tokens, [0]),
        (where(tokens > 0, tokens - 1, tokens), [0, 1]),
        ((tokens + 1) // (tokens + 1), [1]),
        (tokens * tokens, [0, 1, 4]),
    ],
)
def test_the_values_of_an_expression(x, values):
    assert domain(x) == values


def test_variables_take_what_any_number_of_loops_gives_them():
    step = {"u": (u + 2) % 7, "v": where(v > 0, v - 1, v)}
    domains = infer_domains(validate(program({"u": 0, "v": tokens + 3}, step), 4))
    assert domains[Var("u")].tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert domains[Var("v")].tolist() == [0, 1, 2, 3, 4, 5]


def test_a_variable_can_be_bounded_by_where_it_stands():
    domains = infer_domains(validate(program({"u": 1}, {"u": smaller(u + 1, indices + 1)}), 6))
    assert domains[Var("u")].tolist() == [1, 2, 3, 4, 5, 6]


def test_variables_that_read_each_other_grow_together():
    step = {"u": v, "v": (u + tokens) % 5}
    domains = infer_domains(validate(program({"u": 0, "v": 3}, step), 2))
    assert domains[Var("u")].tolist() == domains[Var("v")].tolist() == [0, 1, 2, 3, 4]


def check_that_no_value_is_missing(checked, max_length, tokens):
    source = validate(checked, max_length)
    domains = infer_domains(source)
    trace = checked.trace(tokens, 3)
    for part, roots in source.roots.items():
        for loop in range(1 if part == "prepare" else 4):
            state = {} if part == "prepare" else {n: x[loop] for n, x in trace.variables.items()}
            for root in roots:
                values = evaluate(root, tokens, state).unique()
                assert set(values.tolist()) <= set(domains[root].tolist()), root
    for name, values in trace.variables.items():
        assert set(values.unique().tolist()) <= set(domains[Var(name)].tolist())


@settings(
    max_examples=14,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(programs())
def test_no_value_that_occurs_is_missing(checked):
    for n in (1, 3):
        check_that_no_value_is_missing(checked, 3, every_input(checked, n))


@pytest.mark.parametrize("name", list_programs())
def test_no_value_of_a_program_is_missing(name):
    checked = get_program(name)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(len(checked.inputs), (200, 9), generator=generator)
    check_that_no_value_is_missing(checked, 9, tokens)


@pytest.mark.parametrize(
    ("step", "what"),
    [
        (u + 1, "variable 'u' of program small"),
        (u * 3 + 1, "variable 'u' of program small"),
        (cumsum(u) + u, "sel_width("),
        (tok_map(tokens, {0: 1}), "table of tok_map(tokens, {0: 1}) in step"),
        (tokens // (indices % 3), "tokens // (indices % 3)"),
        (tokens % indices, "tokens % indices"),
    ],
)
def test_what_has_no_domain_is_named(step, what):
    with pytest.raises(InputError) as caught:
        infer_domains(validate(program({"u": 0}, {"u": step}), 6))
    assert what in caught.value.what


def test_as_many_values_as_there_may_be_are_fine_and_one_more_is_not():
    counter = {"u": (u + 1) % _MAX_VALUES}
    domains = infer_domains(validate(program({"u": 0}, counter), 2))
    assert len(domains[Var("u")]) == _MAX_VALUES
    with pytest.raises(InputError) as caught:
        infer_domains(validate(program({"u": 0}, {"u": (u + 1) % (_MAX_VALUES + 1)}), 2))
    assert caught.value.what.startswith("variable 'u'")


def test_so_many_tokens_that_they_have_no_directions_are_refused_where_they_are_read():
    with pytest.raises(InputError) as caught:
        infer_domains(validate(program({"u": tokens % 2}, {"u": u}, n_tokens=65_536), 4))
    assert caught.value.what.startswith("tokens in prepare")
    infer_domains(validate(program({"u": 0}, {"u": u}, n_tokens=65_536), 4))


def test_means_of_the_largest_integers_do_not_overflow():
    table = tok_map(tokens, {0: 2**63 - 1, 1: 2**63 - 3}, default=2**63 - 2)
    mean = kqv(0, 0, table, "true", default=2**63 - 1)
    assert domain(mean) == [2**63 - 3, 2**63 - 2, 2**63 - 1]
    with pytest.raises(InputError) as caught:
        domain(kqv(0, 0, tok_map(tokens, {0: 2**63 - 1}, default=-(2**63)), "true"))
    assert caught.value.what.startswith("aggregate(")
