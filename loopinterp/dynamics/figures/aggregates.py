"""Tables behind the figures: quantiles over tokens, exact match with intervals."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from loopinterp.intervals import wilson_interval

if TYPE_CHECKING:
    import pandas as pd

BAND = (0.1, 0.5, 0.9)
"""Quantiles of a line (the median) and of the band around it."""


def quantiles_by_loop(values: np.ndarray, counted: np.ndarray) -> np.ndarray:
    """10, 50 and 90% of the counted tokens after each loop, ``[3, loop]``.

    Args:
        values: ``[loop, batch, pos]``.
        counted: 1 for tokens that count, ``[batch, pos]``.
    """
    return _quantiles(values[:, counted == 1])


def quantiles_by_position(values: np.ndarray, counted: np.ndarray) -> np.ndarray:
    """10, 50 and 90% over the examples at each position, ``[3, ..., pos]``.

    Args:
        values: ``[..., batch, pos]``.
        counted: 1 for tokens that count, ``[batch, pos]``.
    """
    return _quantiles(np.moveaxis(np.where(counted == 1, values, np.nan), -2, -1))


def _quantiles(rows: np.ndarray) -> np.ndarray:
    """Quantiles along the last axis without NaN; NaN for a row of nothing else."""
    empty = np.asarray(np.isnan(rows).all(axis=-1))
    filled = np.where(empty[..., None], 0, rows)
    return np.where(empty, np.nan, np.nanquantile(filled, BAND, axis=-1, method="lower"))


def exact_match_table(right: np.ndarray) -> pd.DataFrame:
    """Exact match by loop with its interval, from ``right`` ``[loop, batch, pos]``."""
    import pandas as pd

    exact = (right != 0).all(axis=2)
    low, high = wilson_interval(exact.sum(axis=1), exact.shape[1])
    columns = {"loop": np.arange(len(exact)), "exact_match": exact.mean(axis=1)}
    return pd.DataFrame(columns | {"low": low, "high": high})


def right_from(right: np.ndarray) -> np.ndarray:
    """First loop from which a token is right to the end; infinity where it ends wrong.

    Args:
        right: ``[loop, batch, pos]``; tokens that are not asked give NaN.
    """
    loops = np.arange(1, len(right) + 1)[:, None, None]
    last_wrong = ((right == 0) * loops).max(axis=0).astype(float)
    last_wrong[last_wrong == len(right)] = np.inf
    return np.where(right[-1] < 0, np.nan, last_wrong)
