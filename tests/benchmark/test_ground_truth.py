"""Tools on models whose circuit is known: right where all is as said, and not where it is not."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from loopinterp.benchmark import (
    CHECKS,
    GroundTruth,
    KnownModel,
    ground_truth_study,
    known_models,
)
from loopinterp.benchmark.mechanism_scores import (
    rivals_of,
    score_dynamics,
    score_heads,
    score_interchange,
    score_patching,
    score_probes,
    score_verdict,
)
from loopinterp.comparison import program_comparison
from loopinterp.compiler.circuit import Directions
from loopinterp.core.errors import InputError
from loopinterp.core.results import load_result
from loopinterp.programs import full, get_program, var
from tests.small_studies import name_on_few_pairs


@pytest.fixture(scope="module", autouse=True)
def few_pairs():
    """A program is named on a sixth of the usual pairs."""
    with pytest.MonkeyPatch.context() as patch:
        name_on_few_pairs(patch, program_comparison, 1024, same_value=96)
        yield


@pytest.fixture(scope="module")
def ripple():
    return known_models(["ripple"], n=5, examples=96)[0]


@pytest.fixture(scope="module")
def result(ripple):
    return ground_truth_study([ripple, *known_models(["parity", "copy"], n=4, examples=128)])


def said_to_run(known: KnownModel, program: str) -> KnownModel:
    """The same model, said to run another program."""
    compiled = dataclasses.replace(known.compiled, program=get_program(program))
    return dataclasses.replace(known, compiled=compiled)


def with_circuit(known: KnownModel, **changes) -> KnownModel:
    """The same model, with another circuit said of it."""
    circuit = dataclasses.replace(known.compiled.circuit, **changes)
    return dataclasses.replace(known, compiled=dataclasses.replace(known.compiled, circuit=circuit))


def test_every_check_is_passed_where_the_circuit_is_as_it_is_said_to_be(result):
    assert result.missed == []
    assert int(result.passed.sum()) >= 3 * 14


def test_every_check_that_can_be_asked_of_a_short_model_is_asked(result):
    applicable = result.data.dropna("check", how="all", subset=["value"])["check"].values
    assert {check.key for check in CHECKS} - set(applicable) == {
        "decodable, not used",  # of distractors
        "wavefront",  # of longer additions
    }


def test_wrong_directions_fail_interchange_and_the_probe_that_should_find_nothing_else(ripple):
    circuit = ripple.compiled.circuit
    width = ripple.compiled.model.config.d_model
    elsewhere = torch.linalg.qr(torch.randn(width, 2, generator=torch.Generator().manual_seed(0))).Q
    moved = {**circuit.directions, "carry": Directions(elsewhere.T, elsewhere.T)}
    subject = with_circuit(ripple, directions=moved)
    assert score_interchange(subject)["interchange"].value < 0.5
    selectivity = "probe finds nothing else"
    assert score_probes(subject)[selectivity].value > 0.03


def test_a_model_that_runs_a_rival_fails_interchange_and_patching():
    (sticky,) = known_models(["sticky_ripple"], n=6, examples=64)
    subject = said_to_run(sticky, "ripple")
    assert score_interchange(sticky)["interchange"].value == 1
    assert score_interchange(subject)["interchange"].value < 1
    assert score_patching(sticky)["patched states"].value == 1
    assert score_patching(subject)["patched states"].value < 1


def test_a_program_that_settles_at_other_loops_fails_the_dynamics():
    (chain,) = known_models(["latched_chain"], n=6, examples=64)
    assert score_dynamics(chain)["settling loop"].value == 1
    assert score_dynamics(said_to_run(chain, "latched_ripple"))["settling loop"].value < 0.9


def test_a_head_said_to_compute_another_selector_is_not_found():
    (subject,) = known_models(["lookahead"], n=5, examples=64)
    circuit = subject.compiled.circuit
    swapped = {"shift_1": "span_back", "span_back": "shift_1"}
    heads = tuple(
        dataclasses.replace(head, selector=swapped[head.selector]) for head in circuit.heads
    )
    lied = with_circuit(subject, heads=heads)
    assert score_heads(subject)["heads found"].value == 1
    assert score_heads(lied)["heads found"].value < 1


@pytest.mark.parametrize("name", ["parity", "copy", "sticky_ripple"])
def test_the_program_that_is_run_is_named_of_all_of_its_task(name):
    (known,) = known_models([name], n=4, examples=96)
    (score,) = score_verdict(known).values()
    assert score.value >= 0.95
    no_rival = len(rivals_of(known.compiled.program)) == 1
    assert np.isnan(score.control) if no_rival else score.control < score.value


def test_a_rival_that_is_said_to_run_is_not_named():
    (sticky,) = known_models(["sticky_ripple"], n=4, examples=96)
    assert score_verdict(said_to_run(sticky, "ripple"))["verdict"].value == 0


def test_rivals_read_the_same_tokens_and_the_own_program_comes_first():
    names = [p.name for p in rivals_of(get_program("sticky_ripple"))]
    assert names[0] == "sticky_ripple" and len(names) == len(set(names)) > 8
    assert [p.name for p in rivals_of(get_program("prefix_xor"))] == ["prefix_xor"]
    assert [p.name for p in rivals_of(get_program("tomita3"))] == ["tomita3"]  # not tomita6


def test_the_result_is_read_back_as_it_was_saved(result, tmp_path):
    again = load_result(result.save(tmp_path))
    assert isinstance(again, GroundTruth)
    assert again.data.equals(result.data)
    assert again.models == result.models
    assert again.findings() == result.findings()


def test_the_table_figures_and_findings_say_what_was_missed(result):
    data = result.data.copy(deep=True)
    data["value"].loc[{"model": "parity", "check": "interchange"}] = 0.25
    missed = dataclasses.replace(result, data=data)
    assert [row[:2] for row in missed.missed] == [("parity", "interchange")]
    (finding,) = missed.findings()
    assert not finding.good and "parity (0.25)" in finding.text
    right, n_checks = map(int, finding.value.split(" of "))
    assert right < n_checks
    (controls,) = missed.figures()
    *_, line = controls.code.splitlines()
    assert "missed: interchange" in line and "0.25" in line and line.endswith("parity")
    assert missed.table().loc["parity", "interchange"] == 0.25
    questions = controls.data.set_index("check")
    assert questions.loc["interchange", "worst"] == 0.25
    assert questions.loc["interchange", ["passed", "models"]].tolist() == [2, 3]


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda s: ground_truth_study([]), "models"),
        (lambda s: ground_truth_study([s, s]), "models"),
        (lambda s: ground_truth_study([s], tools=["probe"]), "tool"),
        (lambda s: ground_truth_study([s], tools=[]), "tools"),
        (lambda s: ground_truth_study([s], tools="probes"), "tools"),
        (lambda s: known_models(["ripple"], examples=4), "examples"),
        (lambda s: known_models(["ripple"], n=0), "n"),
        (lambda s: known_models(["ripples"]), "program"),
        (lambda s: known_models("ripple"), "programs"),
    ],
)
def test_bad_arguments_are_named(call, what, ripple):
    with pytest.raises(InputError) as caught:
        call(ripple)
    assert caught.value.what == what


def test_a_program_that_always_answers_the_same_can_be_asked_when_it_settles():
    still = {"x": full(0)}
    constant = dataclasses.replace(
        get_program("ripple"), name="constant", prepare=still, step={"x": var("x")}, finish=full(0)
    )
    result = ground_truth_study(known_models([constant], n=4, examples=16))
    applicable = result.data["check"].values[result.data["value"][0].notnull()]
    assert {*applicable} == {"settling loop", "answer stable", "stability"} and result.missed == []
    nothing = dataclasses.replace(result, data=result.data.where(False))
    assert nothing.missed == [] and nothing.figures() == []
    (finding,) = nothing.findings()
    assert not finding.value and not finding.good
