"""What can be compiled at all, and what shorthands stand for."""

from __future__ import annotations

import pytest

from loopinterp.errors import InputError
from loopinterp.rasp import (
    full,
    get_program,
    has_seen,
    indices,
    list_programs,
    sel_width,
    select,
    shift_right,
    tokens,
    var,
)
from loopinterp.rasp.compiler.validate import MAX_LENGTH, validate, written_out
from loopinterp.rasp.expr import Aggregate, Select, ShiftRight
from loopinterp.rasp.node import postorder
from tests.rasp.compiler.small_programs import program

u = var("u")


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
    new = written_out([x])[x]
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
    found = validate(program({"u": parts["prepare"]}, {"u": parts["step"]}, parts["finish"]), 4)
    assert not found.causal
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
    assert source.where(tokens % 2) == "tokens % 2 in prepare of program mine"
    assert source.where(u + 1).endswith("in step of program mine")
    assert source.where(u * 3).endswith("in finish of program mine")
    assert source.where(indices).endswith("indices of program mine")


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize("length", [0, -1, MAX_LENGTH + 1, 10**9, True, 2.0, "8", None])
def test_a_length_out_of_range_is_refused(length):
    with pytest.raises(InputError, match="max_length: expected an integer in 1\\.\\.512"):
        validate("ripple", length)


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize("thing", [None, 3, tokens, {"u": u}])
def test_only_loop_programs_are_compiled(thing):
    with pytest.raises(InputError, match="expected a LoopProgram, or the name of a registered one"):
        validate(thing, 8)


def test_an_unknown_name_is_answered_with_the_known_ones():
    with pytest.raises(InputError, match="ripple"):
        validate("riple", 8)
