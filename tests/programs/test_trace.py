"""Traces, interventions and restarts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loopinterp.core.errors import InputError
from loopinterp.programs import (
    Intervention,
    Linear,
    LoopProgram,
    aggregate,
    full,
    get_program,
    indices,
    list_programs,
    select,
    tokens,
    var,
)
from loopinterp.tasks import get_task

RIPPLE = get_program("ripple")
PROGRAMS = list_programs()


def inputs(name: str, n: int = 6, batch_size: int = 5, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    program = get_program(name)
    task = get_task(program.task, **program.task_settings)
    return task.sample(n, batch_size=batch_size, generator=generator).inputs


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_trace_holds_every_variable_and_selector_at_every_loop(name):
    program, x = get_program(name), inputs(name)
    trace = program.trace(x, n_loops=4)
    assert set(trace.variables) == set(program.variables)
    for values in [*trace.variables.values(), trace.outputs]:
        assert values.dtype == torch.int64
        assert values.shape == (5, *x.shape)
    for selected in trace.selectors.values():
        assert selected.dtype == torch.bool
        assert selected.shape == (4, *x.shape, x.shape[1])
    assert (trace.start, trace.n_loops) == (0, 4)


BY_POSITION = {"lookahead", "one_shot", "binary_sum", "unique_set"}


@pytest.mark.parametrize("name", [n for n in PROGRAMS if n not in BY_POSITION])
def test_the_left_neighbour_is_the_selector_shift_1(name):
    x = inputs(name)
    trace = get_program(name).trace(x, n_loops=3)
    assert list(trace.selectors) == ["shift_1"]
    left = torch.eye(x.shape[1], dtype=torch.bool).roll(1, dims=0)
    left[0] = False
    assert torch.equal(trace.selectors["shift_1"], left.expand(3, *x.shape, -1))


def test_selectors_that_follow_a_variable_change_with_the_loop():
    trace = get_program("lookahead").trace(inputs("lookahead", n=9), n_loops=3)
    assert list(trace.prepare_selectors) == ["shift_1"]
    assert trace.prepare_selectors["shift_1"].shape == (5, 10, 10)
    back = trace.selectors["span_back"]
    for loop, span in enumerate((1, 2, 4)):
        query, key = back[loop, 0].nonzero().T
        assert torch.equal(query - key, torch.full_like(query, span))
        assert query.tolist() == list(range(span, 10))


def test_selectors_that_depend_on_the_example_are_traced_for_each():
    same = aggregate(select(tokens, var("x"), "==", name="same"), indices, "max", default=-1)
    mine = LoopProgram(
        name="mine",
        task="any",
        inputs=("0", "1", "2"),
        prepare={"x": tokens},
        step={"x": (var("x") + 1) % 3},
        finish=var("x"),
        n_loops=Linear(),
    )
    seen = LoopProgram(**{**vars_of(mine), "step": {"x": (var("x") + 1) % 3 + 0 * same}})
    x = torch.tensor([[0, 1, 2], [2, 2, 0]])
    back = seen.trace(x, n_loops=2).selectors["same"]
    for loop in range(2):
        for i in range(2):
            is_source = (x[i][None, :] == (x[i][:, None] + loop) % 3).tril()
            assert torch.equal(back[loop, i], is_source)
    assert seen.trace(x, n_loops=0).selectors["same"].shape == (0, 2, 3, 3)


def vars_of(program: LoopProgram) -> dict:
    names = ("name", "task", "inputs", "prepare", "step", "finish", "n_loops")
    return {name: getattr(program, name) for name in names}


def test_an_unknown_selector_is_named():
    with pytest.raises(KeyError, match="shift_1"):
        RIPPLE.trace(inputs("ripple"), n_loops=2).selectors["shift_2"]


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_run_can_be_taken_up_at_any_loop(name):
    program, x = get_program(name), inputs(name)
    full = program.trace(x, n_loops=6)
    for start in range(7):
        state = {variable: full.variables[variable][start] for variable in program.step}
        rest = program.run(x, n_loops=6, start_at_loop=start, variables=state)
        assert (rest.start, rest.n_loops) == (start, 6)
        assert torch.equal(rest.outputs, full.outputs[start:])
        for variable, values in rest.variables.items():
            assert torch.equal(values, full.variables[variable][start:])
        for selector, selected in rest.selectors.items():
            assert torch.equal(selected, full.selectors[selector][start:])


@pytest.mark.parametrize("name", PROGRAMS)
def test_setting_a_variable_to_the_value_it_has_changes_nothing(name):
    program, x = get_program(name), inputs(name)
    clean = program.trace(x, n_loops=5)
    changes = [
        Intervention(variable, loop, values[loop])
        for variable, values in clean.variables.items()
        for loop in range(6)
    ]
    patched = program.run(x, n_loops=5, interventions=changes)
    assert torch.equal(patched.outputs, clean.outputs)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(PROGRAMS), loop=st.integers(0, 5), seed=st.integers(0, 99), data=st.data()
)
def test_an_intervention_sets_exactly_what_it_says_and_nothing_earlier(name, loop, seed, data):
    program, x = get_program(name), inputs(name, seed=seed)
    variable = data.draw(st.sampled_from(program.variables))
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(x.shape, generator=g) < 0.3
    new = torch.randint(0, 2, x.shape, generator=g)
    clean = program.trace(x, n_loops=5)
    patched = program.run(x, n_loops=5, interventions=[Intervention(variable, loop, new, mask)])
    at_loop = torch.where(mask, new, clean.variables[variable][loop])
    assert torch.equal(patched.variables[variable][loop], at_loop)
    for other, values in patched.variables.items():
        assert torch.equal(values[:loop], clean.variables[other][:loop])
        if other != variable:
            assert torch.equal(values[loop], clean.variables[other][loop])
    # What comes after is what a run from the changed values gives.
    state = {v: patched.variables[v][loop] for v in program.variables}
    rest = program.run(x, n_loops=5, start_at_loop=loop, variables=state)
    assert torch.equal(rest.outputs, patched.outputs[loop:])


def test_values_of_another_run_are_put_in_at_each_of_several_loops():
    base, source = inputs("ripple", seed=1), inputs("ripple", seed=2)
    theirs = RIPPLE.trace(source, n_loops=5).variables["carry"]
    mask = torch.zeros_like(base, dtype=torch.bool)
    mask[:, 3] = True
    changes = [Intervention("carry", loop, theirs[loop], mask) for loop in range(2, 6)]
    mixed = RIPPLE.run(base, n_loops=5, interventions=changes)
    clean = RIPPLE.trace(base, n_loops=5).variables["carry"]
    assert torch.equal(mixed.variables["carry"][2:, :, 3], theirs[2:, :, 3])
    assert torch.equal(mixed.variables["carry"][:, :, :3], clean[:, :, :3])
    assert torch.equal(mixed.variables["carry"][:2], clean[:2])


def test_settled_is_the_first_loop_from_which_a_variable_stays():
    x = inputs("ripple", n=12, batch_size=40)
    trace = RIPPLE.trace(x, n_loops=14)
    values = trace.variables["carry"]
    settled = trace.converged("carry")
    for row in range(40):
        for pos in range(13):
            history = values[:, row, pos].tolist()
            by_hand = next(t for t in range(15) if len(set(history[t:])) == 1)
            assert settled[row, pos] == by_hand
    with pytest.raises(InputError) as caught:
        trace.converged("carries")
    assert caught.value.what == f"variable of program {RIPPLE.name}"
    assert caught.value.given == repr("carries")


TOKENS = torch.tensor([[4, 3, 1, 2]])
ZEROS = torch.zeros(1, 4, dtype=torch.int64)


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"n_loops": -1}, "n_loops"),
        ({"n_loops": 1.0}, "n_loops"),
        ({"n_loops": 2, "start_at_loop": 3}, "start_at_loop"),
        ({"n_loops": 2, "start_at_loop": 1}, "variables of program ripple"),
        ({"n_loops": 2, "variables": {"c": ZEROS}}, "variable of program ripple"),
        ({"n_loops": 2, "variables": {"carry": ZEROS[:, :2]}}, "values of variable 'carry'"),
        ({"interventions": [Intervention("c", 1, ZEROS)]}, "variable of program ripple"),
        ({"interventions": [Intervention("carry", 3, ZEROS)]}, "loop of intervention"),
        ({"interventions": [Intervention("carry", -1, ZEROS)]}, "loop of intervention"),
        ({"interventions": [Intervention("carry", 1, ZEROS[0])]}, "values of intervention"),
        (
            {"interventions": [Intervention("carry", 1, ZEROS.double())]},
            "values of intervention",
        ),
        ({"interventions": [Intervention("carry", 1, [[0] * 4])]}, "values of intervention"),  # type: ignore[arg-type]
        ({"interventions": [Intervention("carry", 1, ZEROS, ZEROS)]}, "mask of intervention"),
    ],
)
def test_bad_runs_say_what_is_wrong(arguments, what):
    with pytest.raises(InputError) as caught:
        RIPPLE.run(TOKENS, **{"n_loops": 2, **arguments})
    assert caught.value.what == what


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize(
    ("x", "what"),
    [
        (TOKENS + 2, "tokens"),
        (TOKENS[0], "tokens"),
        (TOKENS.double(), "tokens"),
        (TOKENS[:0], "tokens of program ripple"),
    ],
)
def test_bad_tokens_are_refused(x, what):
    with pytest.raises(InputError) as caught:
        RIPPLE.trace(x, n_loops=1)
    assert caught.value.what == what


def test_the_constant_program_has_nothing_to_select():
    still = LoopProgram(
        name="still",
        task="any",
        inputs=("0",),
        prepare={"x": full(1)},
        step={"x": var("x")},
        finish=var("x"),
        n_loops=Linear(),
    )
    trace = still.trace(torch.zeros(2, 3, dtype=torch.int64), n_loops=1)
    assert len(trace.selectors) == 0
    assert trace.outputs.tolist() == [[[1] * 3] * 2] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_gpu_traces_the_same_integers(name):
    program, x = get_program(name), inputs(name, n=20, batch_size=50)
    here, there = program.trace(x, n_loops=9), program.trace(x.cuda(), n_loops=9)
    assert torch.equal(there.outputs.cpu(), here.outputs)
    for variable, values in here.variables.items():
        assert torch.equal(there.variables[variable].cpu(), values)
    for selector, selected in here.selectors.items():
        assert torch.equal(there.selectors[selector].cpu(), selected)
