from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from analyses.grid_claims import CLAIMS, contrast, holm, level, pooled, verdicts

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
    effect = pooled([[first, second]])
    test: Any = stats.ttest_ind(first, second)
    expected = test.confidence_interval()
    assert effect.interval(0.95) == pytest.approx((expected.low, expected.high))
    assert effect.p(0.0) == pytest.approx(float(test.pvalue))
    assert (effect.value, effect.models) == (pytest.approx(first.mean() - second.mean()), 5)


def test_the_interval_over_settings_covers_the_truth_as_often_as_it_says() -> None:
    generator, inside = np.random.default_rng(0), 0
    for _ in range(400):
        cells = [[generator.normal(k + 0.5, 1, 3), generator.normal(k, 1, 3)] for k in range(4)]
        low, high = pooled(cells).interval(0.95)
        inside += low <= 0.5 <= high
    assert inside / 400 == pytest.approx(0.95, abs=0.03)


def test_a_difference_is_that_of_settings_alike_in_all_else() -> None:
    cells = grid(exact_far=lambda recall, loop_norm: 0.3 * loop_norm + 0.5 * (recall == "external"))
    one = cells.query("recall == 'external' and not loop_norm")
    cells = cells.drop(one.index)
    estimate = contrast(cells, "exact_far", "loop_norm", True, False)
    assert estimate.value == pytest.approx(0.3)  # external recall without it has nobody to meet
    low, high = estimate.interval(0.95)
    assert low < 0.3 < high and estimate.models == 24


def test_unknown_values_are_left_out_and_nothing_known_decides_nothing() -> None:
    cells = grid(reached=lambda recall, loop_norm: np.nan if recall == "no" else 0.9)
    assert level(cells, "reached").models == 24
    for nothing in (cells.query("recall == 'no'"), cells.query("seed == 0")):  # no spread
        assert np.isnan(level(nothing, "reached").p(0.5))
    alike = level(grid(reached=1.0).assign(reached=1.0), "reached")
    assert (alike.value, alike.interval(0.95)) == (1, (1, 1)) and np.isnan(alike.p(0.9))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_the_family_is_corrected_as_holm_has_it(p: list[float]) -> None:
    adjusted = holm([*p, float("nan")])
    assert np.isnan(adjusted.pop())
    order, running = sorted(range(len(p)), key=lambda k: p[k]), 0.0
    for place, k in enumerate(order):
        running = max(running, min(1, (len(p) - place) * p[k]))
        assert adjusted[k] == pytest.approx(running)


SHARES = {"no": 0.2, "external": 0.9, "internal": 0.9}


def test_claims_are_supported_where_all_is_as_they_say_and_contradicted_where_it_is_not() -> None:
    cells = grid(
        input_share=lambda recall, loop_norm: SHARES[recall],
        reached=as_said,
        radius=lambda recall, loop_norm: 0.5 if recall != "no" else 1.5,
        exact_far=as_said,
    )
    words = words_of(cells)
    assert {words.pop(text) for text in [*words] if "framework prefers" in text} <= {
        "supported", "confounded", "not decided"
    }  # fmt: skip
    assert set(words.values()) == {"supported"} and len(words) == len(CLAIMS) - 3
    turned = cells.assign(
        input_share=1 - cells["input_share"],
        reached=1 - cells["reached"],
        radius=1.5 + cells["radius"],
        exact_far=1 - cells["exact_far"] - 0.5 * (cells["recall"] == "internal"),
    )
    words = {k: v for k, v in words_of(turned).items() if "framework prefers" not in k}
    low = {"with external recall and loop norm, limits are reached from everywhere"}
    assert {k for k, v in words.items() if v == "contradicted"} >= {*words} - low


def test_a_claim_that_models_without_a_claim_satisfy_as_well_is_vacuous() -> None:
    """Limits that iteration comes to are stable with recall and without."""
    cells = grid(input_share=0.5, reached=0.5, radius=0.6, exact_far=0.5)
    text = "with recall and loop norm, limits are stable"
    assert words_of(cells)[text] == "vacuous"
    control = (cells["recall"] == "no") & (cells["seed"] == 0)
    assert words_of(cells.assign(radius=cells["radius"].mask(control, 1.2)))[text] == "supported"


def test_a_correlation_that_recall_alone_makes_is_confounded() -> None:
    """With recall both are high and without it both low; within either they are noise."""
    noise = np.random.default_rng(3)
    text = "models that do well are those that the framework prefers"
    cells = grid(input_share=1.0, reached=0.0, radius=0.6, exact_far=0.0).assign(task="x")
    norms = ("pre", "post", "peri", "gated")  # so that there are settings enough to draw from
    cells = pd.concat([cells.query("norm == 'pre'").assign(norm=norm) for norm in norms])
    recall = cells["recall"] != "no"
    for name in ("reached", "exact_far"):
        cells[name] = 0.1 + 0.8 * recall + noise.normal(0, 0.02, len(cells))
    assert words_of(cells)[text] == "confounded"
    cells["exact_far"] = cells["reached"]  # and now in either
    assert words_of(cells)[text] == "supported"


def test_a_mean_over_kinds_of_recall_hides_neither() -> None:
    """The loop norm harms with external recall, and helps with internal."""
    effect = {"no": 0.0, "external": -0.13, "internal": 0.49}
    cells = grid(
        input_share=0.5, reached=0.5, radius=0.6,
        exact_far=lambda recall, loop_norm: 0.5 + effect[recall] * loop_norm,
    )  # fmt: skip
    words = words_of(cells)
    claim = "with {} recall, the loop norm helps on harder problems"
    assert words[claim.format("external")] == "contradicted"
    assert words[claim.format("internal")] == "supported"


def test_differences_within_the_noise_of_seeds_are_not_decided() -> None:
    noise, decided, n_claims = np.random.default_rng(1), 0, 0
    for _ in range(3):
        cells = grid(input_share=0.5, reached=0.5, radius=1.0, exact_far=0.5)
        for name in ("input_share", "reached", "radius", "exact_far"):
            cells[name] += noise.normal(0, 0.3, len(cells))
        words = {k: v for k, v in words_of(cells).items() if "everywhere" not in k}
        decided += sum(v in ("supported", "contradicted") for v in words.values())
        n_claims += len(words)
    assert n_claims > 30 and decided <= 1


def words_of(cells: pd.DataFrame) -> dict[str, str]:
    return {claim.text: v.word for _, claim, v in verdicts(cells.assign(task="one"))}
