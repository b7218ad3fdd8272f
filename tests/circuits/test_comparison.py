"""The verdict on models whose program is known, and on models that run none of the rivals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from loopinterp.circuits import NONE, CircuitComparison, ProgramModel, compare_programs
from loopinterp.errors import InputError
from loopinterp.probing.probe_controls import with_random_weights
from loopinterp.rasp import list_programs
from loopinterp.results import load_result

SMALL: dict[str, Any] = {"n": 12, "per_place": 10, "max_chain": 5}

# One shot keeps nothing from loop to loop, so that a swap shows at once and never again.
REMEMBERING = [name for name in list_programs("addition") if name != "one_shot"]
TWO = ["ripple", "latched_chain"]


@pytest.fixture(scope="module")
def ripple(program_model) -> CircuitComparison:
    return compare_programs(program_model("ripple"), TWO, **SMALL)


@pytest.mark.parametrize("name", REMEMBERING)
def test_every_rival_is_named_on_its_own_model(name, program_model):
    result = compare_programs(program_model(name), **SMALL)
    assert result.verdict.winner == name
    own = result.programs.index(name)
    assert result.iia[0, own, -1, 1:].tolist() == [1.0, 1.0, 1.0]
    others = np.delete(result.iia[0, :, -1, 1], own)
    assert others.max() < 0.9
    assert result.control[0, own, -1, 1] < 0.7
    assert result.alignments[0][own] == "loop by loop, position by position"
    assert result.behaviour[0, own] == pytest.approx(1.0, abs=0.5)
    assert result.front_measured == [True]


def test_the_plain_and_the_latched_ripple_are_told_apart_at_and_behind_the_front(program_model):
    for own, other in (TWO, TWO[::-1]):
        result = compare_programs(program_model(own), TWO, **SMALL)
        assert result.verdict.winner == own
        wrong, right = result.programs.index(other), result.programs.index(own)
        assert result.iia_high[0, wrong, -1, 1] < result.iia_low[0, right, -1, 1]
        assert result.iia[0, wrong, 1, 1] == 0.0  # at the front
        assert result.iia[0, wrong, 2:4, 2].tolist() == [0.0, 0.0]  # behind it, two loops later


def test_a_program_that_is_no_rival_is_none_of_these(program_model):
    result = compare_programs(program_model("carry_save"), TWO, **SMALL)
    assert result.verdict.winner == NONE
    assert result.verdict.reasons


def test_a_program_that_remembers_nothing_cannot_be_named_by_what_comes_later(program_model):
    result = compare_programs(program_model("one_shot"), ["one_shot", *TWO], **SMALL)
    assert result.iia[0, 0, -1].tolist() == [1.0] * 4
    assert result.verdict.winner == NONE
    assert any("random directions" in reason for reason in result.verdict.reasons)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_model_with_shuffled_weights_is_none_of_these(untrained, seed):
    result = compare_programs(with_random_weights(untrained, seed=seed), TWO, seed=seed, **SMALL)
    verdict = result.verdict
    assert verdict.winner == NONE
    assert any("inputs right" in reason for reason in verdict.reasons)
    assert "none of the" in result.summary()[0].text
    assert result.summary()[0].good is False


def test_a_rival_that_says_nothing_is_not_named_on_a_model_that_does_nothing(untrained):
    # Far ahead of its front, a program says that swaps change nothing; so it agrees with any
    # model whose swaps do nothing, but no better than random directions do.
    result = compare_programs(untrained, ["latched_ripple", "ripple"], **SMALL)
    best = result.programs.index(result.verdict.nearest)
    assert result.iia_low[0, best, -1, 1] <= result.control_high[0, best, -1, 1]


def test_models_of_one_program_are_pooled(additions, program_model):
    models = [
        ProgramModel(program_model("ripple").program, additions.inputs, n_loops=18, seed=s)
        for s in range(3)
    ]
    result = compare_programs(models, ["ripple", "sticky_ripple"], names=list("abc"), **SMALL)
    assert result.models == ["a", "b", "c", "all models"]
    assert [result.verdict_of(m).winner for m in result.models] == ["ripple"] * 4
    assert result.iia.shape[0] == 4
    assert result.flips.shape[0] == 3


def test_models_of_different_programs_have_no_common_one(program_model):
    models = [program_model("ripple"), program_model("latched_chain")]
    result = compare_programs(models, TWO, **SMALL)
    assert result.verdict_of(0).winner == "ripple"
    assert result.verdict_of(1).winner == "latched_chain"
    assert result.verdict.winner == NONE


def test_flips_of_the_model_are_those_its_program_says(ripple):
    own = ripple.programs.index("ripple")
    np.testing.assert_array_equal(ripple.flips[0], ripple.claims[0, own])
    assert ripple.n_pairs.sum() == 6 * SMALL["per_place"]


def test_the_verdict_in_words(ripple):
    verdict, hold = ripple.summary()
    assert verdict.kind == "verdict"
    assert verdict.value == "ripple"
    assert verdict.good is True
    assert "100%" in verdict.text
    assert "random directions" in verdict.text
    assert "two loops later" in hold.text


def test_results_go_to_disk_and_back(ripple, tmp_path):
    read = load_result(ripple.save(tmp_path))
    assert isinstance(read, CircuitComparison)
    assert read.verdict == ripple.verdict
    np.testing.assert_array_equal(read.iia, ripple.iia)
    table = read.to_frame()
    assert len(table) == len(ripple.programs) * len(ripple.places) * len(ripple.delays)
    row = table.query("program == 'ripple' and place == 'at' and delay == '1 loop later'")
    assert row["iia"].item() == 1.0


def test_same_seed_same_result(program_model, ripple):
    again = compare_programs(program_model("ripple"), TWO, **SMALL)
    np.testing.assert_array_equal(again.iia_low, ripple.iia_low)
    np.testing.assert_array_equal(again.control, ripple.control)


@pytest.mark.parametrize("programs", [[], ["parity"], ["ripple", "ripple"]])
def test_rivals_must_be_programs_of_addition(program_model, programs):
    with pytest.raises(InputError, match="programs"):
        compare_programs(program_model("ripple"), programs, **SMALL)


def test_names_must_fit(program_model):
    with pytest.raises(InputError, match="names"):
        compare_programs(program_model("ripple"), names=["a", "b"], **SMALL)
