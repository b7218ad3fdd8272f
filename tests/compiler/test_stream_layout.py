"""Everything in its place: nothing stands where something else still stands."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings

from loopinterp.compiler import compile_program
from loopinterp.compiler.assembly import StreamLayout, lay_out
from loopinterp.compiler.circuit import FeatureNode, HeadNode, NeuronGroup
from loopinterp.compiler.features import Feature
from loopinterp.compiler.lowering import lower_program
from loopinterp.compiler.validation import validate
from loopinterp.programs import (
    LoopProgram,
    get_program,
    has_seen,
    indices,
    kqv,
    list_programs,
    sel_width,
    select,
    shift_right,
    tokens,
    var,
)
from loopinterp.programs.expressions import Aggregate
from tests.compiler.compiled_properties import agrees
from tests.compiler.random_programs import programs
from tests.compiler.small_models import stock_model
from tests.compiler.small_programs import every_input, program

pytestmark = pytest.mark.usefixtures("quick")

u = var("u")


def laid_out(program: LoopProgram, max_length: int) -> StreamLayout:
    source = validate(program, max_length)
    return lay_out(lower_program(source))


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


@settings(max_examples=20, deadline=None, derandomize=True, database=None)
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


CARRY_OUT = "generate | (propagate & carry)"


def test_the_circuit_of_the_ripple():
    circuit = compile_program("ripple", max_length=4).circuit
    written, read, answer = (
        f"block: {CARRY_OUT}",
        f"block: shares of {CARRY_OUT} by shift_1",
        "coda: answer: propagate ^ carry",
    )
    start = {"section": "embedding", "layer": -1, "last_use": -1}
    assert circuit.features == (
        FeatureNode("tokens", "tokens", "tokens", **start, values=tuple(range(6))),
        FeatureNode("indices", "indices", "indices", **start, values=tuple(range(4))),
        FeatureNode("carry", "carry", "variable", **start, values=(0, 1)),
        FeatureNode(written, CARRY_OUT, "scratch", "block", 0, 1, (0, 1)),
        FeatureNode(read, read.removeprefix("block: "), "scratch", "block", 1, 1, (0, 1)),
        FeatureNode(answer, answer.removeprefix("coda: "), "scratch", "coda", 0, -1, (0, 1)),
    )
    select = "select(indices, indices - 1, '==', name='shift_1')"
    assert circuit.heads == (HeadNode("block.1.head.0", "block", 1, 0, "shift_1", select),)
    # Two neurons for each rule and each coordinate that is wiped, one for each of a variable.
    assert circuit.neurons == (
        NeuronGroup("block.0.neurons.0", "block", 0, tuple(range(8)), written, "rules"),
        NeuronGroup("block.1.neurons.0", "block", 1, tuple(range(6)), "carry", "rules"),
        NeuronGroup("block.1.neurons.1", "block", 1, tuple(range(6, 16)), "", "wipe"),
        NeuronGroup("coda.0.neurons.0", "coda", 0, tuple(range(8)), answer, "rules"),
    )
    assert set(circuit.edges) == {
        ("tokens", "block.0.neurons.0"),
        ("carry", "block.0.neurons.0"),
        ("block.0.neurons.0", written),
        ("indices", "block.1.head.0"),
        (written, "block.1.head.0"),
        ("block.1.head.0", read),
        ("indices", "block.1.neurons.0"),
        (read, "block.1.neurons.0"),
        ("block.1.neurons.0", "carry"),
        ("tokens", "coda.0.neurons.0"),
        ("carry", "coda.0.neurons.0"),
        ("coda.0.neurons.0", answer),
    }
    assert circuit.n_layers == {"prelude": 0, "block": 2, "coda": 1}
    assert (circuit.program, circuit.max_length) == ("ripple", 4)
    assert circuit.inputs == get_program("ripple").inputs


@pytest.mark.parametrize("name", list_programs())
def test_every_selector_that_reads_something_has_a_head_of_its_name(name):
    compiled = stock_model(name)
    trace = compiled.program.trace(every_input(compiled.program, 1), 1)
    known = {*trace.selectors, *trace.prepare_selectors}
    assert {head.selector for head in compiled.circuit.heads} == known


def test_a_selector_below_a_shift_goes_by_the_name_that_traces_know():
    seen = has_seen(shift_right(tokens), tokens)
    assert isinstance(seen, Aggregate)
    compiled = compile_program(
        program({"u": seen}, {"u": has_seen(shift_right(u), u)}), max_length=3
    )
    names = {head.selector for head in compiled.circuit.heads}
    trace = compiled.program.trace(every_input(compiled.program, 3), 1)
    assert names == {*trace.selectors, *trace.prepare_selectors}
    heads = {head.selector: head.attends_to for head in compiled.circuit.heads}
    assert heads[repr(seen.selector)] == repr(seen.selector)
    agrees(compiled, every_input(compiled.program, 3), n_loops=2)


def test_a_variable_may_be_called_as_the_inputs_are():
    prepare = {"tokens": indices % 2, "indices": tokens}
    step = {"tokens": shift_right(var("indices")), "indices": (var("tokens") + tokens) % 3}
    finish = var("tokens") + indices * 0 + tokens * 0
    compiled = compile_program(program(prepare, step, finish), max_length=4)
    assert {f.id for f in compiled.circuit.variables.values()} == {"tokens", "indices"}
    assert Counter(f.id for f in compiled.circuit.features).most_common(1)[0][1] == 1
    agrees(compiled, every_input(compiled.program, 4), n_loops=3)


def test_features_that_are_called_alike_have_names_of_their_own():
    once = kqv(tokens + indices, 1, indices, "==")
    twice = kqv((tokens + indices) % 3, 1, kqv(tokens + indices, 2, indices, "=="), "==")
    compiled = compile_program(program({"u": once + twice}, {"u": u}), max_length=4)
    ids = [f.id for f in compiled.circuit.features]
    assert len(ids) == len(set(ids)) == len(compiled.circuit.directions)
