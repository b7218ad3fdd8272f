"""Predictions of interchanges, against one run at a time and plain Python; programs as models."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loopinterp.comparison import program_runs
from loopinterp.comparison.program_runs import SILENT, Prediction, ProgramModel
from loopinterp.core.errors import InputError
from loopinterp.interventions.pairs import InterchangePairs
from loopinterp.models import LoopedModel, bind
from loopinterp.programs import (
    UNKNOWN,
    Linear,
    LoopProgram,
    Trace,
    get_program,
    list_programs,
    tokens,
    var,
)
from loopinterp.programs.program import ProgramOffset
from loopinterp.tasks import IGNORE, get_task
from tests.interventions.random_pairs import random_pairs

N = 5
PROGRAMS = [
    "ripple",
    "latched_chain",
    "lookahead",
    "parity",
    "copy",
    "unique_set",
    "token_addition",
]


def pairs_of(
    name: str, *, sites: int = 1, count: int = 20, seed: int = 0, twice: bool = False
) -> InterchangePairs:
    program = get_program(name)
    task = get_task(program.task, **program.task_settings)
    generator = torch.Generator().manual_seed(seed)
    inputs = task.sample(N, batch_size=8, generator=generator).inputs
    return random_pairs(inputs, n_loops=N, count=count, sites=sites, seed=seed, twice=twice)


@cache
def alone(name: str, row: tuple[int, ...]) -> Trace:
    """The undisturbed run of one input."""
    return get_program(name).run(torch.tensor([row]), n_loops=N)


def one_run(
    name: str, pairs: InterchangePairs, k: int, names: tuple[str, ...] | None = None
) -> torch.Tensor:
    """Answers [delay, pos] of one pair, by the program's public way to go on from a state."""
    program = get_program(name)
    base, source = (tuple(pairs.inputs[int(r[k])].tolist()) for r in (pairs.base, pairs.source))
    loop, donor = int(pairs.loop[k]), int(pairs.source_loop[k])
    state = {v: x[loop].clone() for v, x in alone(name, base).variables.items()}
    taken = alone(name, source).variables
    for variable in program.variables if names is None else names:
        for position in pairs.positions[k].tolist():
            state[variable][0, position] = taken[variable][donor, 0, position]
    tokens = torch.tensor([base])
    run = program.run(tokens, n_loops=pairs.n_loops, start_at_loop=loop, variables=state)
    second = pairs.second
    if second is None or not second.made[k]:
        return run.outputs[:, 0]
    again, place = int(second.loop[k]), int(second.position[k])
    before, state = again - loop, {v: x[again - loop].clone() for v, x in run.variables.items()}
    given = int(second.source_loop[k])
    taken = alone(name, tuple(pairs.inputs[second.source[k]].tolist())).variables
    for variable in program.variables if names is None else names:
        state[variable][0, place] = taken[variable][given, 0, place]
    after = program.run(tokens, n_loops=pairs.n_loops, start_at_loop=again, variables=state)
    return torch.cat([run.outputs[:before, 0], after.outputs[:, 0]])


def check(name: str, pairs: InterchangePairs, names: tuple[str, ...] | None = None) -> None:
    program = get_program(name)
    prediction = Prediction(program, pairs, names=names)
    for k in range(len(pairs)):
        horizon, loop = int(pairs.horizon[k]), int(pairs.loop[k])
        said = prediction.interchanged[k, : horizon + 1]
        assert torch.equal(said.long(), one_run(name, pairs, k, names)), (name, k)
        natural = alone(name, tuple(pairs.inputs[pairs.base[k]].tolist())).outputs[loop:, 0]
        assert torch.equal(prediction.base[k, : horizon + 1].long(), natural)


@pytest.mark.parametrize(("sites", "twice"), [(1, False), (3, False), (1, True)])
@pytest.mark.parametrize("name", PROGRAMS)
def test_an_exchange_of_all_variables_is_one_run_at_a_time(name, sites, twice):
    check(name, pairs_of(name, sites=sites, twice=twice))


@pytest.mark.parametrize("name", ["lookahead", "parity", "copy"])
def test_an_exchange_of_one_variable_leaves_the_others(name):
    for variable in get_program(name).variables:
        check(name, pairs_of(name), (variable,))


def ripple(tokens: list[int], loops: int, injected: dict[int, int]) -> list[list[int]]:
    """The ripple, from a state of carries on: sums after 0, 1, … loops."""
    sums = {0: (0, 0), 1: (1, 0), 2: (0, 1), 3: (1, 1)}
    bits = [sums.get(token, (0, 0)) for token in tokens]
    carry, read = [injected.get(p, 0) for p in range(len(tokens))], []
    for _ in range(loops + 1):
        read.append([(a + b + c) % 2 for (a, b), c in zip(bits, carry)])
        carry = [0, *(int(a + b + c >= 2) for (a, b), c in zip(bits, carry))][:-1]
    return read


