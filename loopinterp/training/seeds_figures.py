"""Findings and figures of several seeds and of a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from loopinterp.core.results import Figure, Finding, figures_of, findings_of
from loopinterp.figures import LinePanel, Reference, Series, line_panels, ramp
from loopinterp.training.evaluation import nearest_extra_loop
from loopinterp.training.evaluation_figures import (
    cutoff_mark,
    lowest_finding,
    readable,
    unmeasured,
    where_lowest,
)
from loopinterp.training.seeds import SeedSummary, SweepResult, mean_and_error

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
def _(result: SeedSummary) -> list[Finding]:
    cells, findings = result.data.sel(extra_loop=nearest_extra_loop(result)), []
    names, lengths = (cells[axis].values.tolist() for axis in ("distribution", "length"))
    if len(names) > 1 or result.not_judged:
        lowest = {n: result.lowest(n) for n in lengths}
        findings.append(lowest_finding(lowest, names, result.not_judged, result.n_seeds))
    for name in names:
        at = cells.sel(distribution=name)
        exact, error = (at[k].to_series() for k in ("exact_match", "exact_match_se"))
        ends = sorted({lengths[0], lengths[-1]})
        shares = " and ".join(f"{mean_and_error(exact[n], error[n])} at length {n}" for n in ends)
        text = f"Exact match on {readable(name)} is {shares} (mean ± standard error of "
        text += f"{result.n_seeds} seeds)."
        findings.append(Finding(text, value=f"{exact.min():.2f} exact match"))
    return findings


@figures_of.register
def _(result: SeedSummary) -> list[Figure]:
    cells = result.data.sel(extra_loop=nearest_extra_loop(result))
    measures = [k for k in ("exact_match", "bit_accuracy") if k in cells]
    if float(cells["exact_match"].min()) >= 0.99:
        measures = ["exact_match"]  # where everything is right, so is every bit
    marks = cutoff_mark(result.trained_up_to)
    panels = [_panel(cells, k, "distribution", marks) for k in measures]
    dotted = " Dotted: longest in training." * bool(marks)
    return [
        Figure(
            title=f"Accuracy against length, {result.n_seeds} seeds",
            plot=line_panels(panels, x_title="problem length n"),
            caption=f"Mean over {result.n_seeds} models trained from different seeds, "
            f"{result.n_samples} fresh problems each. Bands: one standard error.{dotted}",
            data=result.to_dataframe(*(k + end for k in measures for end in ("", "_se"))),
        )
    ]


@findings_of.register
def _(result: SweepResult) -> list[Finding]:
    findings = []
    data = result.data.sel(extra_loop=nearest_extra_loop(result))
    names, n = data["distribution"].values.tolist(), data["length"].values.tolist()[-1]
    n_cells, n_failed = data.sizes["setting"] * len(result.seeds), len(result.failed)
    if result.failed:
        errors = "; ".join(f"{name} ({error})" for name, error in result.failed.items())
        text = f"{n_failed} of {n_cells} cells failed: {errors}"
        findings.append(Finding(text, value=f"{n_failed} failed", good=False))
    if result.missing:
        text = f"{len(result.missing)} of {n_cells} cells are not run yet."
        findings.append(Finding(text, value=f"{len(result.missing)} left"))
    lowest = {setting: result.lowest(setting, n) for setting in _ran(result)}
    if not lowest:
        return findings
    if len(names) > 1 or result.not_judged:
        each = "; ".join(f"{k} {v.share:.3f} ({where_lowest(v, names)})" for k, v in lowest.items())
        text = f"Lowest exact match at length {n} over {len(names)} input distributions: {each}."
        if len(lowest) > 1 and len({low.share for low in lowest.values()}) == 1:
            text += " All settings are equal: none is the best."
        findings.append(Finding(text + unmeasured(result.not_judged)))
    for name in names:
        at = data.sel(distribution=name, length=n)
        mean, error = (at[k].to_series() for k in ("exact_match", "exact_match_se"))
        shares = "; ".join(f"{k} {mean_and_error(mean[k], error[k])}" for k in lowest)
        text = f"Exact match on {readable(name)} at length {n} (mean ± standard error of seeds)"
        findings.append(Finding(f"{text}: {shares}."))
    return findings


@figures_of.register
def _(result: SweepResult) -> list[Figure]:
    """Each measure along its axis: a panel for each distribution, or for each of many settings."""
    figures, ran = [], _ran(result)
    for measure, along in result.figure_axes.items():
        # Along loops it is the measure after each number of loops, whatever T(n) is.
        name, by_loop = f"loop_{measure}" if along == "loop" else measure, along != "length"
        cells = result.data[[name, f"{name}_se"]].sel(setting=ran)
        cells = cells.rename({name: measure, f"{name}_se": f"{measure}_se"})
        if not by_loop:
            cells = cells.sel(extra_loop=nearest_extra_loop(result))
        if len(ran) <= 5:  # lines on one panel, as many as there are colours
            axes = [], ["distribution", *["length"] * by_loop], "setting"
            what, columns = "Each line is a setting.", 1
        else:
            axes = ["distribution"] * by_loop, ["setting"], "length" if by_loop else "distribution"
            lines, columns = "a problem length" if by_loop else "a kind of input", 4
            what = f"Each panel is a setting, each line {lines}."
        what += "" if by_loop else " Dotted: longest in training."
        for on, part in _parts(cells, axes[0]):
            panels = []
            for title, cell in _parts(part, axes[1]):
                setting = cell["setting"]
                cutoffs = np.unique(result.data["trained_up_to"].sel(setting=setting).values)
                finite = [] if by_loop else cutoffs[np.isfinite(cutoffs)].tolist()
                marks = [Reference(int(n), "", "x") for n in finite]
                panels.append(_panel(cell, measure, axes[2], marks, title))
            pair = name, f"{name}_se"
            figures.append(
                Figure(
                    title=f"{_WORDS[measure].capitalize()} by setting{on and f', {on}'}",
                    plot=line_panels(panels, x_title=_WORDS[along], columns=columns),
                    caption=f"{result.about} {what} Means over up to {len(result.seeds)} seeds, "
                    f"{result.n_samples} fresh problems each; bands: one standard error over "
                    "seeds.",
                    data=result.to_dataframe(*pair) if along == "loop" else result.table(),
                )
            )
    return figures


def _parts(cells: xr.Dataset, axes: list[str]) -> list[tuple[str, xr.Dataset]]:
    """A dataset split along some axes, each part with its name."""
    parts = [("", cells)]
    for axis in axes:
        parts = [
            (f"{title}{title and ', '}{_name(axis, at)}", part.sel({axis: at}))
            for title, part in parts
            for at in part[axis].values.tolist()
        ]
    return parts


def _name(axis: str, place: Any) -> str:
    return {"setting": str(place), "length": f"n = {place}"}.get(axis) or readable(place)


def _ran(result: SweepResult) -> list[str]:
    settings, counts = (result.data[k].values.tolist() for k in ("setting", "n_seeds"))
    return [setting for setting, n_seeds in zip(settings, counts) if n_seeds]


def _panel(
    cells: xr.Dataset, measure: str, axis: str, marks: Sequence[Reference], title: str = ""
) -> LinePanel:
    """A line for each place on an axis, in a band of one standard error."""
    log = measure == "perplexity"
    places = cells[axis].values.tolist()
    # Lengths have an order, and so their colours.
    colours = ramp(len(places)) if axis == "length" else [None] * len(places)
    lines = []
    for place, colour in zip(places, colours):
        at = cells.sel({axis: place})
        mean, error = at[measure].values, np.nan_to_num(at[f"{measure}_se"].values)
        if log:  # a geometric mean, and the error of the logarithm
            low, high = mean * np.exp(-error), mean * np.exp(error)
        else:
            low, high = np.clip(mean - error, 0, 1), np.clip(mean + error, 0, 1)
        (x,) = (at[dim].values for dim in at[measure].dims)
        lines.append(Series(_name(axis, place), x, mean, low=low, high=high, colour=colour))
    limits = None if log else (0, 1.04)
    return LinePanel(
        lines, _WORDS[measure], title=title, y_log=log, y_range=limits, references=marks
    )
