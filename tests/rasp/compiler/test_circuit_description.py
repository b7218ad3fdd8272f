"""The circuit as it is written down: names, nodes, and edges, one by one."""

from __future__ import annotations

from collections import Counter

import pytest

from loopinterp.rasp import (
    get_program,
    has_seen,
    indices,
    kqv,
    list_programs,
    shift_right,
    tokens,
    var,
)
from loopinterp.rasp.compiler import FeatureNode, HeadNode, NeuronGroup, compile_program
from loopinterp.rasp.expr import Aggregate
from tests.rasp.compiler.compiled_properties import agrees
from tests.rasp.compiler.small_programs import every_input, program

pytestmark = pytest.mark.usefixtures("quick")

u = var("u")
CARRY_OUT = "generate | (propagate & carry)"


def test_the_circuit_of_the_ripple():
    circuit = compile_program("ripple", max_length=4).circuit
    held, read, answer = (
        f"block: {CARRY_OUT}",
        f"block: shares of {CARRY_OUT} by shift_1",
        "coda: answer: propagate ^ carry",
    )
    start = {"section": "embedding", "layer": -1, "last_use": -1}
    assert circuit.features == (
        FeatureNode("tokens", "tokens", "tokens", **start, values=tuple(range(6))),
        FeatureNode("indices", "indices", "indices", **start, values=tuple(range(4))),
        FeatureNode("carry", "carry", "variable", **start, values=(0, 1)),
        FeatureNode(held, CARRY_OUT, "scratch", "block", 0, 1, (0, 1)),
        FeatureNode(read, read.removeprefix("block: "), "scratch", "block", 1, 1, (0, 1)),
        FeatureNode(answer, answer.removeprefix("coda: "), "scratch", "coda", 0, -1, (0, 1)),
    )
    select = "select(indices, indices - 1, '==', name='shift_1')"
    assert circuit.heads == (HeadNode("block.1.head.0", "block", 1, 0, "shift_1", select),)
    # Two neurons for each rule and each coordinate that is wiped, one for each of a variable.
    assert circuit.neurons == (
        NeuronGroup("block.0.neurons.0", "block", 0, tuple(range(8)), held, "rules"),
        NeuronGroup("block.1.neurons.0", "block", 1, tuple(range(6)), "carry", "rules"),
        NeuronGroup("block.1.neurons.1", "block", 1, tuple(range(6, 16)), "", "wipe"),
        NeuronGroup("coda.0.neurons.0", "coda", 0, tuple(range(8)), answer, "rules"),
    )
    assert set(circuit.edges) == {
        ("tokens", "block.0.neurons.0"),
        ("carry", "block.0.neurons.0"),
        ("block.0.neurons.0", held),
        ("indices", "block.1.head.0"),
        (held, "block.1.head.0"),
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
    compiled = compile_program(name, max_length=7)
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
