"""The rule behind a verdict: what is named, and each thing that stands against it."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from loopinterp.circuits.verdict import Counts, decide, delay_groups

DELAYS, STRATA = 4, ["all", "token: 0", "token: 1"]


@pytest.fixture
def clear() -> Counts:
    """Two programs; the first is right everywhere, on enough pairs."""
    right = np.array([[100] * DELAYS, [100, 20, 20, 20]])
    active = np.full((2, DELAYS), 100)
    apart = np.full((2, 2, DELAYS), 80)
    apart[0, 0] = apart[1, 1] = 0
    duel = np.zeros((2, 2, DELAYS), int)
    duel[0, 1] = 80
    return Counts(
        programs=["a", "b"],
        right=right,
        active=active,
        run_right=np.array([[100, 50, 50], [20, 10, 10]]),
        run_active=np.array([[100, 50, 50]] * 2),
        strata=STRATA,
        prefix_right=right,
        prefix_active=active,
        duel_right=duel,
        apart=apart,
        undisturbed=np.array([63.5, 63.5]),
        decided=np.array([1.0, 1.0]),
        n_runs=64,
        random_right=np.array([0, 0]),
        swap_right=np.array([100, 20]),
        random_active=np.array([100, 100]),
        unchanged=60,
        n_same=60,
        solved=1.0,
    )


def changed(counts: Counts, name: str, at: Any, value: float) -> Counts:
    array = np.array(getattr(counts, name), copy=True)
    array[at] = value
    return dataclasses.replace(counts, **{name: array})


def test_a_program_that_holds_everywhere_is_named(clear):
    verdict = decide(clear)
    assert (verdict.winner, verdict.reasons, verdict.tied) == ("a", [], [])
    assert verdict.followed_for == DELAYS - 1
    assert verdict.undisturbed == ["a", "b"]


@pytest.mark.parametrize(
    ("name", "at", "value", "reason"),
    [
        ("right", (0, 3), 85, "3 loops later"),
        ("run_right", (0, 2), 44, "token: 1"),
        ("run_right", (0, 0), 90, "over all pairs"),
        ("undisturbed", 0, 50.0, "left alone"),
        ("duel_right", (0, 1), 40, "not told from"),
        ("apart", (0, 1), 0, "no pair tells it from"),
        ("random_right", 0, 99, "random change"),
    ],
)
def test_each_thing_that_fails_stands_against_it(clear, name, at, value, reason):
    counts = changed(clear, name, at, value)
    if name == "duel_right":
        counts = changed(counts, name, (1, 0), 40)
    if name == "apart":
        counts = changed(counts, name, (1, 0), 0)
    verdict = decide(counts)
    assert verdict.winner is None
    assert any(reason in r for r in verdict.reasons), verdict.reasons


def test_a_donor_of_the_same_values_must_change_nothing(clear):
    verdict = decide(dataclasses.replace(clear, unchanged=50))
    assert verdict.winner is None
    assert any("holds more" in r for r in verdict.reasons)


def test_a_model_that_is_wrong_runs_no_program_for_its_task(clear):
    assert decide(dataclasses.replace(clear, solved=0.5)).winner is None


def test_a_tie_at_one_delay_is_no_tie(clear):
    apart = clear.apart.copy()
    apart[:, :, 1:] = 0
    duel = clear.duel_right.copy()
    duel[:, :, 1:] = 0
    assert decide(dataclasses.replace(clear, apart=apart, duel_right=duel)).winner == "a"


def test_a_stratum_of_few_pairs_is_said_to_be_untested_and_does_not_decide(clear):
    counts = changed(changed(clear, "run_right", (0, 2), 10), "run_active", (0, 2), 10)
    verdict = decide(counts)
    assert verdict.winner == "a"
    assert verdict.untested == ["token: 1"]


def test_few_pairs_that_clearly_fail_do_decide(clear):
    counts = changed(changed(clear, "run_right", (0, 2), 2), "run_active", (0, 2), 10)
    assert decide(counts).winner is None


def test_one_delay_that_fails_is_not_hidden_by_those_it_is_taken_together_with(clear):
    counts = changed(changed(clear, "right", (0, 3), 3), "active", (0, 3), 10)
    verdict = decide(counts)
    assert verdict.winner is None
    assert delay_groups(counts.active[0])[-1] == (2, 3)


def test_delays_at_which_little_happens_are_taken_together():
    assert delay_groups(np.array([10, 10, 50, 5])) == [(0, 3)]
    assert delay_groups(np.array([70, 0, 0])) == [(0, 2)]
    assert delay_groups(np.array([70, 70])) == [(0, 0), (1, 1)]


def test_where_nothing_happens_nothing_is_said(clear):
    zero = np.zeros_like(clear.active)
    counts = dataclasses.replace(clear, active=zero, right=zero)
    verdict = decide(counts)
    assert verdict.winner is None
    assert any("no exchange changes" in r for r in verdict.reasons)


def test_what_holds_is_said_when_nothing_is_named(clear):
    counts = changed(clear, "prefix_right", (0, slice(2, None)), 40)
    counts = changed(counts, "right", (0, slice(2, None)), 40)
    verdict = decide(counts)
    assert verdict.followed_for == 1
    assert "follows “a” for 1 loop" in verdict.statement


def test_a_program_that_leaves_answers_open_is_not_said_to_be_run_where_another_says_more(clear):
    counts = dataclasses.replace(clear, decided=np.array([1.0, 0.4]))
    assert decide(counts).undisturbed == ["a"]


def test_a_shorter_list_has_the_same_evidence(clear):
    only = clear.only(["b"])
    assert only.right.tolist() == [clear.right[1].tolist()]
    assert only.apart.shape == (1, 1, DELAYS)
    assert decide(only).winner is None
    assert decide(clear.only(["a"])).winner == "a"


def test_a_model_without_noise_is_allowed_no_exception(clear):
    """A near miss may differ in one exchange of a hundred; a model that errs alone may, too."""
    one_off = changed(clear, "run_right", (0, 0), 99)
    assert decide(one_off).winner == "a"
    exact = dataclasses.replace(one_off, undisturbed=np.array([64.0, 64.0]))
    verdict = decide(exact)
    assert verdict.winner is None
    assert "1 of 100 runs" in verdict.reasons[0]
