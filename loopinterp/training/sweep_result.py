"""What a sweep found: mean and standard error over seeds of every setting, and what failed."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from loopinterp.results import Result, study
from loopinterp.training.answer_scores import Lowest, lowest_of
from loopinterp.training.seed_summary import MEASURES, over_seeds

if TYPE_CHECKING:
    import pandas as pd

    from loopinterp.training.evaluation import EvaluationResult
    from loopinterp.training.sweep_file import Sweep

SUMMARISED = {name: axes for name, axes in MEASURES.items() if "rule" not in axes}


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class SweepResult(Result, kind="sweep"):
    """Mean over the seeds of each setting, and its standard error.

    A setting of which no seed came to its end has NaN everywhere; of one seed alone there is a
    mean, and NaN in place of the error.

    Arrays:
        exact_match: Mean over seeds (see :func:`~loopinterp.training.summarise_seeds`); the other
            measures of an evaluation likewise.
        exact_match_se: Its standard error.
        n_seeds: Seeds behind the mean.
        trained_up_to: Greatest length seen in training.
        seconds: Mean time to train a seed.

    Attributes:
        about: What the sweep asks.
        task: Name of the base's task.
        n_samples: Examples behind each seed's share.
        seeds: Those that were asked for.
        figure_axes: The figures: each measure, and the axis that it is drawn along.
        failed: What went wrong, by setting and seed.
        missing: Settings and seeds that were not asked for yet (``only``).
        not_judged: Distributions of the task that were left out.
    """

    VARIABLES: ClassVar[Mapping[str, str]] = {
        **{
            name + end: f"setting {axes}"
            for name, axes in SUMMARISED.items()
            for end in ("", "_se")
        },
        **dict.fromkeys(("n_seeds", "trained_up_to", "seconds"), "setting"),
    }
    OPTIONAL: ClassVar[frozenset[str]] = frozenset(
        name + end for name in SUMMARISED for end in ("", "_se") if name != "exact_match"
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
        """The lowest mean exact match of a setting over the distributions, and where it is."""
        at = {"setting": setting, "length": length, "extra_loop": self.nearest_extra_loop}
        return lowest_of(self.data["exact_match"].sel(at, drop=True).to_series().to_dict())

    def table(self) -> pd.DataFrame:
        """What ``sweep.csv`` holds: :meth:`to_dataframe` with ``n_seeds`` and ``failed``.

        ``failed`` says of each setting which of its seeds did not come to their end, and why.
        """
        rows = self.to_dataframe(
            *(n for n in self._widest() if n.removesuffix("_se") in SUMMARISED)
        )
        of_setting = rows["setting"]
        counts = dict(zip(self.data["setting"].values.tolist(), self.data["n_seeds"].values))
        rows.insert(len(_ROW), "n_seeds", of_setting.map(counts))
        return rows.assign(failed=of_setting.map(self._failed_by_setting()))

    def in_short(self, measure: str = "exact_match") -> pd.DataFrame:
        """Mean ± standard error as text: a row for each setting and distribution, by length.

        Read after the loops that the model makes itself, or the nearest that were asked for.
        """
        import pandas as pd

        cells = self.data.sel(extra_loop=self.nearest_extra_loop)
        rows = {}
        for setting, distribution in itertools.product(*(cells[k].values for k in _ROW[::2])):
            at = cells.sel(setting=setting, distribution=distribution)
            pairs = zip(at["length"].values, at[measure].values, at[f"{measure}_se"].values)
            rows[setting, distribution, int(at["n_seeds"])] = {
                n: mean_and_error(mean, error) for n, mean, error in pairs
            }
        table = pd.DataFrame.from_dict(rows, orient="index")
        return table.rename_axis(index=["setting", "distribution", "seeds"], columns="length")

    @property
    def nearest_extra_loop(self) -> int:
        """The number of extra loops that is nearest to none."""
        return min(self.data["extra_loop"].values.tolist(), key=abs)

    def _failed_by_setting(self) -> dict[str, str]:
        names = self.data["setting"].values.tolist()
        said = {name: [] for name in names}
        for name in names:
            for seed in self.seeds:
                if why := self.failed.get(cell_name(name, seed)):
                    said[name].append(f"seed {seed}: {why}")
        return {name: "; ".join(parts) for name, parts in said.items()}


_ROW = ("setting", "extra_loop", "distribution", "length")


def mean_and_error(mean: float, error: float) -> str:
    """Both as text.

    Example:
        >>> mean_and_error(0.5, 0.1), mean_and_error(0.5, np.nan), mean_and_error(np.nan, np.nan)
        ('0.500 ± 0.100', '0.500', '-')
    """
    return "-" if np.isnan(mean) else f"{mean:.3f}" + ("" if np.isnan(error) else f" ± {error:.3f}")


def cell_name(setting: str, seed: int) -> str:
    """How a result names a cell.

    Example:
        >>> cell_name("no noise", 2)
        'no noise, seed 2'
    """
    return f"{setting}, seed {seed}"


@dataclass(frozen=True)
class Ended:
    """A cell that came to its end: its setting and seed, and what was found."""

    setting: str
    seed: int
    result: EvaluationResult
    seconds: float
    trained_up_to: int


def gather(
    sweep: Sweep,
    coords: Mapping[str, list],
    ended: Sequence[Ended],
    failed: Mapping[str, str],
) -> SweepResult:
    """Put what the cells found together.

    Args:
        sweep: The sweep, at its scale.
        coords: Axes of each cell's result, with their coordinates.
        ended: The cells that came to their end.
        failed: What went wrong with others, by :func:`cell_name`.
    """
    settings = [*sweep.changes]
    by_setting = [[cell for cell in ended if cell.setting == name] for name in settings]
    said = {cell_name(cell.setting, cell.seed) for cell in ended} | set(failed)
    weights = [
        {"setting": cell.setting, "seed": cell.seed, "weights_sha256": digest}
        for cell in ended
        for digest in cell.result.provenance.weights
    ]
    with study(sweep.evaluation.seed, sweep=sweep.to_dict(defaults=False), models=weights) as watch:
        return SweepResult.of(
            watch,
            coords={"setting": settings, **coords},
            **_means(by_setting, {axis: len(values) for axis, values in coords.items()}),
            n_seeds=[len(cells) for cells in by_setting],
            trained_up_to=[_mean([cell.trained_up_to for cell in cells]) for cells in by_setting],
            seconds=[_mean([cell.seconds for cell in cells]) for cells in by_setting],
            about=sweep.about,
            task=sweep.base.task,
            n_samples=sweep.evaluation.samples,
            seeds=list(sweep.seeds),
            figure_axes={**sweep.show},
            failed=dict(failed),
            missing=[
                name
                for name in (cell_name(name, seed) for name in settings for seed in sweep.seeds)
                if name not in said
            ],
            not_judged=[
                name
                for name in sweep.base.make_task().distributions
                if name not in coords["distribution"]
            ],
        )


def _means(
    by_setting: Sequence[Sequence[Ended]], sizes: Mapping[str, int]
) -> dict[str, np.ndarray]:
    """Arrays with the setting first, NaN where no seed came to its end."""
    arrays = {}
    done = {k: over_seeds([c.result for c in cells]) for k, cells in enumerate(by_setting) if cells}
    for name, axes in SUMMARISED.items():
        if all(axis in sizes for axis in axes.split()):
            for full in (name, f"{name}_se"):
                shape = (len(by_setting), *(sizes[axis] for axis in axes.split()))
                arrays[full] = np.full(shape, np.nan)
                for place, measured in done.items():
                    arrays[full][place] = measured[full]
    return arrays


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else float("nan")
