"""Tools on models whose circuit is known: right where all is as said, and not where it is not."""

import dataclasses

import numpy as np
import pytest
import torch

from loopinterp.errors import InputError
from loopinterp.ground_truth import (
    CHECKS,
    GroundTruth,
    ground_truth_study,
    make_subjects,
    robustness_study,
)
from loopinterp.ground_truth.attention import score_heads
from loopinterp.ground_truth.dynamics import score_dynamics
from loopinterp.ground_truth.interventions import (
    probed_subspaces,
    score_interchange,
    score_patching,
)
from loopinterp.ground_truth.probes import score_probes
from loopinterp.rasp import get_program
from loopinterp.rasp.compiler.circuit import Directions


@pytest.fixture(scope="module")
def ripple():
    return make_subjects(["ripple"], n=5, examples=128)[0]


@pytest.fixture(scope="module")
def result(ripple):
    others = make_subjects(["parity", "copy"], n=4, examples=128)
    return ground_truth_study([ripple, *others])


def said_to_run(subject, program):
    """The same model, said to run another program."""
    compiled = dataclasses.replace(subject.compiled, program=get_program(program))
    return dataclasses.replace(subject, compiled=compiled)


def test_every_check_is_passed_where_the_circuit_is_as_it_is_said_to_be(result):
    assert result.missed == []
    assert np.nansum(result.passed) >= 3 * 11


def test_every_check_that_can_be_asked_of_a_short_model_is_asked(result):
    asked = {key for k, key in enumerate(result.checks) if not np.isnan(result.value[:, k]).all()}
    assert {check.key for check in CHECKS} - asked == {
        "decodable, not used",  # of distractors
        "wavefront",
        "verdict",
    }


def test_wrong_directions_fail_interchange_and_the_probe_that_should_find_nothing_else(ripple):
    circuit = ripple.compiled.circuit
    width = ripple.compiled.model.config.d_model
    elsewhere = torch.linalg.qr(torch.randn(width, 2, generator=torch.Generator().manual_seed(0))).Q
    moved = {**circuit.directions, "carry": Directions(elsewhere.T, elsewhere.T)}
    wrong = dataclasses.replace(circuit, directions=moved)
    subject = dataclasses.replace(
        ripple, compiled=dataclasses.replace(ripple.compiled, circuit=wrong)
    )
    assert score_interchange(subject)["interchange"].value < 0.5
    assert score_probes(subject)["probe finds nothing else"].value > 0.03


def test_a_model_that_runs_a_rival_fails_interchange_and_patching():
    (sticky,) = make_subjects(["sticky_ripple"], n=8, examples=128)
    subject = said_to_run(sticky, "ripple")
    assert score_interchange(sticky)["interchange"].value == 1
    assert score_interchange(subject)["interchange"].value < 1
    assert score_patching(sticky)["patched states"].value == 1
    assert score_patching(subject)["patched states"].value < 1


def test_a_program_that_settles_at_other_loops_fails_the_dynamics():
    (chain,) = make_subjects(["latched_chain"], n=6, examples=64)
    assert score_dynamics(chain)["settling loop"].value == 1
    assert score_dynamics(said_to_run(chain, "latched_ripple"))["settling loop"].value < 0.9


def test_a_head_said_to_compute_another_selector_is_not_found():
    (subject,) = make_subjects(["lookahead"], n=5, examples=64)
    circuit = subject.compiled.circuit
    swapped = {"shift_1": "span_back", "span_back": "shift_1"}
    heads = tuple(
        dataclasses.replace(head, selector=swapped[head.selector]) for head in circuit.heads
    )
    wrong = dataclasses.replace(circuit, heads=heads)
    lied = dataclasses.replace(
        subject, compiled=dataclasses.replace(subject.compiled, circuit=wrong)
    )
    assert score_heads(subject)["heads found"].value == 1
    assert score_heads(lied)["heads found"].value < 1


def test_a_probe_finds_the_directions_of_a_variable_by_itself(ripple):
    found = probed_subspaces(ripple)["carry"]
    known = ripple.compiled.circuit.subspace("carry")
    # The difference of the two values; the sum of both is constant, and nothing to find.
    difference = (known[0] - known[1]) / 2**0.5
    directions = [known[0] - known[1], known[0] + known[1], difference]
    assert found.shape == (1, ripple.compiled.model.config.d_model)
    assert max(abs(float(found[0] @ d)) / float(d.norm()) for d in directions) > 0.99


def test_the_result_is_read_back_as_it_was_saved(result, tmp_path):
    again = GroundTruth.load(result.save(tmp_path))
    np.testing.assert_array_equal(again.value, result.value)
    assert again.models == result.models
    assert again.summary() == result.summary()


def test_the_table_figures_and_summary_say_what_was_missed(result):
    value = result.value.copy()
    value[1, result.checks.index("interchange")] = 0.25
    missed = dataclasses.replace(result, value=value)
    assert [row[:2] for row in missed.missed] == [("parity", "interchange")]
    (finding,) = missed.summary()
    assert not finding.good and "interchange on parity (0.25)" in finding.text
    assert "interchange on parity" in missed.figures()[0].caption
    assert missed.table().loc["parity", "interchange"] == 0.25
    assert len(missed.figures()[1].data) >= 11


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda s: ground_truth_study([]), "at least one"),
        (lambda s: ground_truth_study([s, s]), "another name"),
        (lambda s: ground_truth_study([s], tools=["probe"]), "tool"),
        (lambda s: make_subjects(["ripple"], examples=4), "at least 8"),
        (lambda s: make_subjects(["ripples"]), "ripple"),
        (lambda s: GroundTruth.score(ground_truth_study([s], tools=["dynamics"]), "x", "y"), "x"),
    ],
)
def test_bad_arguments_are_named(call, words, ripple):
    with pytest.raises(InputError, match=words):
        call(ripple)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda s: ground_truth_study([s], tools=[]), "a list of tools"),
        (lambda s: ground_truth_study([s], tools="probes"), "a list of tools"),
        (lambda s: make_subjects("ripple"), r"Pass \['ripple'\]"),
        (lambda s: make_subjects(["ripple"], n=0), "n: expected an integer >= 1"),
        (lambda s: robustness_study(["ripple"], levels=[]), "levels"),
    ],
)
def test_what_is_no_list_of_subjects_or_tools_is_refused(call, words, ripple):
    with pytest.raises(InputError, match=words):
        call(ripple)


def test_noise_spoils_the_tools_no_sooner_than_the_behaviour():
    result = robustness_study(["prefix_xor"], levels=(0.001, 0.5), n=4, examples=64)
    assert result.behaviour[0] == 1 and result.value[0].min() == 1
    assert result.behaviour[1] < 0.9 and result.value[1].min() < 0.9
    (finding,) = result.summary()
    assert "0.1%" in finding.text
    assert len(result.figures()) == 1
