"""Everything in its place: nothing stands where something else still stands."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings

from loopinterp.rasp import (
    LoopProgram,
    get_program,
    list_programs,
    sel_width,
    select,
    shift_right,
    tokens,
    var,
)
from loopinterp.rasp.compiler import compile_program
from loopinterp.rasp.compiler.lower.lowered_features import Feature
from loopinterp.rasp.compiler.lower.program_lowering import lower_program
from loopinterp.rasp.compiler.stream_layout import StreamLayout, lay_out
from loopinterp.rasp.compiler.validate import validate
from loopinterp.rasp.compiler.value_domains import infer_domains
from tests.rasp.compiler.compiled_properties import agrees
from tests.rasp.compiler.random_programs import programs
from tests.rasp.compiler.small_programs import every_input, program

pytestmark = pytest.mark.usefixtures("quick")

u = var("u")


def laid_out(program: LoopProgram, max_length: int) -> StreamLayout:
    source = validate(program, max_length)
    return lay_out(lower_program(source, infer_domains(source)))


def slots(feature: Feature) -> set[int]:
    assert feature.start >= 0
    return set(range(feature.start, feature.start + feature.width))


def check(layout: StreamLayout) -> None:
    taken = [slot for feature in layout.lowered.persistent for slot in slots(feature)]
    assert len(taken) == len(set(taken)) and max(taken) < layout.d_model
    for section in layout.lowered.sections:
        layers = layout.sections[section.name]
        assert len(layers) == section.n_layers
        scratch = [f for f in section.live if f.role == "scratch"]
        for feature in scratch:
            assert max(slots(feature)) < layout.d_model and not slots(feature) & set(taken)
            # Wiped once, by the last layer that reads it, unless it is the answer.
            wiped = [n for n, layer in enumerate(layers) for f in layer.wiped if f is feature]
            assert wiped == (
                [] if feature in layout.lowered.answer.features else [feature.last_use]
            )
            assert feature.last_use >= feature.layer or not wiped
        for one, other in itertools.combinations(scratch, 2):
            if slots(one) & slots(other):
                first, second = sorted((one, other), key=lambda f: (f.layer, f.head is None))
                # Written by the MLP that wipes what stood there, or later.
                assert first.last_use >= 0
                assert second.layer > first.last_use or (
                    second.layer == first.last_use and second.head is None
                )
        if section is layout.lowered.block:
            last = layers[-1]
            assert {f.name for f in last.wiped if f.role == "variable"} == {
                f.name for f in layout.lowered.persistent if f.role == "variable"
            }


@pytest.mark.parametrize("name", list_programs())
def test_the_features_of_every_program_have_room(name):
    check(laid_out(get_program(name), 12))


@settings(max_examples=80, deadline=None, derandomize=True, database=None)
@given(programs())
def test_the_features_of_random_programs_have_room(program):
    check(laid_out(program, 4))


def test_coordinates_are_used_again():
    layout = laid_out(get_program("multiplication"), 12)
    prelude = layout.lowered.prelude
    scratch = sum(f.width for f in prelude.live if f.role == "scratch")
    persistent = sum(f.width for f in layout.lowered.persistent)
    assert layout.d_model < persistent + scratch


def test_what_only_the_first_layer_reads_makes_room_for_what_that_layer_writes():
    step = shift_right(shift_right(u) + 1) % 2
    layout = laid_out(program({"u": 0}, {"u": step}), 3)
    (block,) = (s for s in layout.lowered.sections if s.name == "block")
    read, written = block.live[:2]
    assert (read.layer, read.last_use, written.layer, written.last_use) == (0, 0, 0, 1)
    assert written.start == read.start


def test_an_answer_may_stand_where_something_was_wiped_in_the_same_layer():
    finish = sel_width(select(tokens, u, "==")) + 1
    compiled = compile_program(program({"u": 0}, {"u": 1}, finish, n_tokens=2), max_length=3)
    for n in (1, 2, 3):
        agrees(compiled, every_input(compiled.program, n), n_loops=2)
