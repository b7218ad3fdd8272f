from __future__ import annotations

import pytest
import torch

from loopinterp.circuits.program_model import ProgramModel
from loopinterp.errors import InputError
from loopinterp.models import LoopedModel, bind
from loopinterp.rasp import UNKNOWN, get_program, list_programs
from loopinterp.tasks import IGNORE

PROGRAMS = list_programs("addition")


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_answers_as_the_program_at_every_loop(name, program_model, additions):
    model = program_model(name)
    assert isinstance(model, LoopedModel)
    trace = get_program(name).trace(additions.inputs, n_loops=6)
    iteration = bind(model, additions.inputs)
    h = iteration.h0
    for loop in range(7):
        logits = iteration.readout(h)
        decided = trace.outputs[loop] != UNKNOWN
        assert torch.equal(logits.argmax(-1)[decided], trace.outputs[loop][decided])
        assert (logits[~decided] == 0).all()
        h = iteration.step(h)


@pytest.mark.parametrize("name", PROGRAMS)
def test_its_state_holds_each_variable_along_its_direction(name, program_model, additions):
    model = program_model(name)
    program = get_program(name)
    trace = program.trace(additions.inputs, n_loops=3)
    iteration = bind(model, additions.inputs)
    h = iteration.h0
    for _ in range(3):
        h = iteration.step(h)
    for variable in program.variables:
        for value in trace.variables[variable][3].unique().tolist():
            along = h @ model.direction(variable, value)
            here = trace.variables[variable][3] == value
            assert torch.allclose(along, here.float(), atol=1e-5)


def test_it_adds(program_model, additions):
    model = program_model("ripple")
    iteration = bind(model, additions.inputs)
    h = iteration.h0
    for _ in range(int(additions.n_loops.max())):
        h = iteration.step(h)
    right = (iteration.readout(h).argmax(-1) == additions.targets) | (additions.targets == IGNORE)
    assert right.all()


def test_no_variable_lies_along_an_axis(program_model):
    direction = program_model("ripple").direction("carry", 1)
    assert direction.abs().max() < 0.95
    assert float(direction.norm()) == pytest.approx(1.0, abs=1e-5)


def test_the_subspace_of_a_variable_holds_the_direction_of_each_value(program_model):
    model = program_model("latched_chain")
    rows = model.subspace("carry")
    assert torch.equal(rows, torch.stack([model.direction("carry", v) for v in (-1, 0, 1)]))
    with pytest.raises(InputError, match="Did you mean 'carry'"):
        model.subspace("cary")


@pytest.mark.parametrize("name", ["ripple_held_2", "ripple_held_by_token", "sticky_ripple"])
def test_states_that_no_run_reaches_go_on_as_in_the_program(name, program_model, additions):
    model, program = program_model(name), get_program(name)
    iteration = bind(model, additions.inputs)
    states = [iteration.h0]
    for _ in range(8):
        states.append(iteration.step(states[-1]))
    h = states[4].clone()
    h[:, 5:9] = states[8].roll(1, 0)[:, 5:9]
    trace = program.run(additions.inputs, n_loops=8)
    planted = {v: x[4].clone() for v, x in trace.variables.items()}
    for variable, x in trace.variables.items():
        planted[variable][:, 5:9] = x[8].roll(1, 0)[:, 5:9]
    run = program.run(additions.inputs, n_loops=8, start_at_loop=4, variables=planted)
    for loop in range(1, 5):
        h = iteration.step(h)
        assert torch.equal(iteration.readout(h).argmax(-1), run.outputs[loop])


def test_a_value_beyond_the_length_it_was_built_for_is_refused(additions):
    model = ProgramModel(get_program("lookahead"), max_length=5)
    e = model.embed(additions.inputs)
    h = model.step(model.step(model.initial_state(e), e), e)
    with pytest.raises(InputError, match="longer inputs"):
        model.step(h, e)


@pytest.mark.parametrize(("variable", "value"), [("sum", 0), ("carry", 7)])
def test_unknown_directions_are_refused(program_model, variable, value):
    with pytest.raises(InputError, match="direction of"):
        program_model("ripple").direction(variable, value)
