"""Claims of the fixed-point framework (arXiv 2604.15259) about models of a grid, and verdicts.

A claim compares one measure between two groups of models that differ in one respect and are alike
in the others. The difference is the mean over the other settings; its 95% interval is Student's,
from the spread of the seeds within each setting, pooled. A claim holds if the whole interval lies
beyond its margin, does not if it lies wholly on the other side, and cannot be said otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike
from scipy import stats

SETTING = ["recall", "norm", "loop_norm"]
RECALL = "recall != 'no'"
RESAMPLES = 1000

Estimate = tuple[float, float, float, int]
"""Value, ends of the 95% interval, and the models that it rests on."""


@dataclass(frozen=True)
class Claim:
    """A statement about a measure, and how it is judged.

    Attributes:
        text: What is said to hold, in our words.
        measure: What is compared, in words.
        estimate: From a table of models to what is found.
        margin: What the value has to exceed.
        above: Whether it has to exceed it, or stay below.
    """

    text: str
    measure: str
    estimate: Callable[[pd.DataFrame], Estimate]
    margin: float = 0.0
    above: bool = True


@dataclass(frozen=True)
class Verdict:
    """What is found of a claim: ``word`` is "holds", "does not hold" or "cannot be said"."""

    value: float
    low: float
    high: float
    models: int
    word: str


def mean_and_error(values: pd.Series) -> tuple[float, float, int]:
    """Mean and standard error of the known values, and how many they are."""
    known = values.dropna()
    if known.empty:
        return np.nan, np.nan, 0
    error = known.std(ddof=1) / len(known) ** 0.5 if len(known) > 1 else np.nan
    return float(known.mean()), float(error), len(known)


def pooled(settings: Sequence[Sequence[ArrayLike]]) -> Estimate:
    """Mean over settings of a mean, or of a difference of two means; seeds are the only chance.

    Student's interval, its variance pooled over the seeds within every cell. NaN where no cell has
    two seeds.

    Args:
        settings: For each setting the values of one cell's seeds, or of two cells' (first less
            second); a setting without a known value in one of them is left out.
    """
    known = [[pd.Series(cell).dropna() for cell in cells] for cells in settings]
    known = [cells for cells in known if all(len(cell) for cell in cells)]
    every = [cell for cells in known for cell in cells]
    models, freedom = sum(map(len, every)), sum(len(cell) - 1 for cell in every)
    if not freedom:
        return np.nan, np.nan, np.nan, models
    value = float(np.mean([cells[0].mean() - sum(c.mean() for c in cells[1:]) for cells in known]))
    variance = sum(((cell - cell.mean()) ** 2).sum() for cell in every) / freedom
    error = (variance * sum(1 / len(cell) for cell in every)) ** 0.5 / len(known)
    reach = float(stats.t.ppf(0.975, freedom) * error)
    return value, value - reach, value + reach, models


def contrast(found: pd.DataFrame, measure: str, axis: str, yes: Any, no: Any) -> Estimate:
    """Mean difference of a measure between two values of an axis, all else being equal.

    Args:
        found: A row for each model.
        measure: A column.
        axis: The axis of the grid.
        yes: Its value for which the measure is said to be larger.
        no: The other one.
    """
    others = [name for name in SETTING if name != axis]
    sides = [
        {key: of[measure] for key, of in found[found[axis] == value].groupby(others)}
        for value in (yes, no)
    ]
    return pooled([[side[key] for side in sides] for key in sides[0] if key in sides[1]])


def level(found: pd.DataFrame, measure: str) -> Estimate:
    """Mean of a measure over settings."""
    return pooled([[of[measure]] for _, of in found.groupby(SETTING)])


def rank_correlation(found: pd.DataFrame) -> Estimate:
    """Spearman's correlation of the framework's score with right answers to harder problems.

    The score is the share of inputs with one limit from every start, times the share of the
    spread of limits that is the input's. The interval is a bootstrap's over settings, as the seeds
    of one are no new evidence about the framework.
    """
    score = found["reached"].fillna(0) * found["input_share"].fillna(0)
    models = found.assign(score=score)
    of_setting = [rows for _, rows in models.groupby(SETTING)]
    generator, drawn = np.random.default_rng(0), []

    def spearman(some: pd.DataFrame) -> float:
        columns = some["score"], some["exact_far"]
        if any(np.ptp(column) == 0 for column in columns):
            return np.nan
        return float(np.asarray(stats.spearmanr(*columns))[0])

    for _ in range(RESAMPLES):
        picked = generator.integers(0, len(of_setting), len(of_setting))
        drawn.append(spearman(pd.concat([of_setting[k] for k in picked])))
    low, high = np.nanquantile(drawn, (0.025, 0.975)) if not np.isnan(drawn).all() else [np.nan] * 2
    return spearman(models), float(low), float(high), len(models)


CLAIMS = (
    Claim(
        "without recall, limits know the input less",
        "share of the input: external recall less none",
        lambda found: contrast(found, "input_share", "recall", "external", "no"),
    ),
    Claim(
        "with recall and loop norm, limits are reached from everywhere",
        "share of inputs with one limit from every start, against .9",
        lambda found: level(found.query(f"{RECALL} and loop_norm"), "reached"),
        margin=0.9,
    ),
    Claim(
        "with recall, the loop norm makes limits reachable",
        "share of inputs with one limit from every start: loop norm less none",
        lambda found: contrast(found.query(RECALL), "reached", "loop_norm", True, False),
    ),
    Claim(
        "with recall and loop norm, limits are stable",
        "spectral radius, below 1",
        lambda found: level(found.query(f"{RECALL} and loop_norm"), "radius"),
        margin=1.0,
        above=False,
    ),
    Claim(
        "recall helps on harder problems, with loop norm",
        "right answers: external recall less none",
        lambda found: contrast(found.query("loop_norm"), "exact_far", "recall", "external", "no"),
    ),
    Claim(
        "the loop norm helps on harder problems, with recall",
        "right answers: loop norm less none",
        lambda found: contrast(found.query(RECALL), "exact_far", "loop_norm", True, False),
    ),
    Claim(
        "internal recall is no worse than external, with loop norm",
        "right answers: internal less external, above -.05",
        lambda found: contrast(
            found.query("loop_norm"), "exact_far", "recall", "internal", "external"
        ),
        margin=-0.05,
    ),
    Claim(
        "models that do well are those that the framework prefers",
        "rank correlation of (one limit) x (share of the input) with right answers",
        rank_correlation,
    ),
)


def judge(claim: Claim, found: pd.DataFrame) -> Verdict:
    """The verdict on one claim."""
    value, low, high, models = claim.estimate(found)
    words = ("holds", "does not hold") if claim.above else ("does not hold", "holds")
    word = "cannot be said"
    if low < high:  # seeds that agree to the last digit say nothing of others
        word = words[0] if low > claim.margin else words[1] if high < claim.margin else word
    return Verdict(value, low, high, models, word)


def verdicts(found: pd.DataFrame) -> list[Verdict]:
    """Those on all claims, of the models of one task."""
    return [judge(claim, found) for claim in CLAIMS]
