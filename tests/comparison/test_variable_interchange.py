"""Interchange interventions on models whose program is known, and on models that run none."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from loopinterp.comparison.counts import END
from loopinterp.comparison.program_runs import ProgramModel
from loopinterp.comparison.variable_figures import _when
from loopinterp.comparison.variable_interchange import (
    ANOTHER_LOOP,
    ANOTHER_VARIABLE,
    INTERVENTIONS,
    NOTHING,
    RANDOM,
    SAME_VALUE,
    VARIABLE,
    VariableInterchange,
    interchange_study,
)
from loopinterp.compiler import compile_program
from loopinterp.core.errors import InputError
from loopinterp.core.intervals import wilson_estimate
from loopinterp.core.results import load_result
from loopinterp.models import bind
from loopinterp.programs import UNKNOWN, LoopProgram, get_program
from loopinterp.programs.stock_programs import unique_set
from loopinterp.tasks import IGNORE, Batch, get_task

N = 4
PROGRAMS = {
    "parity": get_program("parity"),
    "copy": get_program("copy"),
    "prefix_xor": get_program("prefix_xor"),
    "ripple": get_program("ripple"),
    "ripple_held_2": get_program("ripple_held_2"),
    "latched_chain": get_program("latched_chain"),
    "lookahead": get_program("lookahead"),
    "token_addition": get_program("token_addition"),
    "unique_set": unique_set(8),
}
WIDE = ["copy", "token_addition", "unique_set"]
"""Programs whose state has so many dimensions that a random change seldom reads as a value."""


@cache
def known(name: str) -> tuple[ProgramModel, LoopProgram, Batch]:
    """A model that runs the program, and inputs."""
    program = PROGRAMS[name]
    task = get_task(program.task, **program.task_settings)
    generator = torch.Generator().manual_seed(0)
    batch = task.sample(N, batch_size=64, generator=generator)
    return ProgramModel(program, max_length=batch.inputs.shape[1]), program, batch


def subspaces(model: ProgramModel) -> dict[str, torch.Tensor]:
    return {name: model.subspace(name) for name in model.program.variables}


@cache
def _result_of(name: str, whole: bool) -> VariableInterchange:
    model, program, batch = known(name)
    where = None if whole else subspaces(model)
    return interchange_study(model, batch, program, subspaces=where, pairs_per_loop=16)


def result_of(name: str, *, whole: bool = False) -> VariableInterchange:
    return _result_of(name, whole)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_right_subspace_at_the_right_loop_is_always_right(name, whole):
    result = result_of(name, whole=whole)
    there = result.data["pairs"].sel(intervention=VARIABLE).values > 0
    assert there.sum() >= N
    assert (result.iia.values[there] == 1).all()
    assert np.isnan(result.iia.values[~there]).all()
    assert (result.data["undisturbed"].values[there] == 1).all()
    assert result.pooled()[0] == 1
    assert list(result.ranks) == ([] if whole else list(PROGRAMS[name].variables))


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_donor_with_the_same_value_changes_nothing(name, whole):
    share, _, _, n = result_of(name, whole=whole).pooled(SAME_VALUE)
    assert n > 0 and share == 1


@pytest.mark.parametrize("name", PROGRAMS)
def test_controls_that_the_program_tells_apart_are_never_right(name):
    result = result_of(name)
    for intervention in (ANOTHER_LOOP, ANOTHER_VARIABLE, NOTHING):
        share, *_, n = result.pooled(intervention)
        assert share == 0 if n else np.isnan(share)
    assert result.pooled(NOTHING)[3] == result.pooled(RANDOM)[3] == result.pooled()[3]
    assert result.pooled(ANOTHER_LOOP)[3] > 0
    assert (result.pooled(ANOTHER_VARIABLE)[3] > 0) == (len(PROGRAMS[name].variables) > 1)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_random_change_of_equal_norm_does_less_than_the_right_one(name):
    result = result_of(name)
    assert result.pooled(RANDOM)[2] < result.pooled()[1]
    if name in WIDE:
        assert result.pooled(RANDOM)[0] < 0.1


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("name", ["parity", "copy", "lookahead"])
def test_a_compiled_transformer_holds_its_variables_where_its_circuit_says(name, whole):
    _, program, batch = known(name)
    compiled = compile_program(program, max_length=batch.inputs.shape[1])
    where = {v: compiled.circuit.subspace(v) for v in program.variables}
    result = interchange_study(
        compiled.model, batch, program, subspaces=None if whole else where, pairs_per_loop=16
    )
    own = result_of(name, whole=whole).data["pairs"].sel(intervention=VARIABLE)
    np.testing.assert_array_equal(result.data["pairs"].sel(intervention=VARIABLE), own)
    assert result.pooled()[0] == 1
    assert result.pooled(ANOTHER_LOOP)[0] == 0
    assert result.pooled(SAME_VALUE)[0] == 1


def test_variables_in_each_others_subspaces_are_wrong():
    model, program, batch = known("parity")
    crossed = {"bit": model.subspace("parity"), "parity": model.subspace("bit")}
    result = interchange_study(model, batch, program, subspaces=crossed, pairs_per_loop=16)
    assert result.pooled()[0] == 0
    assert result.pooled(ANOTHER_VARIABLE)[0] == 1
    assert result.findings()[0].good is False


def test_a_subspace_that_holds_more_than_the_variable_is_told_by_donors_of_the_same_value():
    model, program, batch = known("lookahead")
    where = {"makes": torch.eye(model.d_model)}
    result = interchange_study(model, batch, program, subspaces=where, pairs_per_loop=32)
    assert result.pooled(SAME_VALUE)[0] < 0.9
    assert result.findings()[0].good is False


@pytest.mark.parametrize(
    ("own", "rival"),
    [("ripple", "latched_chain"), ("lookahead", "ripple"), ("ripple_held_2", "ripple")],
)
def test_a_rival_program_is_right_less_often(own, rival):
    model, _, batch = known(own)
    wrong = interchange_study(model, batch, PROGRAMS[rival], pairs_per_loop=16)
    right = interchange_study(model, batch, PROGRAMS[own], pairs_per_loop=16)
    assert right.pooled()[0] == 1
    assert wrong.pooled()[2] < 0.8
    assert wrong.findings()[0].good is False


def test_an_untrained_model_does_nothing_that_the_program_says(untrained):
    _, program, batch = known("ripple")
    result = interchange_study(untrained, batch, program, pairs_per_loop=16)
    assert result.pooled()[1] <= result.pooled(NOTHING)[2]
    assert np.nanmean(result.data["undisturbed"]) < 0.5
    assert result.findings()[0].good is False


@pytest.mark.parametrize("rank", [None, 3])
def test_scores_are_those_of_one_patched_run_at_a_time(rank, untrained, monkeypatch):
    from loopinterp.comparison import variable_interchange

    _, program, batch = known("ripple")
    seen: list[Any] = []
    found = variable_interchange._VariablePairs.draw
    monkeypatch.setattr(
        variable_interchange._VariablePairs,
        "draw",
        lambda self, *given: seen.append(found(self, *given)) or seen[-1],
    )
    rows = torch.linalg.qr(torch.randn(16, 3, generator=torch.Generator().manual_seed(0))).Q.mT
    held = None if rank is None else rows
    where = None if held is None else {"carry": held}
    result = interchange_study(untrained, batch, program, subspaces=where, pairs_per_loop=6)
    (pairs,) = seen
    scores: dict[tuple[int, int], list[bool]] = {}
    for k in range(len(pairs)):
        loop = int(pairs.loop[k])
        told, right = one_patched_run(untrained, program, batch, pairs, k, held)
        for delay in told.nonzero().flatten().tolist():
            scores.setdefault((loop, delay), []).append(bool(right[delay]))
    measured = result.iia.sel(variable="carry")
    assert int(measured.sel(delay=[str(d) for d in range(N + 1)]).notnull().sum()) == len(scores)
    for (loop, delay), right in scores.items():
        assert float(measured.sel(loop=loop, delay=str(delay))) == pytest.approx(np.mean(right))


@torch.no_grad()
def one_patched_run(
    model: Any, program: LoopProgram, batch: Batch, pairs: Any, k: int, rows: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of one pair, by delay: whether the program's answer changes, and the model follows."""
    base, source = (pairs.inputs[int(r[k])][None] for r in (pairs.base, pairs.source))
    loop, at = int(pairs.loop[k]), int(pairs.positions[k, 0])

    def model_run(tokens: torch.Tensor, n_loops: int, h: Any = None) -> list[torch.Tensor]:
        iteration = bind(model, tokens)
        found = [iteration.h0 if h is None else h]
        for _ in range(n_loops):
            found.append(iteration.step(found[-1]))
        return found

    horizon = pairs.n_loops - loop
    own, donor = (model_run(x, loop)[-1] for x in (base, source))
    change = donor[0, at] - own[0, at]
    h = own.clone()
    h[0, at] += change if rows is None else rows.T @ (rows @ change)
    readout = bind(model, base).readout
    answers, natural = (
        torch.stack([readout(x)[0].argmax(-1) for x in model_run(base, horizon, start)])
        for start in (h, own)
    )
    state = {v: x[-1].clone() for v, x in program.run(base, n_loops=loop).variables.items()}
    taken = program.run(source, n_loops=loop).variables
    for name in state:
        state[name][0, at] = taken[name][-1, 0, at]
    exchanged = program.run(base, n_loops=horizon, variables=state).outputs[:, 0]
    plain = program.run(base, n_loops=pairs.n_loops).outputs[loop:, 0]
    assert (exchanged != UNKNOWN).all()
    asked = (batch.targets != IGNORE)[pairs.base[k]]
    told = ((exchanged != plain) & asked).any(-1)
    expected = torch.where(exchanged == plain, natural, exchanged)
    return told, ((answers == expected) | ~asked).all(-1)


