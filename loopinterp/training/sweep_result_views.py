"""What a sweep says and shows: a line for each setting."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from loopinterp.plotting import PALETTE, LinePanel, Reference, Series, line_panels, ramp
from loopinterp.results import Figure, Finding, figures_of, findings_of
from loopinterp.training.evaluation_views import SECTION as SECTION
from loopinterp.training.evaluation_views import readable
from loopinterp.training.sweep_result import SweepResult, mean_and_error

if TYPE_CHECKING:
    import xarray as xr

_WORDS = {
    "exact_match": "exact match",
    "bit_accuracy": "bit accuracy",
    "perplexity": "perplexity of the right answer",
    "length": "problem length n",
    "extra_loop": "loops beyond those of the model",
    "loop": "loops",
}


@findings_of.register
def _(result: SweepResult) -> list[Finding]:
    """What failed, and each setting at the longest problems, on each distribution."""
    findings = []
    data = result.data.sel(extra_loop=result.nearest_extra_loop)
    n = data["length"].values.tolist()[-1]
    if result.failed:
        told = "; ".join(f"{name} ({why})" for name, why in result.failed.items())
        text = f"{len(result.failed)} of {_n_cells(result)} cells failed: {told}"
        findings.append(Finding(text, value=f"{len(result.failed)} failed", good=False))
    if result.missing:
        text = f"{len(result.missing)} of {_n_cells(result)} cells are not run yet."
        findings.append(Finding(text, value=f"{len(result.missing)} left"))
    for name in data["distribution"].values.tolist():
        at = data.sel(distribution=name, length=n)
        said = [
            f"{setting} {mean_and_error(float(mean), float(error))}"
            for setting, n_seeds, mean, error in zip(*(at[name].values for name in _SAID))
            if n_seeds
        ]
        if said:
            text = (
                f"Exact match on {readable(name)} of length {n}, mean ± standard error over seeds: "
                f"{'; '.join(said)}."
            )
            findings.append(Finding(text))
    return findings


_SAID = ("setting", "n_seeds", "exact_match", "exact_match_se")


def _n_cells(result: SweepResult) -> int:
    return result.data.sizes["setting"] * len(result.seeds)


@figures_of.register
def _(result: SweepResult) -> list[Figure]:
    """Each measure along its axis: a panel for each distribution (and length, along loops)."""
    return [_figure(result, measure, along) for measure, along in result.show.items()]


def _figure(result: SweepResult, measure: str, along: str) -> Figure:
    name = f"loop_{measure}" if along == "loop" else measure
    cells = result.data[[name, f"{name}_se"]]
    if along == "length":
        cells = cells.sel(extra_loop=result.nearest_extra_loop)
    split = ["distribution"] + ([] if along == "length" else ["length"])
    panels = [
        LinePanel(
            _lines(result, part, name),
            _WORDS[measure],
            title=title,
            y_log=measure == "perplexity",
            y_range=None if measure == "perplexity" else (0, 1.04),
            references=_cutoffs(result) if along == "length" else (),
        )
        for title, part in _parts(cells, split)
    ]
    over = f"mean over up to {len(result.seeds)} seeds, bands are one standard error of it"
    return Figure(
        title=f"{_WORDS[measure].capitalize()} by setting",
        plot=line_panels(panels, x_title=_WORDS[along]),
        caption=f"{result.about} Each line is a setting: {over}. {result.n_samples} fresh "
        "problems for each seed and point.",
        data=result.table() if along != "loop" else result.to_dataframe(name, f"{name}_se"),
    )


def _parts(cells: xr.Dataset, axes: list[str]) -> list[tuple[str, xr.Dataset]]:
    """A dataset taken apart along some axes, each part with its name."""
    parts = [("", cells)]
    for axis in axes:
        parts = [
            (f"{title}, n = {at}" if axis == "length" else readable(at), part.sel({axis: at}))
            for title, part in parts
            for at in part[axis].values.tolist()
        ]
    return parts


def _lines(result: SweepResult, cells: xr.Dataset, name: str) -> list[Series]:
    """A line for each setting of which a seed came to its end."""
    counts = result.data["n_seeds"]
    settings = [s for s in counts["setting"].values.tolist() if int(counts.sel(setting=s))]
    few = len(settings) < len(PALETTE)
    colours = [None] * len(settings) if few else ramp(len(settings))
    lines = []
    for setting, colour in zip(settings, colours):
        at = cells.sel(setting=setting)
        mean, error = at[name].values, np.nan_to_num(at[f"{name}_se"].values)
        if "perplexity" in name:  # whose mean is geometric, and whose error that of the logarithm
            low, high = mean * np.exp(-error), mean * np.exp(error)
        else:
            low, high = np.clip(mean - error, 0, 1), np.clip(mean + error, 0, 1)
        (x,) = (at[axis].values for axis in at[name].dims)
        lines.append(Series(setting, x, mean, low=low, high=high, colour=colour))
    return lines


def _cutoffs(result: SweepResult) -> list[Reference]:
    """The greatest lengths in training, of the settings that ran."""
    cutoffs = np.unique(result.data["trained_up_to"].values)
    return [Reference(int(n), "longest in training", "x") for n in cutoffs[np.isfinite(cutoffs)]]
