"""Evaluations of several seeds put together: mean and standard error over seeds in every cell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import xarray as xr

from loopinterp.errors import InputError
from loopinterp.intervals import ESTIMATE
from loopinterp.results import Result, study
from loopinterp.training.answer_scores import Lowest, lowest_of
from loopinterp.training.evaluation import EvaluationResult

MEASURES = {
    **dict.fromkeys(
        ("exact_match", "bit_accuracy", "perplexity"), "extra_loop distribution length"
    ),
    **dict.fromkeys(("loop_exact_match", "loop_perplexity"), "loop distribution length"),
    **dict.fromkeys(("stopped_exact_match", "stopped_at"), "rule distribution length"),
}
"""What is summarised of an evaluation, and its axes."""


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class SeedSummary(Result, kind="seed-summary"):
    """Mean over seeds, and its standard error, of what evaluations of several seeds found.

    Arrays:
        exact_match: Mean over seeds; the other arrays of an evaluation likewise, as far as all of
            the evaluations have them. Of a perplexity it is the geometric mean.
        exact_match_se: Its standard error, ``s / sqrt(seeds)`` with s the standard deviation of
            the seeds (n - 1 in its denominator). Of a perplexity it is that of its logarithm.

    Attributes:
        task: Name of the task.
        n_seeds: How many evaluations there are.
        n_samples: Examples in each cell of each.
        trained_up_to: Greatest length seen in training, or None if not known.
        not_judged: Distributions of the task that were left out.
    """

    VARIABLES: ClassVar[Mapping[str, str]] = {
        name + end: axes for name, axes in MEASURES.items() for end in ("", "_se")
    }
    OPTIONAL: ClassVar[frozenset[str]] = frozenset(VARIABLES) - {"exact_match", "exact_match_se"}

    task: str
    n_seeds: int
    n_samples: int
    trained_up_to: int | None = None
    not_judged: Sequence[str] = ()

    def lowest(self, length: int) -> Lowest:
        """The lowest mean exact match over the distributions at a length, and where it is."""
        nearest = min(self.data["extra_loop"].values.tolist(), key=abs)
        at = self.data["exact_match"].sel(length=length, extra_loop=nearest, drop=True)
        return lowest_of(at.to_series().to_dict())


def summarise_seeds(results: Sequence[EvaluationResult]) -> SeedSummary:
    """Mean and standard error over seeds of evaluations of the same cells.

    The standard error is over models trained from different seeds; it holds what examples add to
    it as well, and takes no seed for granted as an interval over examples does.

    Args:
        results: One evaluation for each seed: of the same task with the same settings, lengths,
            distributions, loops, rules and number of examples, and answered after the same loops.

    Raises:
        InputError: If there are fewer than two, one is given twice, or they are of other cells.
    """
    if len(results) < 2:
        fix = "Evaluate runs of several seeds."
        raise InputError("results", expected="two or more", given=str(len(results)), fix=fix)
    first = results[0]
    for at, result in enumerate(results[1:], 1):
        if why := _differs(first, result):
            raise InputError(
                f"results[{at}]",
                expected="an evaluation of the same cells as results[0]",
                given=f"one of another {why}",
                fix="Evaluate all seeds with the same options.",
            )
    weights = [tuple(result.provenance.weights) for result in results]
    if len({digests for digests in weights if digests}) < sum(map(bool, weights)):
        fix = "Give each seed once."
        raise InputError("results", expected="different models", given="one twice", fix=fix)
    arrays = over_seeds(results)
    axes = {axis for name in arrays for axis in SeedSummary.VARIABLES[name].split()}
    models = [result.provenance.config.get("model") for result in results]
    with study(first.provenance.seed, models=models) as watch:
        return SeedSummary.of(
            watch,
            coords={axis: first.data[axis].values.tolist() for axis in sorted(axes)},
            **arrays,
            task=first.task,
            n_seeds=len(results),
            n_samples=first.n_samples,
            trained_up_to=first.trained_up_to,
            not_judged=first.not_judged,
        )


def over_seeds(results: Sequence[EvaluationResult]) -> dict[str, np.ndarray]:
    """Mean and standard error (``NAME_se``) of each measure; NaN is the error of one seed alone."""
    arrays = {}
    for name in (name for name in MEASURES if name in results[0].data):
        values = np.stack([_values(result.data[name]) for result in results])
        arrays |= dict(zip((name, f"{name}_se"), _mean_and_error(values, "perplexity" in name)))
    return arrays


def _differs(one: EvaluationResult, other: EvaluationResult) -> str:
    """What two evaluations do not share; "" if all is the same."""
    for name in ("task", "n_samples", "trained_up_to", "depth", "answered_after"):
        if getattr(one, name) != getattr(other, name):
            return name
    if one.provenance.config.get("task") != other.provenance.config.get("task"):
        return "setting of the task"
    for axis in ("extra_loop", "distribution", "length", "loop", "rule"):
        mine, its = (result.data.coords.get(axis) for result in (one, other))
        if (mine is None) != (its is None) or (mine is not None and not mine.equals(its)):
            return axis.replace("_", " ")
    if set(one.data.data_vars) != set(other.data.data_vars):
        return "set of measures"
    return ""


def _values(array: xr.DataArray) -> np.ndarray:
    return (array.sel({ESTIMATE: "value"}) if ESTIMATE in array.dims else array).values


def _mean_and_error(values: np.ndarray, geometric: bool) -> tuple[np.ndarray, np.ndarray]:
    """Mean over the first axis, and its standard error."""
    with np.errstate(invalid="ignore"):  # of a perplexity beyond all numbers there is no error
        values = np.log(values) if geometric else values
        spread = values.std(0, ddof=1) if len(values) > 1 else np.full(values.shape[1:], np.nan)
        error = spread / np.sqrt(len(values))
        return (np.exp(values.mean(0)) if geometric else values.mean(0)), error