def test_an_interval_counts_no_more_than_the_inputs():
    model, program, batch = known("prefix_xor")
    found = interchange_study(model, batch[:8], program, subspaces=subspaces(model))
    value, low, _, n = found.pooled()
    assert n > len(batch[:8]) == found.inputs
    assert (value, low) == (1.0, wilson_estimate(8, 8)[1])


def test_only_some_loops_may_be_asked_for():
    model, program, batch = known("ripple")
    where = subspaces(model)
    result = interchange_study(
        model, batch, program, subspaces=where, loops=[1, 3], n_loops=6, pairs_per_loop=8
    )
    assert result.iia.coords["loop"].values.tolist() == [1, 3]
    assert result.iia.coords["delay"].values.tolist() == [*map(str, range(7)), "end"]
    assert float(result.iia.min()) == 1
    # The end is the last delay of each pair.
    end, last = (result.iia.sel(loop=3, delay=d).values for d in ("end", "3"))
    np.testing.assert_array_equal(end, last)
    assert np.isnan(result.iia.sel(loop=3, delay=["4", "5", "6"])).all()


def test_the_same_seed_gives_the_same_numbers():
    model, program, batch = known("parity")
    first, again, other = (
        interchange_study(model, batch, program, pairs_per_loop=8, seed=s) for s in (3, 3, 4)
    )
    assert first.data.equals(again.data)
    assert not first.data.equals(other.data)