@given(seed=st.integers(0, 10_000), n=st.integers(1, 7), sites=st.integers(1, 3))
@settings(max_examples=25, deadline=None, derandomize=True)
def test_the_ripple_after_an_exchange_is_what_plain_python_says(seed, n, sites):
    generator = torch.Generator().manual_seed(seed)
    batch = get_task("addition").sample(n, batch_size=6, generator=generator)
    pairs = random_pairs(batch.inputs, n_loops=n + 1, count=12, sites=sites, seed=seed)
    said = Prediction(get_program("ripple"), pairs).interchanged
    asked = batch.targets != IGNORE

    def carries(row: int, loop: int) -> list[int]:
        tokens = batch.inputs[row].tolist()
        sums, bare = (ripple(tokens, loop, {})[k] for k in (loop, 0))
        return [s ^ b for s, b in zip(sums, bare)]

    for k in range(len(pairs)):
        base, loop = int(pairs.base[k]), int(pairs.loop[k])
        injected, taken = (
            carries(base, loop),
            carries(int(pairs.source[k]), int(pairs.source_loop[k])),
        )
        for position in pairs.positions[k].tolist():
            injected[position] = taken[position]
        horizon = int(pairs.horizon[k])
        sums = ripple(batch.inputs[base].tolist(), horizon, dict(enumerate(injected)))
        expected = torch.tensor(sums)[:, asked[base]]
        assert torch.equal(said[k, : horizon + 1, asked[base]].long(), expected)


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_input_exchanged_with_itself_changes_nothing(name):
    pairs = pairs_of(name, sites=2)
    pairs = replace(pairs, source=pairs.base, source_loop=pairs.loop)
    prediction = Prediction(get_program(name), pairs)
    within = torch.arange(pairs.longest + 1) <= pairs.horizon[:, None]
    assert torch.equal(prediction.interchanged[within], prediction.base[within])


def test_answers_of_many_classes_are_not_cut_to_16_bits() -> None:
    words = tuple(map(str, range(65_536)))
    hold = LoopProgram(
        "hold", "any", words, {"x": tokens}, {"x": var("x")}, var("x"), Linear(), "Keeps a token."
    )
    inputs = torch.tensor([[3, 65_535, 40_000], [3, 32_768, 5]])
    pairs = random_pairs(inputs, n_loops=2, count=20)
    said = Prediction(hold, pairs)
    rows = torch.arange(len(pairs))
    expected = inputs[pairs.base]
    assert torch.equal(said.base[:, 0].long(), expected)
    at = pairs.positions[:, 0]
    expected[rows, at] = inputs[pairs.source, at]
    assert torch.equal(said.interchanged[:, 0].long(), expected)


def test_pairs_may_go_on_a_few_at_a_time(monkeypatch):
    pairs, program = pairs_of("lookahead", sites=2, count=60), get_program("lookahead")
    at_once = Prediction(program, pairs).interchanged
    monkeypatch.setattr(program_runs, "_AT_A_TIME", 50)
    assert torch.equal(Prediction(program, pairs).interchanged, at_once)


@pytest.mark.parametrize("shift", [-1, 0, 1])
@pytest.mark.parametrize("lag", [0, 1])
def test_an_alignment_reads_the_program_at_other_loops(shift, lag):
    """Laid a loop ahead, the program says what it says to pairs a loop later."""
    program, pairs = get_program("ripple"), pairs_of("ripple")
    pairs = pairs[(pairs.loop >= 1) & (pairs.source_loop >= 1)]
    later = replace(
        pairs,
        n_loops=pairs.n_loops + shift,
        loop=pairs.loop + shift,
        source_loop=pairs.source_loop + shift,
    )
    laid = Prediction(program, pairs, ProgramOffset(shift=shift, lag=lag))
    plain = Prediction(program, later, ProgramOffset(lag=lag))
    assert torch.equal(laid.interchanged, plain.interchanged)
    assert torch.equal(laid.base, plain.base)


def test_answers_a_loop_late_are_those_of_the_loop_before():
    program, pairs = get_program("ripple"), pairs_of("ripple")
    late = Prediction(program, pairs, ProgramOffset(lag=1))
    plain = Prediction(program, pairs)
    asked = late.interchanged[:, 1:], plain.interchanged[:, :-1]
    within = torch.arange(asked[0].shape[1]) < pairs.horizon[:, None]
    assert torch.equal(asked[0][within], asked[1][within])


