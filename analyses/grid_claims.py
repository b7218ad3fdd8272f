"""Claims of the fixed-point framework (arXiv 2604.15259) about models of a grid, and verdicts.

A claim compares one measure between two groups of models that differ in one respect and are alike
in the others. The difference is the mean over the other settings; its error is Student's, from the
spread of the seeds within each setting, pooled. All claims on all tasks are one family: p values
are Holm's, intervals are at the level of Bonferroni. What the verdicts mean:

=============  ==================================================================================
supported      p below .05, on the claim's side of its margin
contradicted   p below .05, on the other side
not decided    p of .05 or more, or nothing to compare
confounded     decided over all models, and neither with nor without recall: recall may be all of it
vacuous        models for which nothing is claimed satisfy it as well, without an exception
=============  ==================================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike
from scipy import stats

SETTING = ["recall", "norm", "loop_norm"]
RECALL = "recall != 'no'"
RESAMPLES = 2_000
LEVEL = 0.05
"""Of the whole family."""

Word = Literal["supported", "contradicted", "not decided", "confounded", "vacuous"]


class Estimate(NamedTuple):
    """A value with its standard error, and the freedom of that; NaN where nothing is known.

    Of a bootstrap ``drawn`` holds what it drew, from which interval and p are taken instead.
    """

    value: float
    error: float
    freedom: float
    models: int
    drawn: tuple[float, ...] = ()

    def interval(self, level: float) -> tuple[float, float]:
        """Its ends at a level, as .95."""
        tail = (1 - level) / 2
        if self.drawn:
            low, high = np.quantile(self.drawn, (tail, 1 - tail))
            return float(low), float(high)
        reach = float(stats.t.ppf(1 - tail, self.freedom)) * self.error
        return self.value - reach, self.value + reach

    def p(self, margin: float) -> float:
        """Two-sided, of the value being the margin; NaN where nothing spreads."""
        if self.drawn:
            drawn = np.array(self.drawn)
            side = min((drawn <= margin).sum(), (drawn >= margin).sum())
            return min(2 * (float(side) + 1) / (len(drawn) + 1), 1.0)
        if not self.error > 0:  # seeds that agree to the last digit say nothing of others
            return float("nan")
        return float(2 * stats.t.sf(abs(self.value - margin) / self.error, self.freedom))


UNKNOWN = Estimate(np.nan, np.nan, np.nan, 0)


@dataclass(frozen=True)
class Claim:
    """A statement about a measure, and how it is judged.

    Attributes:
        text: What is said to hold, in our words.
        measure: What is compared, in words.
        estimate: From a table of models to what is found.
        margin: What the value has to exceed.
        above: Whether it has to exceed it, or stay below.
        needs: Models without which there is nothing to compare, as a query.
        control: From a table to the measure of models for which nothing is claimed. If all of
            them satisfy the claim, it cannot fail.
        within: Groups that differ in what may explain the effect instead, as queries.
    """

    text: str
    measure: str
    estimate: Callable[[pd.DataFrame], Estimate]
    margin: float = 0.0
    above: bool = True
    needs: str = "seed == seed"
    control: Callable[[pd.DataFrame], pd.Series] | None = None
    within: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """What is found of a claim.

    Attributes:
        value: The estimate.
        low: Lower end of its interval, simultaneous over the family.
        high: Upper end.
        p: Holm's, over the family.
        models: Models behind it.
        word: See the table above.
    """

    value: float
    low: float
    high: float
    p: float
    models: int
    word: Word


def mean_and_error(values: pd.Series) -> tuple[float, float, int]:
    """Mean and standard error of the known values, and how many they are."""
    known = values.dropna()
    if known.empty:
        return np.nan, np.nan, 0
    error = known.std(ddof=1) / len(known) ** 0.5 if len(known) > 1 else np.nan
    return float(known.mean()), float(error), len(known)


def pooled(settings: Sequence[Sequence[ArrayLike]]) -> Estimate:
    """Mean over settings of a mean, or of a difference of two means; seeds are the only chance.

    The variance is pooled over the seeds within every cell. NaN where no cell has two seeds.

    Args:
        settings: For each setting the values of one cell's seeds, or of two cells' (first less
            second); a setting without a known value in one of them is left out.
    """
    known = [[np.asarray(cell, float) for cell in cells] for cells in settings]
    known = [[cell[~np.isnan(cell)] for cell in cells] for cells in known]
    known = [cells for cells in known if all(len(cell) for cell in cells)]
    every = [cell for cells in known for cell in cells]
    models, freedom = sum(map(len, every)), sum(len(cell) - 1 for cell in every)
    if not freedom:
        return UNKNOWN._replace(models=models)
    value = float(np.mean([cells[0].mean() - sum(c.mean() for c in cells[1:]) for cells in known]))
    variance = sum(((cell - cell.mean()) ** 2).sum() for cell in every) / freedom
    error = (variance * sum(1 / len(cell) for cell in every)) ** 0.5 / len(known)
    return Estimate(value, float(error), freedom, models)


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
    of_setting = [rows[["score", "exact_far"]].to_numpy() for _, rows in models.groupby(SETTING)]
    if not of_setting:
        return UNKNOWN._replace(models=0)
    drawn = np.empty(RESAMPLES)
    picked = np.random.default_rng(0).integers(0, len(of_setting), (RESAMPLES, len(of_setting)))
    sizes = np.array([len(rows) for rows in of_setting])[picked].sum(1)
    for size in np.unique(sizes):  # all at once that have as many models
        samples = [np.concatenate([of_setting[k] for k in row]) for row in picked[sizes == size]]
        drawn[sizes == size] = spearman(np.stack(samples))
    known = tuple(map(float, drawn[~np.isnan(drawn)]))
    value = float(spearman(models[["score", "exact_far"]].to_numpy()[None])[0])
    if np.isnan(value) or len(known) < RESAMPLES / 2:
        return UNKNOWN._replace(value=value, models=len(models))
    return Estimate(value, float(np.std(known)), np.nan, len(models), known)


def spearman(samples: np.ndarray) -> np.ndarray:
    """Rank correlation of the pairs of each sample, from ``[sample, pair, 2]``.

    NaN of fewer than three pairs, and where one of the two is the same in all pairs.
    """
    if samples.shape[1] < 3:
        return np.full(len(samples), np.nan)
    ranks = stats.rankdata(samples, axis=1)
    x, y = np.moveaxis(ranks - ranks.mean(1, keepdims=True), 2, 0)
    per_freedom = 1 / (samples.shape[1] - 1)
    both, of_x, of_y = ((a * b).sum(1) * per_freedom for a, b in ((x, y), (x, x), (y, y)))
    with np.errstate(invalid="ignore"):  # 0 / 0 where all are the same
        return np.clip(both / np.sqrt(of_x) / np.sqrt(of_y), -1, 1)


def _by_recall() -> tuple[Claim, ...]:
    """The claims about recall of any kind, of each kind alone: a mean of both may hide either."""
    claims = []
    for kind in ("external", "internal"):
        some = f"recall == '{kind}'"
        claims += [
            Claim(
                f"with {kind} recall and loop norm, limits are reached from everywhere",
                "share of inputs with one limit from every start, against .9",
                lambda found, some=some: level(found.query(f"{some} and loop_norm"), "reached"),
                margin=0.9,
                needs=some,
            ),
            Claim(
                f"with {kind} recall, the loop norm makes limits reachable",
                "share of inputs with one limit from every start: loop norm less none",
                lambda found, some=some: contrast(
                    found.query(some), "reached", "loop_norm", True, False
                ),
                needs=some,
            ),
            Claim(
                f"with {kind} recall, the loop norm helps on harder problems",
                "right answers: loop norm less none",
                lambda found, some=some: contrast(
                    found.query(some), "exact_far", "loop_norm", True, False
                ),
                needs=some,
            ),
        ]
    return tuple(claims)


CLAIMS = (
    Claim(
        "without recall, limits depend less on the input",
        "share of the input, where a limit was found: external recall less none",
        lambda found: contrast(found, "input_share", "recall", "external", "no"),
    ),
    *_by_recall(),
    Claim(
        "with recall and loop norm, limits are stable",
        "spectral radius at limits that the loop came to, below 1",
        lambda found: level(found.query(f"{RECALL} and loop_norm"), "radius"),
        margin=1.0,
        above=False,
        control=lambda found: found.query("recall == 'no'")["radius"],
    ),
    Claim(
        "recall helps on harder problems, with loop norm",
        "right answers: external recall less none",
        lambda found: contrast(found.query("loop_norm"), "exact_far", "recall", "external", "no"),
    ),
    Claim(
        "internal recall is no worse than external, with loop norm",
        "right answers: internal less external, above -.05",
        lambda found: contrast(
            found.query("loop_norm"), "exact_far", "recall", "internal", "external"
        ),
        margin=-0.05,
        needs="recall == 'internal'",
    ),
    Claim(
        "models that do well are those that the framework prefers",
        "rank correlation of (one limit) x (share of the input) with right answers",
        rank_correlation,
        within=(RECALL, "recall == 'no'"),
    ),
    *(
        Claim(
            f"models that do well are those that the framework prefers, {words} recall",
            "the same rank correlation, among these models alone",
            lambda found, some=some: rank_correlation(found.query(some)),
        )
        for words, some in (("with", RECALL), ("without", "recall == 'no'"))
    ),
)


def holm(p: Sequence[float]) -> list[float]:
    """Holm's p values of a family; NaN stays, and is no member of it.

    Example:
        >>> holm([0.01, 0.04, float("nan"), 0.03])
        [0.03, 0.06, nan, 0.06]
    """
    adjusted, at_least = [float("nan")] * len(p), 0.0
    order = sorted((value, k) for k, value in enumerate(p) if not np.isnan(value))
    for place, (value, k) in enumerate(order):
        at_least = max(at_least, min(value * (len(order) - place), 1.0))
        adjusted[k] = at_least
    return adjusted


def cannot_fail(claim: Claim, found: pd.DataFrame) -> bool:
    """Whether the models for which nothing is claimed satisfy it too, without an exception."""
    if claim.control is None or (known := claim.control(found).dropna()).empty:
        return False
    return bool(((known > claim.margin) == claim.above).all() and (known != claim.margin).all())


def verdicts(found: pd.DataFrame) -> list[tuple[str, Claim, Verdict]]:
    """Those on all claims about the models of all tasks: (task, claim, verdict) each.

    Args:
        found: A row for each model, with its ``task``.
    """
    tasks = dict(iter(found.groupby("task", sort=False)))
    asked = [
        (str(task), claim, of)
        for task, of in tasks.items()
        for claim in CLAIMS
        if len(of.query(claim.needs))
    ]
    estimates = [UNKNOWN if cannot_fail(c, of) else c.estimate(of) for _, c, of in asked]
    corrected = holm([e.p(c.margin) for e, (_, c, _) in zip(estimates, asked)])
    size = max(sum(not np.isnan(p) for p in corrected), 1)
    judged = []
    for (task, claim, of), e, p in zip(asked, estimates, corrected):
        word: Word = "vacuous" if cannot_fail(claim, of) else _decided(claim, e.value, p)
        if word == "vacuous":
            e = claim.estimate(of)
        elif word != "not decided" and claim.within:
            parts = [claim.estimate(of.query(some)) for some in claim.within]
            inside = [
                _decided(claim, part.value, min(part.p(claim.margin) * size, 1)) for part in parts
            ]
            word = word if word in inside else "confounded"
        low, high = e.interval(1 - LEVEL / size)
        judged.append((task, claim, Verdict(e.value, low, high, p, e.models, word)))
    return judged


def _decided(claim: Claim, value: float, p: float) -> Word:
    """What a corrected p decides."""
    if not p < LEVEL:
        return "not decided"
    return "supported" if (value > claim.margin) == claim.above else "contradicted"