def test_a_result_is_read_back_with_what_it_says(tmp_path):
    result = result_of("parity")
    again = load_result(result.save(tmp_path))
    assert isinstance(again, VariableInterchange)
    assert again.data.equals(result.data)
    assert again.findings() == result.findings()
    assert "parity" in repr(again) or "variable" in repr(again)


def test_what_it_says_and_shows_has_the_controls_beside_it():
    result = result_of("parity")
    (finding,) = result.findings()
    assert finding.good and finding.value == "100%"
    for control in (RANDOM, ANOTHER_LOOP, ANOTHER_VARIABLE, NOTHING):
        assert f"{control} {round(100 * result.pooled(control)[0])}%" in finding.text
    figures = result.figures()
    when = [_when(delay) for delay in ("0", "1", END)]
    assert [f.title.split(", read ")[-1] for f in figures] == when
    assert len(list(figures[0].plot.select_traces())) == len(INTERVENTIONS) + 1
    assert "bit: 2 directions" in figures[0].caption


def test_the_weakest_place_is_named_where_it_is_not_always_right():
    model, _, batch = known("ripple_held_2")
    result = interchange_study(model, batch, "ripple", pairs_per_loop=16)
    weakest = result.findings()[1]
    assert "“carry”" in weakest.text and weakest.value == "0%"


def test_where_nothing_matters_it_says_that_it_cannot_be_said():
    model, program, batch = known("ripple")
    result = interchange_study(model, batch, program, loops=[0], pairs_per_loop=8)
    (finding,) = result.findings()
    assert finding.value == "" and finding.good is None
    assert result.figures() == []


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"batch": lambda b: b.inputs}, "data"),
        ({"batch": lambda b: b[torch.arange(1)]}, "data"),
        ({"program": "prefix_xor"}, "inputs for program prefix_xor"),
        ({"program": "paritty"}, "program"),
        ({"n_loops": -1}, "n_loops"),
        ({"loops": [0, 5]}, "loops"),
        ({"loops": [2, 1]}, "loops"),
        ({"loops": ["a"]}, "loops"),
        ({"loops": [1, 1], "n_loops": 7}, "loops"),
        ({"loops": []}, "loops"),
        ({"pairs_per_loop": 0}, "pairs_per_loop"),
        ({"subspaces": {"bits": torch.eye(9)[:1]}}, "subspaces: variable of program parity"),
        ({"subspaces": {"bit": torch.eye(8)[:1]}}, "subspace of variable 'bit'"),
        ({"subspaces": {"bit": torch.ones(9)}}, "subspace of variable 'bit'"),
        ({"subspaces": {"bit": torch.zeros(0, 9)}}, "subspace of variable 'bit'"),
        ({"subspaces": {"bit": [1.0, 0.0]}}, "subspace of variable 'bit'"),
        ({"subspaces": {"bit": 2 * torch.eye(9)[:2]}}, "subspace of variable 'bit'"),
    ],
)
@pytest.mark.usefixtures("no_type_checks")
def test_arguments_that_cannot_be_used_are_refused(change, what):
    model, program, batch = known("parity")
    given = {"program": program, "batch": lambda b: b, **change}
    chosen, inputs = given.pop("program"), given.pop("batch")(batch)
    with pytest.raises(InputError) as refused:
        interchange_study(model, inputs, chosen, **given)
    assert refused.value.what == what
