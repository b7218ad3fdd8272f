"""Tables behind the figures: quantiles over tokens, exact match with intervals."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

BAND = (0.1, 0.5, 0.9)
"""Quantiles of a line (the median) and of the band around it."""


def quantiles_by_loop(values: np.ndarray, counted: np.ndarray) -> np.ndarray:
    """10, 50 and 90 % of the counted tokens after each loop, ``[3, loop]``.

    Args:
        values: ``[loop, batch, pos]``.
        counted: 1 for tokens that count, ``[batch, pos]``.
    """
    return _quantiles(values[:, counted == 1])


def quantiles_by_position(values: np.ndarray, counted: np.ndarray) -> np.ndarray:
    """10, 50 and 90 % over the examples at each position, ``[3, ..., pos]``.

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


def share_interval(hits: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Wilson's 95 % interval of a share.

    Args:
        hits: Number of successes, any shape.
        n: Number of trials.

    Source: Wilson, 1927 (doi 10.1080/01621459.1927.10502953).

    Example:
        >>> low, high = share_interval(np.array([10]), 10)
        >>> round(float(low[0]), 2), float(high[0])
        (0.72, 1.0)
    """
    z = 1.959964
    share = hits / n
    centre = (share + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z * np.sqrt(share * (1 - share) / n + z**2 / (4 * n**2)) / (1 + z**2 / n)
    return np.clip(centre - half, 0, share), np.clip(centre + half, share, 1)


def exact_match_table(right: np.ndarray) -> pd.DataFrame:
    """Exact match by loop with its interval, from ``right`` ``[loop, batch, pos]``."""
    import pandas as pd

    exact = (right != 0).all(axis=2)
    low, high = share_interval(exact.sum(axis=1), exact.shape[1])
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
