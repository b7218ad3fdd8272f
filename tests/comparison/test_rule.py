"""The rule: which program is identified, and each code and value of a reason against it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import xarray as xr

from loopinterp.comparison.counts import END, MANIFOLD, UNREACHED
from loopinterp.comparison.rule import decide, delay_groups

DELAYS, STRATA = 4, ["all", "token: 0", "token: 1"]
BY_DELAY = ("program", "delay")


@pytest.fixture
def clear() -> xr.Dataset:
    """Two programs; the first is right everywhere, on enough pairs."""
    right = np.array([[100] * (DELAYS + 1), [100, 20, 20, 20, 20]])
    effective = np.full((2, DELAYS + 1), 100)
    apart = np.full((2, 2, DELAYS + 1), 80)
    apart[0, 0] = apart[1, 1] = 0
    duel = np.zeros((2, 2, DELAYS + 1), int)
    duel[0, 1] = 80
    return xr.Dataset(
        {
            "right": (("stratum", *BY_DELAY), np.stack([right] * 3)),
            "effective": (("stratum", *BY_DELAY), np.stack([effective] * 3)),
            "run_right": (("program", "stratum"), np.array([[100, 50, 50], [20, 10, 10]])),
            "run_effective": (("program", "stratum"), np.array([[100, 50, 50]] * 2)),
            "prefix_right": (BY_DELAY, right),
            "prefix_effective": (BY_DELAY, effective),
            "duel_right": (("program", "rival", "delay"), duel),
            "apart": (("program", "rival", "delay"), apart),
            "undisturbed": ("program", np.array([63.5, 63.5])),
            "decided": ("program", np.array([1.0, 1.0])),
            "n_runs": 64,
            "slipped": ("program", np.array([4, 4])),
            "worst_loop": ("program", np.array([0.95, 0.95])),
            "random_right": ("program", np.array([0, 0])),
            "interchange_right": ("program", np.array([100, 20])),
            "random_effective": ("program", np.array([100, 100])),
            "unchanged": 60,
            "n_same": 60,
            # Each pair is of another input.
            "effective_inputs": (("stratum", *BY_DELAY), np.stack([effective] * 3)),
            "run_inputs": (("program", "stratum"), np.array([[100, 50, 50]] * 2)),
            "prefix_inputs": (BY_DELAY, effective),
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


def test_a_program_that_holds_everywhere_is_identified(clear):
    verdict = decide(clear)
    assert (verdict.identified, verdict.reasons, verdict.unseparated) == ("a", [], [])
    assert verdict.followed_for == verdict.longest_delay == DELAYS - 1
    assert verdict.clean_fits == ["a", "b"]


@pytest.mark.parametrize(
    ("name", "at", "value", "reason"),
    [
        ("right", {"program": "a", "delay": "3"}, 85, ("delay", {"first": 3, "failed": 1})),
        (
            "run_right",
            {"program": "a", "stratum": "token: 1"},
            44,
            ("stratum", {"stratum": "token: 1", "value": 0.88, "pairs": 50}),
        ),
        ("run_right", {"program": "a", "stratum": "all"}, 90, ("stratum", {"stratum": "all"})),
        ("undisturbed", {"program": "a"}, 50.0, ("clean_runs", {"value": 50 / 64})),
        ("worst_loop", {"program": "a"}, 0.5, ("clean_runs", {"worst": 0.5})),
        ("duel_right", {}, 40, ("not_separated", {"program": "b"})),
        ("apart", {}, 0, ("no_pair_separates", {"program": "b"})),
        ("random_right", {"program": "a"}, 99, ("random_change", {"value": 0.99})),
    ],
)
def test_each_thing_that_fails_stands_against_it(clear, name, at, value, reason):
    verdict = decide(changed(clear, name, value, **at))
    assert verdict.identified is None
    code, values = reason
    assert reason_of(verdict, code) | values == reason_of(verdict, code)


def reason_of(verdict, code):
    """The values of the reason of that code."""
    [values] = [reason.values for reason in verdict.reasons if reason.code == code]
    return values


def test_a_source_of_the_same_values_must_change_nothing(clear):
    verdict = decide(changed(clear, "unchanged", 50))
    assert verdict.identified is None
    assert reason_of(verdict, "same_value") == {"changed": 10, "pairs": 60}


def test_a_model_that_is_wrong_runs_no_program_for_its_task(clear):
    assert decide(changed(clear, "solved", 0.5)).identified is None


def test_a_tie_at_one_delay_is_no_tie(clear):
    later = [str(delay) for delay in range(1, DELAYS)]
    counts = changed(changed(clear, "apart", 0, delay=later), "duel_right", 0, delay=later)
    assert decide(counts).identified == "a"


def test_a_stratum_of_few_inputs_is_said_to_be_untested_and_does_not_decide(clear):
    few = {"program": "a", "stratum": "token: 1"}
    verdict = decide(changed(clear, "run_inputs", 10, **few))
    assert verdict.identified == "a"
    assert verdict.untested == ["token: 1"]


def test_many_pairs_of_few_inputs_name_nothing(clear):
    """30 of 30 have a lower end of .89, however often each is taken."""
    for name in ("effective_inputs", "run_inputs"):
        assert decide(changed(clear, name, 30, stratum="all")).identified is None
    assert decide(changed(clear, "prefix_inputs", 30)).followed_for == -1


def test_few_pairs_that_clearly_fail_do_decide(clear):
    few = {"program": "a", "stratum": "token: 1"}
    counts = changed(changed(clear, "run_right", 2, **few), "run_effective", 10, **few)
    assert decide(counts).identified is None


def test_one_delay_that_fails_is_not_hidden_by_those_it_is_taken_together_with(clear):
    late = {"program": "a", "delay": "3"}
    counts = changed(changed(clear, "right", 3, **late), "effective", 10, **late)
    assert decide(counts).identified is None
    assert delay_groups(np.array([100, 100, 100, 10]))[-1] == (2, 3)


def test_delays_at_which_little_happens_are_taken_together():
    assert delay_groups(np.array([10, 10, 50, 5])) == [(0, 3)]
    assert delay_groups(np.array([70, 0, 0])) == [(0, 2)]
    assert delay_groups(np.array([70, 70])) == [(0, 0), (1, 1)]


def test_where_nothing_happens_nothing_is_said(clear):
    verdict = decide(changed(changed(clear, "effective", 0), "right", 0))
    assert verdict.identified is None
    assert reason_of(verdict, "no_effect") == {}


def test_what_holds_is_said_when_nothing_is_identified(clear):
    late = {"program": "a", "delay": ["2", "3"]}
    verdict = decide(changed(changed(clear, "prefix_right", 40, **late), "right", 40, **late))
    assert verdict.followed_for == 1


def test_a_program_that_leaves_answers_open_is_not_said_to_be_run_where_another_says_more(clear):
    assert decide(changed(clear, "decided", 0.4, program="b")).clean_fits == ["a"]


def test_a_shorter_list_has_the_same_evidence(clear):
    assert decide(clear.sel(program=["b"], rival=["b"])).identified is None
    assert decide(clear.sel(program=["a"], rival=["a"])).identified == "a"


def test_a_model_without_noise_is_allowed_no_exception(clear):
    """A near miss may differ in one exchange of a hundred; a model that errs alone may, too."""
    one_off = changed(clear, "run_right", 99, program="a", stratum="all")
    assert decide(one_off).identified == "a"
    verdict = decide(changed(one_off, "slipped", 0))
    assert verdict.identified is None
    assert reason_of(verdict, "exceptions") == {"exceptions": 1, "runs": 100}


def test_a_model_without_noise_has_none_to_blame_a_source_of_the_same_values_on(clear):
    one_off = changed(clear, "unchanged", 59)
    assert decide(one_off).identified == "a"
    verdict = decide(changed(one_off, "slipped", 0))
    assert verdict.identified is None
    assert reason_of(verdict, "same_value") == {"changed": 1, "pairs": 60}


def test_exceptions_must_be_no_more_than_a_model_makes_when_left_alone(clear):
    """One slip in many runs is no licence for exceptions in one exchange of twenty."""
    counts = changed(clear, "run_right", 96, program="a", stratum="all")
    assert decide(counts).identified == "a"  # 4 of 100; in clean runs 4 of 64
    counts["n_runs"], counts["undisturbed"] = counts.n_runs * 100, counts.undisturbed * 100
    verdict = decide(counts)  # in clean runs 4 of 6,400
    assert verdict.identified is None
    values = reason_of(verdict, "exceptions")
    assert values["exceptions"] == 4 and values["value"] == pytest.approx(4 / 6400)


def test_a_program_that_leaves_most_open_is_not_run(clear):
    """Open answers contradict nothing, so what it does say decides nothing."""
    at = {"program": "a"}
    counts = changed(changed(clear, "random_effective", 40, **at), "interchange_right", 40, **at)
    verdict = decide(counts)
    assert verdict.identified is None
    assert reason_of(verdict, "silent") == {"decided": 40, "effective": 100}


def test_too_little_data_is_not_said_to_refute(clear):
    few = {"program": "a", "stratum": "all"}
    counts = changed(changed(clear, "run_right", 20, **few), "run_effective", 20, **few)
    verdict = decide(counts)
    assert verdict.identified is None
    assert not verdict.refuted
    assert decide(changed(clear, "run_right", 10, program="a")).refuted


def test_it_is_followed_no_further_than_to_a_delay_that_clearly_fails(clear):
    """Pairs of which nothing comes any more keep a run so far right, and say nothing."""
    verdict = decide(changed(clear, "right", 50, program="a", delay="2"))
    assert verdict.followed_for == 1


def test_candidates_with_overlapping_intervals_are_all_listed(clear):
    """Neither is identified, and the closest is no more than its rival."""
    close = changed(changed(clear, "run_right", 34, program="a"), "run_right", 30, program="b")
    verdict = decide(close)
    assert (verdict.identified, verdict.closest, verdict.unseparated) == (None, "a", [])
    assert verdict.indistinguishable == ["b"]
    apart = decide(changed(close, "run_right", 5, program="b"))
    assert (apart.closest, apart.indistinguishable) == ("a", [])


def test_those_that_no_pair_separates_are_listed_and_asked_for_equivalence(clear):
    tied = changed(clear, "apart", 0)
    verdict = decide(tied, equivalent=lambda first, second: (first, second) == ("a", "b"))
    assert verdict.indistinguishable == verdict.unseparated == verdict.equivalent == ["b"]
    assert decide(tied, equivalent=lambda *_: False).equivalent == []
    assert decide(clear).indistinguishable == []  # one is identified


def test_the_share_of_interchanges_to_states_that_no_clean_run_reaches(clear):
    name = f"{MANIFOLD}: {UNREACHED}"
    counts = clear.assign_coords(stratum=["all", name, "token: 1"])
    counts["run_effective"].loc[{"stratum": name}] = 93
    verdict = decide(counts)
    assert verdict.off_distribution == 0.93
    assert math.isnan(decide(clear).off_distribution)  # nothing is known of it
