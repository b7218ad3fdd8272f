"""Words of a verdict: each code of a reason and of an untried interchange, and the statement."""

from __future__ import annotations

import re
from typing import Any, get_args

import numpy as np
import pytest
import xarray as xr

from loopinterp.comparison.evidence import Untried
from loopinterp.comparison.rule import Reason, ReasonCode, Verdict
from loopinterp.comparison.words import (
    UNTRIED,
    details,
    headline,
    in_loops,
    reason_in_words,
    verdict_table,
    why_none,
)
from loopinterp.programs.program import ProgramOffset

PLAIN = ProgramOffset()
SHARES = {"value": 0.75, "low": 0.64}
REASONS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "no_effect": ({}, []),
    "delay": (
        {**SHARES, "first": 2, "last": 4, "failed": 3, "delays": 9},
        ["75%", "64%", "2 to 4 loops", "3 of 9"],
    ),
    "stratum": (
        {**SHARES, "stratum": "token: 0", "pairs": 50},
        ["75%", "64%", "“token: 0”", "50 pairs"],
    ),
    "clean_runs": ({**SHARES, "worst": 0.5}, ["75%", "64%", "50%"]),
    "exceptions": ({"exceptions": 7, "runs": 80, "value": 0.02}, ["7 of 80", "2%"]),
    "silent": ({"decided": 4, "effective": 90}, ["4 of 90"]),
    "no_pair_separates": ({"program": "late_ripple"}, ["“late ripple”"]),
    "not_separated": ({"program": "late_ripple"}, ["“late ripple”"]),
    "random_change": ({"value": 0.75}, ["75%"]),
    "same_value": ({"changed": 3, "pairs": 60}, ["3 of 60"]),
    "accuracy": ({"value": 0.75}, ["75%"]),
    "models_differ": ({}, []),
    "no_model_identified": ({}, []),
}


def test_every_reason_is_rendered_with_its_values():
    assert set(REASONS) == set(get_args(ReasonCode))
    texts = {code: reason_in_words(Reason(code, values)) for code, (values, _) in REASONS.items()}  # type: ignore[arg-type]
    assert len(set(texts.values())) == len(texts)
    for code, (_, parts) in REASONS.items():
        assert all(part in texts[code] for part in parts), texts[code]


@pytest.mark.parametrize(
    ("code", "values", "part"),
    [
        ("delay", {**SHARES, "first": 1, "last": 1, "failed": 1, "delays": 9}, "1 loop later"),
        ("stratum", {**SHARES, "stratum": "all", "pairs": 50}, "all pairs"),
        ("stratum", {**SHARES, "stratum": "all", "pairs": 0}, "no pair"),
        ("exceptions", {"exceptions": 7, "runs": 80}, "exactly"),
        ("same_value", {"changed": 0, "pairs": 9}, "only 9"),
    ],
)
def test_a_reason_with_other_values_is_another_sentence(code, values, part):
    assert part in reason_in_words(Reason(code, values))


def test_every_kind_of_interchange_has_words():
    assert set(UNTRIED) == set(get_args(Untried))
    assert len(set(UNTRIED.values())) == len(UNTRIED)


def test_a_delay_is_at_once_or_later():
    assert [in_loops(delay) for delay in (0, 1, 2)] == ["at once", "1 loop later", "2 loops later"]


def arrays(shares: dict[str, float], clean: dict[str, float], effective: int = 100) -> xr.Dataset:
    """Whole-run accuracy and clean fit of some programs, as a comparison has them."""

    def estimate(values: dict[str, float]) -> np.ndarray:
        value = np.array(list(values.values()))
        return np.stack([value, value - 0.05, value + 0.05], -1)

    return xr.Dataset(
        {
            "whole_run": (("program", "stratum", "estimate"), estimate(shares)[:, None]),
            "whole_run_effective": (("program", "stratum"), np.full((len(shares), 1), effective)),
            "whole_run_inputs": (("program", "stratum"), np.full((len(shares), 1), 64)),
            "undisturbed": (("program", "estimate"), estimate(clean)),
        },
        coords={
            "program": list(shares),
            "stratum": ["all"],
            "estimate": ["value", "low", "high"],
        },
    )


def in_words(verdict: Verdict, data: xr.Dataset, offset: ProgramOffset | str = PLAIN) -> str:
    return " ".join([headline(verdict, data), *details(verdict, data, offset), why_none(verdict)])


TWO = arrays({"a": 0.34, "b_c": 0.3}, {"a": 0.99, "b_c": 0.5})


