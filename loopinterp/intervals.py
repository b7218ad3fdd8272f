"""Confidence intervals that every study and figure share."""

from __future__ import annotations

import numpy as np


def wilson_interval(
    successes: np.ndarray | float, trials: np.ndarray | int, *, z: float = 1.959964
) -> tuple[np.ndarray, np.ndarray]:
    """Wilson's score interval of a share.

    ``(p + z^2/2n -+ z sqrt(p (1-p)/n + z^2/4n^2)) / (1 + z^2/n)`` with ``p = successes / n``.

    Args:
        successes: How many of the trials succeeded, in any shape.
        trials: n.
        z: Quantile of the normal distribution; 1.96 gives 95%.

    Source: Wilson (1927), Probable inference, the law of succession, and statistical inference
        (doi 10.1080/01621459.1927.10502953).

    Example:
        >>> low, high = wilson_interval(300, 300)
        >>> round(float(low), 4), float(high)
        (0.9874, 1.0)
    """
    n = np.asarray(trials, dtype=float)
    share = np.asarray(successes, dtype=float) / n
    middle = share + z**2 / (2 * n)
    half = z * np.sqrt(share * (1 - share) / n + z**2 / (4 * n**2))
    scale = 1 + z**2 / n
    low, high = ((middle - half) / scale, (middle + half) / scale)
    # Rounding must not put the share outside its own interval.
    return np.asarray(np.clip(low, 0, share)), np.asarray(np.clip(high, share, 1))


def wilson_estimate(successes: np.ndarray | float, trials: np.ndarray | int) -> np.ndarray:
    """A share with Wilson's 95% interval as an estimate [..., (value, low, high)].

    NaN where there are no trials.

    Example:
        >>> wilson_estimate(np.array([300, 0]), np.array([300, 0])).round(3).tolist()
        [[1.0, 0.987, 1.0], [nan, nan, nan]]
    """
    n = np.asarray(trials, dtype=float)
    n, hits = np.broadcast_arrays(n, np.asarray(successes, dtype=float))
    n = np.where(n > 0, n, np.nan)
    low, high = wilson_interval(hits, n)
    return np.stack([hits / n, low, high], axis=-1)
