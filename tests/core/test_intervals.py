from __future__ import annotations

import numpy as np
import pytest
import xarray as xr
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.stats import binomtest

from loopinterp.core.intervals import band_of, share_of, wilson_estimate


@pytest.mark.parametrize("trials", [1, 5, 20, 300])
def test_it_is_that_of_scipy(trials: int) -> None:
    hits = np.arange(trials + 1)
    _, low, high = wilson_estimate(hits, trials).T
    expected = [binomtest(int(k), trials).proportion_ci(method="wilson") for k in hits]
    np.testing.assert_allclose(low, [e.low for e in expected], atol=1e-6)
    np.testing.assert_allclose(high, [e.high for e in expected], atol=1e-6)
    assert ((low <= hits / trials) & (hits / trials <= high)).all()


def test_a_band_leaves_nan_out_and_counts_infinity_as_largest() -> None:
    values = xr.DataArray(
        [[3.0, 1.0, np.nan], [np.inf, 1.0, np.nan], [np.inf, np.nan, np.nan]],
        dims=("batch", "pos"),
        coords={"pos": [5, 6, 7]},
    )
    band = band_of(values, "batch")
    assert band.sel(estimate="value").values.tolist()[:2] == [np.inf, 1.0]
    assert band.sel(estimate="low", pos=5) == 3 and band.sel(pos=7).isnull().all()
    pooled = band_of(xr.DataArray(np.arange(11.0).reshape(1, 11)), "dim_0", "dim_1")
    assert pooled.values.tolist() == [5, 1, 9]


def test_a_share_is_taken_over_the_named_axes() -> None:
    hits = xr.DataArray([[1, 1], [1, 0]], dims=("loop", "batch"), coords={"loop": [3, 4]})
    share = share_of(hits, "batch")
    assert share.sel(estimate="value").values.tolist() == [1.0, 0.5]
    np.testing.assert_array_equal(share, wilson_estimate(np.array([2, 1]), 2))


@given(hits=st.integers(0, 500), more=st.integers(0, 500), independent=st.integers(1, 600))
def test_trials_that_depend_on_each_other_count_as_so_many(hits, more, independent):
    trials = hits + more
    assume(trials)
    estimate = wilson_estimate(hits, trials, independent=independent)
    n = min(independent, trials)
    np.testing.assert_allclose(estimate, wilson_estimate(hits / trials * n, n))
    assert estimate[0] == hits / trials
