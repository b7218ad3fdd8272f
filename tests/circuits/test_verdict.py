"""The rule behind a verdict: what is named, and each thing that stands against it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import xarray as xr

from loopinterp.circuits.evidence_counts import END
from loopinterp.circuits.verdict import decide, delay_groups

DELAYS, STRATA = 4, ["all", "token: 0", "token: 1"]
BY_DELAY = ("program", "delay")


@pytest.fixture
def clear() -> xr.Dataset:
    """Two programs; the first is right everywhere, on enough pairs."""
    right = np.array([[100] * (DELAYS + 1), [100, 20, 20, 20, 20]])
    active = np.full((2, DELAYS + 1), 100)
    apart = np.full((2, 2, DELAYS + 1), 80)
    apart[0, 0] = apart[1, 1] = 0
    duel = np.zeros((2, 2, DELAYS + 1), int)
    duel[0, 1] = 80
    return xr.Dataset(
        {
            "right": (("stratum", *BY_DELAY), np.stack([right] * 3)),
            "active": (("stratum", *BY_DELAY), np.stack([active] * 3)),
            "run_right": (("program", "stratum"), np.array([[100, 50, 50], [20, 10, 10]])),
            "run_active": (("program", "stratum"), np.array([[100, 50, 50]] * 2)),
            "prefix_right": (BY_DELAY, right),
            "prefix_active": (BY_DELAY, active),
            "duel_right": (("program", "rival", "delay"), duel),
            "apart": (("program", "rival", "delay"), apart),
            "undisturbed": ("program", np.array([63.5, 63.5])),
            "decided": ("program", np.array([1.0, 1.0])),
            "n_runs": 64,
            "slipped": ("program", np.array([4, 4])),
            "worst_loop": ("program", np.array([0.95, 0.95])),
            "random_right": ("program", np.array([0, 0])),
            "exchange_right": ("program", np.array([100, 20])),
            "random_active": ("program", np.array([100, 100])),
            "unchanged": 60,
            "n_same": 60,
            # Each pair is of another input.
            "active_inputs": (("stratum", *BY_DELAY), np.stack([active] * 3)),
            "run_inputs": (("program", "stratum"), np.array([[100, 50, 50]] * 2)),
            "prefix_inputs": (BY_DELAY, active),
            "apart_inputs": (("program", "rival", "delay"), apart),
            "random_inputs": ("program", np.array([100, 100])),
            "same_inputs": 60,
            "solved": 1.0,
        },
        coords={
            "program": ["a", "b"],
            "rival": ["a", "b"],
            "stratum": STRATA,
            "delay": [*map(str, range(DELAYS)), END],
        },
    )


def changed(counts: xr.Dataset, name: str, value: float, **at: Any) -> xr.Dataset:
    made = counts.copy(deep=True)
    made[name].loc[at] = value
    return made


def test_a_program_that_holds_everywhere_is_named(clear):
    verdict = decide(clear)
    assert (verdict.winner, verdict.reasons, verdict.tied) == ("a", [], [])
    assert verdict.followed_for == verdict.longest == DELAYS - 1
    assert verdict.undisturbed == ["a", "b"]


@pytest.mark.parametrize(
    ("name", "at", "value", "reason"),
    [
        ("right", {"program": "a", "delay": "3"}, 85, "3 loops later"),
        ("run_right", {"program": "a", "stratum": "token: 1"}, 44, "token: 1"),
        ("run_right", {"program": "a", "stratum": "all"}, 90, "over all pairs"),
        ("undisturbed", {"program": "a"}, 50.0, "left alone"),
        ("worst_loop", {"program": "a"}, 0.5, "at the worst loop of one length in 50%"),
        ("duel_right", {}, 40, "not told from"),
        ("apart", {}, 0, "no pair tells it from"),
        ("random_right", {"program": "a"}, 99, "random change"),
    ],
)
def test_each_thing_that_fails_stands_against_it(clear, name, at, value, reason):
    verdict = decide(changed(clear, name, value, **at))
    assert verdict.winner is None
    assert any(reason in r for r in verdict.reasons), verdict.reasons


def test_a_donor_of_the_same_values_must_change_nothing(clear):
    verdict = decide(changed(clear, "unchanged", 50))
    assert verdict.winner is None
    assert any("holds more" in r for r in verdict.reasons)


def test_a_model_that_is_wrong_runs_no_program_for_its_task(clear):
    assert decide(changed(clear, "solved", 0.5)).winner is None


def test_a_tie_at_one_delay_is_no_tie(clear):
    later = [str(delay) for delay in range(1, DELAYS)]
    counts = changed(changed(clear, "apart", 0, delay=later), "duel_right", 0, delay=later)
    assert decide(counts).winner == "a"


def test_a_stratum_of_few_inputs_is_said_to_be_untested_and_does_not_decide(clear):
    few = {"program": "a", "stratum": "token: 1"}
    verdict = decide(changed(clear, "run_inputs", 10, **few))
    assert verdict.winner == "a"
    assert verdict.untested == ["token: 1"]


def test_many_pairs_of_few_inputs_name_nothing(clear):
    """30 of 30 have a lower end of .89, however often each is taken."""
    for name in ("active_inputs", "run_inputs"):
        assert decide(changed(clear, name, 30, stratum="all")).winner is None
    assert decide(changed(clear, "prefix_inputs", 30)).followed_for == -1


def test_few_pairs_that_clearly_fail_do_decide(clear):
    few = {"program": "a", "stratum": "token: 1"}
    counts = changed(changed(clear, "run_right", 2, **few), "run_active", 10, **few)
    assert decide(counts).winner is None


def test_one_delay_that_fails_is_not_hidden_by_those_it_is_taken_together_with(clear):
    late = {"program": "a", "delay": "3"}
    counts = changed(changed(clear, "right", 3, **late), "active", 10, **late)
    assert decide(counts).winner is None
    assert delay_groups(np.array([100, 100, 100, 10]))[-1] == (2, 3)


def test_delays_at_which_little_happens_are_taken_together():
    assert delay_groups(np.array([10, 10, 50, 5])) == [(0, 3)]
    assert delay_groups(np.array([70, 0, 0])) == [(0, 2)]
    assert delay_groups(np.array([70, 70])) == [(0, 0), (1, 1)]


def test_where_nothing_happens_nothing_is_said(clear):
    verdict = decide(changed(changed(clear, "active", 0), "right", 0))
    assert verdict.winner is None
    assert any("no exchange changes" in r for r in verdict.reasons)


def test_what_holds_is_said_when_nothing_is_named(clear):
    late = {"program": "a", "delay": ["2", "3"]}
    verdict = decide(changed(changed(clear, "prefix_right", 40, **late), "right", 40, **late))
    assert verdict.followed_for == 1
    assert "follows “a” for 1 loop" in verdict.statement


def test_a_program_that_leaves_answers_open_is_not_said_to_be_run_where_another_says_more(clear):
    assert decide(changed(clear, "decided", 0.4, program="b")).undisturbed == ["a"]


def test_how_the_nearest_lies_over_the_model_is_said_unless_it_is_plain(clear):
    plain = "loop by loop, position by position"
    assert "lies over" not in decide(clear, laid=[plain, "answers 1 loop late"]).statement
    late = decide(clear, laid=["answers 1 loop late", plain])
    assert late.winner == "a" and late.statement.endswith("so: answers 1 loop late.")


def test_a_shorter_list_has_the_same_evidence(clear):
    assert decide(clear.sel(program=["b"], rival=["b"])).winner is None
    assert decide(clear.sel(program=["a"], rival=["a"])).winner == "a"


def test_a_model_without_noise_is_allowed_no_exception(clear):
    """A near miss may differ in one exchange of a hundred; a model that errs alone may, too."""
    one_off = changed(clear, "run_right", 99, program="a", stratum="all")
    assert decide(one_off).winner == "a"
    verdict = decide(changed(one_off, "slipped", 0))
    assert verdict.winner is None
    assert "1 of 100 runs" in verdict.reasons[0]


def test_a_model_without_noise_has_none_to_blame_a_donor_of_the_same_values_on(clear):
    one_off = changed(clear, "unchanged", 59)
    assert decide(one_off).winner == "a"
    verdict = decide(changed(one_off, "slipped", 0))
    assert verdict.winner is None and "in 1 of 60 pairs" in verdict.reasons[0]


def test_exceptions_must_be_no_more_than_a_model_makes_when_left_alone(clear):
    """One slip in many runs is no licence for exceptions in one exchange of twenty."""
    counts = changed(clear, "run_right", 96, program="a", stratum="all")
    assert decide(counts).winner == "a"  # 4 of 100; left alone 4 of 64
    counts["n_runs"], counts["undisturbed"] = counts.n_runs * 100, counts.undisturbed * 100
    verdict = decide(counts)  # left alone 4 of 6,400
    assert verdict.winner is None
    assert "in 4 of 100 runs, which is more" in verdict.reasons[0]


def test_a_program_that_leaves_most_open_is_not_run(clear):
    """Open answers contradict nothing, so what it does say decides nothing."""
    at = {"program": "a"}
    counts = changed(changed(clear, "random_active", 40, **at), "exchange_right", 40, **at)
    verdict = decide(counts)
    assert verdict.winner is None
    assert "it says of 40 of 100 exchanges only" in verdict.reasons[0]


def test_too_little_data_is_not_said_to_refute(clear):
    few = {"program": "a", "stratum": "all"}
    counts = changed(changed(clear, "run_right", 20, **few), "run_active", 20, **few)
    verdict = decide(counts)
    assert verdict.winner is None
    assert verdict.statement.startswith("No program can be named; the nearest is “a”")
    refuted = decide(changed(clear, "run_right", 10, program="a"))
    assert refuted.statement.startswith("It is none of these programs")


def test_it_is_followed_no_further_than_to_a_delay_that_clearly_fails(clear):
    """Pairs of which nothing comes any more keep a run so far right, and say nothing."""
    verdict = decide(changed(clear, "right", 50, program="a", delay="2"))
    assert verdict.followed_for == 1


def test_the_share_of_runs_left_alone_is_that_of_the_program_it_is_said_of(clear):
    """The nearest does not hold; of those that do the first by name is said, with its share."""
    third = clear.sel(program=["a", "b", "b"], rival=["a", "b", "b"])
    counts = third.assign_coords(program=["b", "c", "a"], rival=["b", "c", "a"])
    counts["undisturbed"] = ("program", np.array([10.0, 63.5, 63.0]))
    text = decide(counts).statement
    assert "answers as “a” at 98% of loops (as 1 other of them would)" in text
