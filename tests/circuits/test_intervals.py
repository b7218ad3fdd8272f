from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import beta

from loopinterp.circuits.intervals import bootstrap_scores, scores_by_stratum
from loopinterp.errors import InputError


@pytest.mark.parametrize(("right", "n"), [(50, 50), (0, 40), (30, 60), (59, 60)])
def test_one_stratum_has_the_jeffreys_interval(right: int, n: int):
    agree = np.array([1.0] * right + [0.0] * (n - right))
    score = bootstrap_scores([agree], [np.zeros(n, int)], n_strata=1, seed=0, n_resamples=20000)
    low, high = beta.ppf([0.025, 0.975], right + 0.5, n - right + 0.5)
    assert score.value == pytest.approx(right / n)
    assert float(score.low) == pytest.approx(min(low, right / n), abs=0.01)
    assert float(score.high) == pytest.approx(max(high, right / n), abs=0.01)


def test_strata_count_alike_whatever_their_size():
    agree = np.concatenate([np.ones(90), np.zeros(10)])
    strata = np.array([0] * 90 + [1] * 10)
    score = bootstrap_scores([agree], [strata], n_strata=3, seed=0)
    assert float(score.value) == pytest.approx(0.5)


def test_columns_share_the_weights_of_the_inputs():
    rng = np.random.default_rng(0)
    one = rng.random(80)
    score = bootstrap_scores([np.stack([one, one], 1)], [np.zeros(80, int)], n_strata=1, seed=0)
    assert score.low[0] == score.low[1]
    assert score.high[0] == score.high[1]


def test_models_that_differ_widen_the_interval():
    alike = [np.full(200, 0.5)] * 3
    apart = [np.full(200, v) for v in (0.1, 0.5, 0.9)]
    strata = [np.zeros(200, int)] * 3
    narrow = bootstrap_scores(alike, strata, n_strata=1, seed=0)
    wide = bootstrap_scores(apart, strata, n_strata=1, seed=0)
    assert narrow.value == pytest.approx(wide.value)
    assert wide.high - wide.low > 10 * (narrow.high - narrow.low)


def test_the_interval_covers_the_truth_as_often_as_it_says():
    rng = np.random.default_rng(1)
    covered = 0
    for trial in range(200):
        agree = (rng.random(60) < 0.8).astype(float)
        score = bootstrap_scores(
            [agree], [np.zeros(60, int)], n_strata=1, seed=trial, n_resamples=500
        )
        covered += bool(score.low <= 0.8 <= score.high)
    assert covered >= 180


def test_scores_by_stratum_end_with_the_mean_and_leave_empty_strata_open():
    agree = np.array([1.0, 1.0, 0.0, 0.0])
    scores = scores_by_stratum([agree], [np.array([0, 0, 2, 2])], n_strata=3, seed=0)
    assert scores.value[[0, 2, 3]].tolist() == [1.0, 0.0, 0.5]
    assert np.isnan(scores.value[1])
    assert np.isnan(scores.low[1])


def test_nothing_to_score_is_refused():
    with pytest.raises(InputError, match="at least one input"):
        bootstrap_scores([np.zeros((0, 2))], [np.zeros(0, int)], n_strata=1, seed=0)
    with pytest.raises(InputError, match="level"):
        bootstrap_scores([np.ones(3)], [np.zeros(3, int)], n_strata=1, seed=0, level=95)
