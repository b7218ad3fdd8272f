"""Estimates with intervals, bands of values, and tables of both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from loopinterp.core.errors import InputError

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

ESTIMATE = "estimate"  # the axis of a value and its 95% interval
ENDS = ("value", "low", "high")


def wilson_estimate(
    successes: ArrayLike, trials: ArrayLike, *, independent: ArrayLike | None = None
) -> np.ndarray:
    """A share with Wilson's 95% score interval, as an estimate [..., (value, low, high)].

    ``(p + z^2/2n -+ z sqrt(p (1-p)/n + z^2/4n^2)) / (1 + z^2/n)`` with ``p = successes / n`` and
    ``z = 1.96``; NaN without trials.

    Args:
        independent: Number of independent trials, if smaller (several trials on one input); it
            replaces n in the interval.

    Source: Wilson (1927), doi 10.1080/01621459.1927.10502953.

    Example:
        >>> wilson_estimate(np.array([300, 0]), np.array([300, 0])).round(3).tolist()
        [[1.0, 0.987, 1.0], [nan, nan, nan]]
        >>> wilson_estimate(300, 300, independent=64).round(3).tolist()
        [1.0, 0.943, 1.0]
    """
    z = 1.959964
    n_trials = np.asarray(trials, dtype=float)
    n_trials = np.where(n_trials > 0, n_trials, np.nan)
    share = np.asarray(successes, dtype=float) / n_trials
    # Arrays with named axes would be aligned at every operation below.
    n = n_trials if independent is None else np.minimum(np.asarray(independent), n_trials)
    middle = share + z**2 / (2 * n)
    half = z * np.sqrt(share * (1 - share) / n + z**2 / (4 * n**2))
    low, high = (end / (1 + z**2 / n) for end in (middle - half, middle + half))
    # Rounding must not put the share outside its own interval.
    return np.stack([share, np.clip(low, 0, share), np.clip(high, share, 1)], axis=-1)


def mean_estimate(values: ArrayLike) -> np.ndarray:
    """The mean over the last axis with its 95% interval, as an estimate [..., (value, low, high)].

    ``m -+ 1.96 s / sqrt(n)`` with the standard deviation s; NaN ends for one value.

    Example:
        >>> mean_estimate([1.0, 2.0, 3.0]).round(2).tolist()
        [2.0, 0.87, 3.13]
    """
    values = np.asarray(values, dtype=float)
    middle, n = values.mean(-1), values.shape[-1]
    half = 1.959964 * values.std(-1, ddof=1) / n**0.5 if n > 1 else np.full_like(middle, np.nan)
    return np.stack([middle, middle - half, middle + half], axis=-1)


def tidy(arrays: Mapping[Any, xr.DataArray]) -> pd.DataFrame:
    """A table with a row for each cell, and a column for each axis and array.

    An estimate ``iia`` becomes the columns ``iia``, ``iia_low`` and ``iia_high``. All arrays have
    the same axes.
    """
    import pandas as pd
    import xarray as xr

    columns: dict[str, xr.DataArray] = {}
    for name, array in arrays.items():
        for end in ENDS if ESTIMATE in array.dims else ():
            column = name if end == "value" else f"{name}_{end}"
            columns[column] = array.sel({ESTIMATE: end}, drop=True)
        if ESTIMATE not in array.dims:
            columns[name] = array
    if len(axes := {array.dims for array in columns.values()}) > 1:
        got = ", ".join(f"{name} {list(array.dims)}" for name, array in columns.items())
        expected, fix = "arrays of the same axes", "Ask for them one by one."
        raise InputError("arrays", expected=expected, given=got, fix=fix)
    order = list(next(iter(axes), ()))
    if not order:
        rows = [{name: array.item() for name, array in columns.items()}] if columns else []
        return pd.DataFrame(rows)
    return xr.Dataset(columns).to_dataframe(dim_order=order).reset_index()


def wilson_of(successes: xr.DataArray, trials: xr.DataArray | int) -> xr.DataArray:
    """:func:`wilson_estimate` on named axes; adds the axis ``estimate``."""
    import xarray as xr

    estimate = xr.apply_ufunc(wilson_estimate, successes, trials, output_core_dims=[[ESTIMATE]])
    return estimate.assign_coords({ESTIMATE: list(ENDS)})


def mean_of(values: xr.DataArray, over: str) -> xr.DataArray:
    """:func:`mean_estimate` over a named axis; adds the axis ``estimate``."""
    import xarray as xr

    estimate = xr.apply_ufunc(
        mean_estimate, values, input_core_dims=[[over]], output_core_dims=[[ESTIMATE]]
    )
    return estimate.assign_coords({ESTIMATE: list(ENDS)})


def share_of(hits: xr.DataArray, *over: str) -> xr.DataArray:
    """The share of hits over some axes, with Wilson's 95% interval."""
    trials = int(np.prod([hits.sizes[axis] for axis in over]))
    return wilson_of(hits.sum(over), trials)


def band_of(values: xr.DataArray, *over: str) -> xr.DataArray:
    """The median over some axes, with the 10% and 90% quantiles as ends.

    NaN is left out; infinity is the largest value.
    """
    empty = values.isnull().all(over)
    ends = values.where(~empty, 0).quantile((0.5, 0.1, 0.9), over, method="lower").where(~empty)
    named = ends.rename(quantile=ESTIMATE).assign_coords({ESTIMATE: list(ENDS)})
    return named.transpose(..., ESTIMATE)


def bootstrap_ratio(
    part: ArrayLike, whole: ArrayLike, *, resamples: int = 1000, seed: int = 0
) -> xr.DataArray:
    """``sum(part) / sum(whole)`` over examples, with a 95% bootstrap interval.

    Source: Efron and Tibshirani (1993), An Introduction to the Bootstrap, chapter 13.

    Example:
        >>> bootstrap_ratio([1.0, 1.0], [2.0, 2.0]).values
        array([0.5, 0.5, 0.5])
    """
    import xarray as xr

    part, whole = np.asarray(part, dtype=float), np.asarray(whole, dtype=float)
    estimate = np.full(len(ENDS), np.nan)
    if len(part) and whole.sum() > 0:
        drawn = np.random.default_rng(seed).integers(0, len(part), (resamples, len(part)))
        totals = whole[drawn].sum(axis=1)
        again = part[drawn].sum(axis=1)[totals > 0] / totals[totals > 0]
        estimate = np.array([part.sum() / whole.sum(), *np.quantile(again, (0.025, 0.975))])
    return xr.DataArray(estimate, dims=ESTIMATE, coords={ESTIMATE: list(ENDS)})
