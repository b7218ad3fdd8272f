"""Scores with intervals: a Bayesian bootstrap over inputs, and over models if there are several.

A score is the mean over strata of the mean agreement in each stratum. Its uncertainty comes from
the inputs that happened to be drawn: the bootstrap gives every input a random Dirichlet weight
(Rubin, Annals of Statistics 9, 1981, 130), and with several models every model too.
Half an input that agrees and half one that does not, shared out over the strata, are added
(Jeffreys' prior), so that 100 right out of 100 has an interval of more than no width. For one
stratum of right-or-wrong inputs the interval is that of Beta(k + 1/2, n - k + 1/2).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from loopinterp.errors import InputError


@dataclass(frozen=True)
class Intervals:
    """Scores [...] with the ends of their intervals, of the same shape.

    Attributes:
        value: Mean over strata of the mean agreement.
        low: Lower end of the interval.
        high: Upper end.
    """

    value: np.ndarray
    low: np.ndarray
    high: np.ndarray


def bootstrap_scores(
    agreement: list[np.ndarray],
    strata: list[np.ndarray],
    *,
    n_strata: int,
    seed: int,
    level: float = 0.95,
    n_resamples: int = 2000,
) -> Intervals:
    """Mean agreement over strata, with intervals over inputs and models.

    All columns (rival programs, say) share the weights of the inputs, so they are compared on
    the same resampled inputs.

    Args:
        agreement: One array [input, ...] for each model, values in 0..1.
        strata: One array [input] of stratum numbers for each model. A stratum that no input of
            any model falls in does not count.
        n_strata: Number of strata.
        seed: Seed of the weights.
        level: Coverage of the intervals.
        n_resamples: Bootstrap resamples.

    Raises:
        InputError: no inputs, or a level outside (0, 1).

    Example:
        >>> right = np.array([1.0] * 50 + [0.0] * 50)
        >>> score = bootstrap_scores([right], [np.zeros(100, int)], n_strata=1, seed=0)
        >>> [round(float(end), 1) for end in (score.value, score.low, score.high)]
        [0.5, 0.4, 0.6]
    """
    if not 0 < level < 1:
        raise InputError(
            "level", expected="a number in (0, 1)", given=str(level), fix="Pass level=0.95."
        )
    if not sum(len(a) for a in agreement):
        raise InputError(
            "agreement",
            expected="at least one input",
            given="none",
            fix="Draw more pairs, or a model that solves its task.",
        )
    rng = np.random.default_rng(seed)
    draws, values = [], []
    for each, stratum in ((a, s) for a, s in zip(agreement, strata) if len(a)):
        flat = each.reshape(len(each), -1).astype(np.float64)
        present = [s for s in range(n_strata) if bool((stratum == s).any())]
        share = 0.5 / len(present)
        parts = [_stratum_draws(flat[stratum == s], share, rng, n_resamples) for s in present]
        draws.append(np.mean(parts, axis=0))
        values.append(np.mean([flat[stratum == s].mean(0) for s in present], axis=0))
    model_weights = rng.dirichlet(np.ones(len(draws)), size=n_resamples)
    drawn = np.einsum("rm,mrc->rc", model_weights, np.stack(draws))
    value = np.mean(values, axis=0)
    tail = (1 - level) / 2
    shape = agreement[0].shape[1:]
    low, high = np.quantile(drawn, [tail, 1 - tail], axis=0)
    return Intervals(
        value=value.reshape(shape),
        low=np.minimum(low, value).reshape(shape),
        high=np.maximum(high, value).reshape(shape),
    )


def scores_by_stratum(
    agreement: list[np.ndarray], strata: list[np.ndarray], *, n_strata: int, seed: int
) -> Intervals:
    """Scores of each stratum, and of all together as the last, [stratum + 1, ...].

    A stratum without inputs is NaN.

    Args:
        agreement: One array [input, ...] for each model, values in 0..1.
        strata: One array [input] of stratum numbers for each model.
        n_strata: Number of strata.
        seed: Seed of the weights.
    """
    parts = []
    for stratum in range(n_strata):
        here = [a[s == stratum] for a, s in zip(agreement, strata)]
        some = [a for a in here if len(a)]
        if some:
            alike = [np.zeros(len(a), int) for a in some]
            parts.append(bootstrap_scores(some, alike, n_strata=1, seed=seed))
        else:
            empty = np.full(agreement[0].shape[1:], np.nan)
            parts.append(Intervals(empty, empty, empty))
    everything = any(len(a) for a in agreement)
    parts.append(
        bootstrap_scores(agreement, strata, n_strata=n_strata, seed=seed)
        if everything
        else parts[0]
    )
    return Intervals(
        *(np.stack([getattr(part, end) for part in parts]) for end in ("value", "low", "high"))
    )


def _stratum_draws(
    agreement: np.ndarray, share: float, rng: np.random.Generator, n: int
) -> np.ndarray:
    """Weighted means [resample, column] of one stratum, with its share of the added inputs."""
    weights = rng.gamma(1.0, size=(n, len(agreement)))
    wrong, right = rng.gamma(share, size=(2, n, 1))
    total = weights.sum(1, keepdims=True) + wrong + right
    return (weights @ agreement + right) / total
