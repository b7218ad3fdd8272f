from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from analyses.grid_claims import CLAIMS, Claim, contrast, judge, level, pooled, verdicts

AXES = (("no", "external", "internal"), ("pre", "post"), (True, False))


def grid(seeds: int = 3, **measures: Any) -> pd.DataFrame:
    """Every cell of a small grid; a measure is a number or a function of recall and loop norm."""
    rows = [
        {"recall": recall, "norm": norm, "loop_norm": loop_norm, "seed": seed}
        for recall, norm, loop_norm in itertools.product(*AXES)
        for seed in range(seeds)
    ]
    for row, (name, make) in itertools.product(rows, measures.items()):
        level = make(row["recall"], row["loop_norm"]) if callable(make) else make
        row[name] = level + 0.01 * row["seed"]
    return pd.DataFrame(rows)


def as_said(recall: str, loop_norm: bool) -> float:
    """High with recall and the loop norm alone."""
    return 0.95 if recall != "no" and loop_norm else 0.1


def test_an_interval_is_students_where_there_is_one_setting() -> None:
    first, second = np.array([0.2, 0.4, 0.9]), np.array([0.1, 0.5])
    value, low, high, models = pooled([[first, second]])
    expected = stats.ttest_ind(first, second).confidence_interval()
    assert (low, high) == pytest.approx((expected.low, expected.high))
    assert (value, models) == (pytest.approx(first.mean() - second.mean()), 5)


def test_the_interval_over_settings_covers_the_truth_as_often_as_it_says() -> None:
    generator, inside = np.random.default_rng(0), 0
    for _ in range(600):
        cells = [[generator.normal(k + 0.5, 1, 3), generator.normal(k, 1, 3)] for k in range(4)]
        _, low, high, _ = pooled(cells)
        inside += low <= 0.5 <= high
    assert inside / 600 == pytest.approx(0.95, abs=0.03)


def test_a_difference_is_that_of_settings_alike_in_all_else() -> None:
    found = grid(exact_far=lambda recall, loop_norm: 0.3 * loop_norm + 0.5 * (recall == "external"))
    one = found.query("recall == 'external' and not loop_norm")
    found = found.drop(one.index)
    value, low, high, models = contrast(found, "exact_far", "loop_norm", True, False)
    assert value == pytest.approx(0.3)  # external recall without the loop norm has nobody to meet
    assert low < 0.3 < high and models == 24


def test_unknown_values_are_left_out_and_nothing_known_says_nothing() -> None:
    found = grid(reached=lambda recall, loop_norm: np.nan if recall == "no" else 0.9)
    assert level(found, "reached")[3] == 24
    assert np.isnan(level(found.query("recall == 'no'"), "reached")[0])
    assert np.isnan(level(found.query("seed == 0"), "reached")[0])  # one seed has no spread
    nothing = Claim("x", "y", lambda f: level(f.query("recall == 'no'"), "reached"))
    assert judge(nothing, found).word == "cannot be said"


def test_seeds_that_all_agree_give_no_verdict() -> None:
    found = grid(reached=1.0).assign(reached=1.0)
    alike = judge(Claim("x", "y", lambda f: level(f, "reached"), margin=0.9), found)
    assert (alike.low, alike.high, alike.word) == (1, 1, "cannot be said")


def test_the_claims_hold_where_all_is_as_they_say_and_not_where_it_is_turned_round() -> None:
    share = {"no": 0.2, "external": 0.9, "internal": 0.9}
    found = grid(
        input_share=lambda recall, loop_norm: share[recall],
        reached=as_said,
        radius=lambda recall, loop_norm: 0.5,
        exact_far=as_said,
    )
    assert [v.word for v in verdicts(found)] == ["holds"] * len(CLAIMS)
    turned = found.assign(
        input_share=1 - found["input_share"],
        reached=1 - found["reached"],
        radius=1.5 + found["radius"],
        exact_far=1 - found["exact_far"] - 0.5 * (found["recall"] == "internal"),
    )
    words = [v.word for v in verdicts(turned)]
    assert words[:-1] == ["does not hold"] * (len(CLAIMS) - 1)
    answers_alone = verdicts(found.assign(exact_far=turned["exact_far"]))
    assert answers_alone[-1].word == "does not hold"


def test_a_difference_within_the_noise_of_seeds_cannot_be_said() -> None:
    noise = np.random.default_rng(1)
    found = grid(input_share=0.5, reached=0.5, radius=1.0, exact_far=0.5)
    for name in ("input_share", "reached", "radius", "exact_far"):
        found[name] += noise.normal(0, 0.3, len(found))
    words = {claim.text: v.word for claim, v in zip(CLAIMS, verdicts(found))}
    assert words["the loop norm helps on harder problems, with recall"] == "cannot be said"
    assert words["without recall, limits know the input less"] == "cannot be said"
    assert words["models that do well are those that the framework prefers"] == "cannot be said"