def test_an_identified_program_is_stated_with_its_numbers():
    verdict = Verdict(
        identified="a", closest="a", longest_delay=7, untested=["x: 1"], off_distribution=0.93
    )
    text = in_words(verdict, TWO)
    assert "runs “a”" in text.partition(".")[0]
    for part in ("0 to 7 loops", "34% (29–39) of 100", "64 inputs", "1 stratum", "93 of 100"):
        assert part in text


def test_indistinguishable_candidates_are_listed_together():
    verdict = Verdict(
        identified=None,
        closest="a",
        indistinguishable=["b_c"],
        equivalent=["b_c"],
        refuted=True,
        reasons=[Reason("not_separated", {"program": "b_c"})],
    )
    text = in_words(verdict, TWO)
    assert text.startswith("None of the 2 candidate programs")
    assert "best two, “a” and “b c”, predict 30–34% of 100" in text
    assert reason_in_words(verdict.reasons[0]).lower() in text.lower()


@pytest.mark.parametrize(
    ("refuted", "programs", "start"),
    [
        (True, 1, "The model does not run “a”"),
        (True, 2, "None of the 2"),
        (False, 2, "No program can be"),
    ],
)
def test_a_verdict_says_no_more_than_the_evidence_rules_out(refuted, programs, start):
    verdict = Verdict(identified=None, closest="a", refuted=refuted)
    text = in_words(verdict, TWO.isel(program=slice(programs)))
    assert text.startswith(start)
    assert ("No rival program" in text) == (programs == 1)


def test_without_an_effective_interchange_no_share_is_given():
    verdict = Verdict(identified=None, closest="a")
    text = in_words(verdict, arrays({"a": np.nan}, {"a": 1.0}, effective=0))
    assert "nan" not in text and "%" not in text


def test_the_clean_share_is_that_of_the_program_it_is_given_for():
    """The closest does not fit clean runs; of those that do the first by name is given."""
    data = arrays({"b": 0.5, "c": 0.4, "a": 0.3}, {"b": 0.2, "c": 0.99, "a": 0.98})
    verdict = Verdict(identified=None, closest="b", clean_fits=["c", "a"], followed_for=1)
    text = in_words(verdict, data)
    assert "“a” fits 98%" in text and "1 other" in text
    assert re.search(r"“b” predicts the answer for 1 loop\b", text)


def test_only_candidates_that_some_pair_separates_overlap():
    verdict = Verdict(identified=None, closest="a", indistinguishable=["b", "c"], unseparated=["b"])
    (text,) = details(verdict, TWO, PLAIN)
    assert "“c”" in text and "“b”" not in text


def test_a_program_that_predicts_up_to_the_longest_delay_is_not_said_to_fail_after_it():
    for followed, part in ((0, "not one loop later"), (2, "for 2 loops"), (3, "at every delay")):
        verdict = Verdict(identified=None, closest="a", followed_for=followed, longest_delay=3)
        assert part in in_words(verdict, TWO)


def test_a_program_offset_is_stated_unless_it_is_plain():
    verdict = Verdict(identified="a", closest="a")
    plain = in_words(verdict, TWO)
    assert in_words(verdict, TWO, str(PLAIN)) == plain  # text, in older files
    assert str(ProgramOffset(lag=1)) in in_words(verdict, TWO, ProgramOffset(lag=1))


def test_rivals_with_one_reason_stand_together():
    rivals = [Reason("not_separated", {"program": name}) for name in ("b", "c")]
    verdict = Verdict(identified=None, closest="a", reasons=[Reason("no_effect"), *rivals])
    assert why_none(verdict).count(". ") == 2 and "“b” and “c”" in why_none(verdict)


def test_a_notebook_shows_the_programs_of_a_verdict_and_its_reasons():
    none = Verdict(
        identified=None,
        closest="late_ripple",
        clean_fits=["late_ripple", "<b>"],
        reasons=[Reason("no_effect")],
    )
    table = verdict_table(none)
    assert "“late ripple” and “&lt;b&gt;”" in table
    assert why_none(none) in table and "Identified:" not in table
    assert none._repr_html_() == table
    assert "Identified: “late ripple”" in verdict_table(
        Verdict(identified="late_ripple", closest="late_ripple")
    )


def test_interventions_that_lead_off_distribution_are_counted():
    for share, part in ((0.0, "None of the 100"), (0.93, "93 of 100")):
        verdict = Verdict(identified=None, closest="a", off_distribution=share)
        assert part in headline(verdict, TWO)
