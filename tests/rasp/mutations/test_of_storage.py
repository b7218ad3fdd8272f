"""Mutations of storage: left alone, the original at every loop."""

from __future__ import annotations

import pytest
import torch

from loopinterp.rasp import Intervention, evaluate, get_program, list_programs
from loopinterp.rasp.mutations.of_storage import doubled, negated, read_from_a_copy
from loopinterp.rasp.mutations.rewriting import reads_of_other_positions

pytestmark = pytest.mark.usefixtures("quick")

STEPS = [(name, v) for name in list_programs() for v in get_program(name).step]


def some_inputs(program):
    g = torch.Generator().manual_seed(0)
    return torch.randint(len(program.inputs), (30, 8), generator=g)


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
    for copy in (variable, f"{variable}_copy"):
        assert torch.equal(twice.variables[copy], trace.variables[variable])


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
    planted = [Intervention("prefix", 2, torch.tensor([[0, 1, 0, 0, 0]]))]
    reached = {
        trust: read_from_a_copy(program, read, trust=trust)
        .run(x, n_loops=3, interventions=planted)
        .variables["prefix"][3, 0]
        .tolist()
        for trust in ("copy", "larger", "smaller")
    }
    changed, untouched = [0, 0, 1, 0, 0], [0] * 5
    assert reached == {"copy": untouched, "larger": changed, "smaller": untouched}
