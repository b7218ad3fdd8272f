"""Mean and standard error over seeds, of one setting or of a sweep."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from loopinterp.core.errors import need
from loopinterp.core.intervals import ESTIMATE
from loopinterp.core.results import Result, study
from loopinterp.training.answer_scores import Lowest
from loopinterp.training.evaluation import EvaluationResult, lowest_at, nearest_extra_loop

if TYPE_CHECKING:
    import pandas as pd

    from loopinterp.training.run import Run
    from loopinterp.training.sweep_file import Sweep

_MEASURES = {  # summarised measures and their axes
    name: axes.removesuffix(f" {ESTIMATE}")
    for name, axes in EvaluationResult.VARIABLES.items()
    if not name.startswith("constant_")
}


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class SeedSummary(Result, kind="seed-summary"):
    """Mean over seeds and its standard error, from an :class:`EvaluationResult` of each seed.

    Arrays:
        exact_match: Mean over seeds, as for the other arrays that all evaluations have; the
            geometric mean of perplexities.
        exact_match_se: Its standard error, ``s / sqrt(seeds)`` with s the standard deviation of the
            seeds (denominator n - 1); for a perplexity, that of its logarithm.
    """

    VARIABLES: ClassVar[Mapping[str, str]] = {
        name + end: axes for name, axes in _MEASURES.items() for end in ("", "_se")
    }
    OPTIONAL: ClassVar[frozenset[str]] = frozenset(VARIABLES) - {"exact_match", "exact_match_se"}

    task: str
    n_seeds: int
    n_samples: int
    trained_up_to: int | None = None
    not_judged: Sequence[str] = ()

    def lowest(self, length: int) -> Lowest:
        """The lowest mean exact match at a length."""
        return lowest_at(self, length=length)


def summarise_seeds(results: Sequence[EvaluationResult]) -> SeedSummary:
    """Mean and standard error over seeds of evaluations of the same cells, one per seed.

    This includes the variation between seeds, which an interval over examples lacks.
    """
    fix = "Evaluate runs of several seeds."
    need(len(results) > 1, "results", "two or more", str(len(results)), fix)
    first, expected = results[0], "an evaluation of the same cells as results[0]"
    for at, result in enumerate(results[1:], 1):
        name, fix = _difference(first, result), "Evaluate all seeds with the same options."
        need(name is None, f"results[{at}]", expected, f"another {name}", fix)
    # A seed that is given twice would count as two models.
    weights = [digests for r in results if (digests := tuple(r.provenance.weights))]
    different = len({*weights}) == len(weights)
    need(different, "results", "different models", "one twice", "Give each seed once.")
    arrays = _over_seeds(results)
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


def _over_seeds(results: Sequence[EvaluationResult]) -> dict[str, np.ndarray]:
    """Mean and standard error (``NAME_se``, NaN for one seed) of each measure."""
    arrays = {}
    for name in (name for name in _MEASURES if name in results[0].data):
        each = [result.data[name] for result in results]
        values = np.stack([x.sel({ESTIMATE: "value"}) if ESTIMATE in x.dims else x for x in each])
        geometric = "perplexity" in name
        with np.errstate(invalid="ignore"):  # a perplexity beyond all numbers has no error
            values = np.log(values) if geometric else values  # [seed, …]
            spread = values.std(0, ddof=1) if len(each) > 1 else np.full(values.shape[1:], np.nan)
            arrays[name] = np.exp(values.mean(0)) if geometric else values.mean(0)
            arrays[f"{name}_se"] = spread / np.sqrt(len(each))
    return arrays


def _difference(one: EvaluationResult, other: EvaluationResult) -> str | None:
    for name in ("task", "n_samples", "trained_up_to", "depth", "answered_after"):
        if getattr(one, name) != getattr(other, name):
            return name
    if one.provenance.config.get("task") != other.provenance.config.get("task"):
        return "setting of the task"
    for axis in ("extra_loop", "distribution", "length", "loop", "rule"):
        a, b = (result.data.coords.get(axis) for result in (one, other))
        if (a is None) != (b is None) or (a is not None and not a.equals(b)):
            return axis.replace("_", " ")
    return "set of measures" if {*one.data.data_vars} != {*other.data.data_vars} else None


_SUMMARISED = {name: axes for name, axes in _MEASURES.items() if "rule" not in axes}


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class SweepResult(Result, kind="sweep"):
    """Mean over the seeds of each setting, and its standard error.

    NaN without a finished seed; the error is NaN for a single one.

    Arrays:
        exact_match: As in :class:`SeedSummary`, like the other measures of an evaluation.
        n_seeds: Seeds behind the mean.
        seconds: Mean time to train a seed.

    Attributes:
        figure_axes: The axis along which each measure is drawn.
        failed: Error messages, by setting and seed.
        missing: Settings and seeds that were not run yet (``only``).
    """

    VARIABLES: ClassVar[Mapping[str, str]] = {
        **{
            name + end: f"setting {axes}"
            for name, axes in _SUMMARISED.items()
            for end in ("", "_se")
        },
        **dict.fromkeys(("n_seeds", "trained_up_to", "seconds"), "setting"),
    }
    OPTIONAL: ClassVar[frozenset[str]] = frozenset(
        name + end for name in _SUMMARISED for end in ("", "_se") if name != "exact_match"
    )

    about: str
    task: str
    n_samples: int
    seeds: list[int]
    figure_axes: dict[str, str]
    failed: dict[str, str]
    missing: list[str]
    not_judged: Sequence[str] = ()

    def lowest(self, setting: str, length: int) -> Lowest:
        """The lowest mean exact match of a setting at a length."""
        return lowest_at(self, setting=setting, length=length)

    def table(self) -> pd.DataFrame:
        """The table of ``sweep.csv``, with ``n_seeds`` and ``failed``."""
        names = [n for n in self._widest() if n.removesuffix("_se") in _SUMMARISED]
        rows = self.to_dataframe(*names)
        settings = self.data["setting"].values.tolist()
        counts = dict(zip(settings, self.data["n_seeds"].values))
        errors = dict.fromkeys(settings, "")
        for setting, seed in itertools.product(settings, self.seeds):
            if error := self.failed.get(_cell_name(setting, seed)):
                errors[setting] += f"{errors[setting] and '; '}seed {seed}: {error}"
        # After the axes: setting, extra_loop, distribution, length.
        rows.insert(4, "n_seeds", rows["setting"].map(counts))
        return rows.assign(failed=rows["setting"].map(errors))

    def in_short(self, measure: str = "exact_match") -> pd.DataFrame:
        """Mean ± standard error as text: a row for each setting and distribution, by length."""
        import pandas as pd

        # [setting, distribution, length]
        cells = self.data.sel(extra_loop=nearest_extra_loop(self))
        axes, rows = ("setting", "distribution"), {}
        for setting, distribution in itertools.product(*(cells[k].values for k in axes)):
            at = cells.sel(setting=setting, distribution=distribution)
            pairs = zip(at["length"].values, at[measure].values, at[f"{measure}_se"].values)
            rows[setting, distribution, int(at["n_seeds"])] = {
                n: mean_and_error(mean, error) for n, mean, error in pairs
            }
        table = pd.DataFrame.from_dict(rows, orient="index")
        return table.rename_axis(index=["setting", "distribution", "seeds"], columns="length")


def mean_and_error(mean: float, error: float) -> str:
    """``mean ± error``; ``mean`` without an error, ``-`` without a mean."""
    return "-" if np.isnan(mean) else f"{mean:.3f}" + ("" if np.isnan(error) else f" ± {error:.3f}")


def _cell_name(setting: str, seed: int) -> str:
    return f"{setting}, seed {seed}"


def gather(
    sweep: Sweep,
    finished: Mapping[tuple[str, int], tuple[Run, EvaluationResult]],
    failed: Mapping[tuple[str, int], str],
) -> SweepResult:
    """The result of a sweep, from what its cells (setting, seed) ended with."""
    task, settings = sweep.base.make_task(), [*sweep.changes]
    coords = sweep.evaluation.coords(task)
    cells = list(itertools.product(settings, sweep.seeds))
    by_setting = [[end for cell, end in finished.items() if cell[0] == k] for k in settings]
    done = [_over_seeds([result for _, result in ends]) if ends else {} for ends in by_setting]
    # Arrays with the setting first, NaN where no seed came to its end.
    arrays = {}
    for name, axes in _SUMMARISED.items():
        if all(axis in coords for axis in axes.split()):
            missing = np.full([len(coords[axis]) for axis in axes.split()], np.nan)
            for full in (name, f"{name}_se"):
                arrays[full] = np.stack([measured.get(full, missing) for measured in done])

    def mean(values: Sequence[float]) -> float:
        return float(np.mean(values)) if values else float("nan")

    weights = [
        {"setting": setting, "seed": seed, "weights_sha256": digest}
        for (setting, seed), (_, result) in finished.items()
        for digest in result.provenance.weights
    ]
    with study(sweep.evaluation.seed, sweep=sweep.to_dict(defaults=False), models=weights) as watch:
        return SweepResult.of(
            watch,
            coords={"setting": settings, **coords},
            **arrays,
            n_seeds=[len(ends) for ends in by_setting],
            trained_up_to=[mean([run.cutoff for run, _ in ends]) for ends in by_setting],
            seconds=[mean([run.seconds for run, _ in ends]) for ends in by_setting],
            about=sweep.about,
            task=sweep.base.task,
            n_samples=sweep.evaluation.samples,
            seeds=list(sweep.seeds),
            figure_axes={**sweep.show},
            failed={_cell_name(*cell): failed[cell] for cell in cells if cell in failed},
            missing=[_cell_name(*cell) for cell in cells if cell not in {*finished, *failed}],
            not_judged=[name for name in task.distributions if name not in coords["distribution"]],
        )