def test_an_offset_takes_the_variables_one_position_to_the_left():
    program, pairs = get_program("ripple"), pairs_of("ripple")
    pairs = pairs[pairs.positions[:, 0] >= 1]
    moved = replace(pairs, positions=pairs.positions - 1)
    laid = Prediction(program, pairs, ProgramOffset(offset=1)).interchanged
    assert torch.equal(laid, Prediction(program, moved).interchanged)


def test_loops_before_the_programs_first_are_refused():
    pairs = pairs_of("ripple")
    with pytest.raises(InputError, match="shift"):
        Prediction(get_program("ripple"), pairs, ProgramOffset(shift=-N - 1))


def test_claims_are_the_programs_change_and_elsewhere_the_models_own_answer():
    program, pairs = get_program("latched_chain"), pairs_of("latched_chain", count=200)
    prediction = Prediction(program, pairs)
    natural = torch.full_like(prediction.base, 7)
    claims = prediction.claims(natural)
    base, exchanged = prediction.base, prediction.interchanged
    for expected, b, s in zip(*(x.flatten().tolist() for x in (claims.expected, base, exchanged))):
        assert expected == (7 if b == s else SILENT if s == UNKNOWN else s)
    assert {SILENT, 7, 0, 1} <= set(claims.expected.unique().tolist())
    told = (base != exchanged) & (exchanged != UNKNOWN)
    assert torch.equal(claims.changes, told.any(-1))
    answers = torch.where(claims.expected == SILENT, 3, claims.expected)
    assert claims.agree(answers).all()
    assert not claims.agree(answers + 1)[(claims.expected != SILENT).any(-1)].any()
    some = torch.arange(0, 200, 7)
    assert torch.equal(claims[some].agree(answers[some]), claims.agree(answers)[some])


def test_two_programs_differ_where_both_predict_and_disagree():
    pairs = pairs_of("ripple", count=200)
    natural = torch.full((200, pairs.longest + 1, pairs.inputs.shape[1]), 7, dtype=torch.int16)
    first, second = (
        Prediction(get_program(name), pairs).claims(natural) for name in ("ripple", "latched_chain")
    )
    speak = (first.expected != SILENT) & (second.expected != SILENT)
    expected = (speak & (first.expected != second.expected)).any(-1)
    assert torch.equal(first.differ(second), expected)
    assert torch.equal(second.differ(first), expected)
    assert expected.any() and not first.differ(first).any()


def test_runs_say_the_same_whichever_positions_and_loops_go_on_together(monkeypatch):
    program, pairs = get_program("parity"), pairs_of("parity")
    together = Prediction(program, pairs).interchanged
    monkeypatch.setattr(program_runs, "_AT_A_TIME", 1)
    assert torch.equal(Prediction(program, pairs).interchanged, together)
    parts = [Prediction(program, pairs[rows], steps=2) for rows in (slice(13), slice(13, None))]
    assert torch.equal(torch.cat([part.interchanged for part in parts]), together[:, :3])


ADDITIONS = list_programs("addition")


@pytest.mark.parametrize("name", ADDITIONS)
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


@pytest.mark.parametrize("name", ADDITIONS)
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
    with pytest.raises(InputError) as refused:
        model.subspace("cary")
    assert refused.value.what.split()[-1] == "latched_chain" and "cary" in refused.value.given


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
    injected = {v: x[4].clone() for v, x in trace.variables.items()}
    for variable, x in trace.variables.items():
        injected[variable][:, 5:9] = x[8].roll(1, 0)[:, 5:9]
    run = program.run(additions.inputs, n_loops=8, start_at_loop=4, variables=injected)
    for loop in range(1, 5):
        h = iteration.step(h)
        assert torch.equal(iteration.readout(h).argmax(-1), run.outputs[loop])


def test_a_value_beyond_the_length_it_was_built_for_is_refused(additions):
    model = ProgramModel(get_program("lookahead"), max_length=5)
    e = model.embed(additions.inputs)
    h = model.step(model.step(model.initial_state(e), e), e)
    with pytest.raises(InputError) as refused:
        model.step(h, e)
    assert refused.value.what.startswith("variable ")


@pytest.mark.parametrize(
    ("variable", "value", "what"),
    [("sum", 0, "variable of program ripple"), ("carry", 7, "value of 'carry'")],
)
def test_unknown_directions_are_refused(program_model, variable, value, what):
    with pytest.raises(InputError) as refused:
        program_model("ripple").direction(variable, value)
    assert refused.value.what == what
