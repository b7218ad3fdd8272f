"""Findings and figures of several seeds, and of a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from loopinterp.core.results import Figure, Finding, figures_of, findings_of
from loopinterp.figures import LinePanel, Reference, Series, line_panels, ramp
from loopinterp.training.evaluation_figures import lowest_finding, readable, where_lowest
from loopinterp.training.seed_summary import SeedSummary, SweepResult, mean_and_error

if TYPE_CHECKING:
    import xarray as xr

_TITLES = {"exact_match": "Exact match", "bit_accuracy": "Bit accuracy"}
_MOST_LINES, _COLUMNS = 5, 4
"""Lines on one panel, as many as there are colours; columns of small multiples."""

_LINES = {"distribution": "a kind of input", "length": "a problem length"}
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
    """The mean at the least and the greatest length: the lowest, and for each distribution."""
    cells, findings = _nearest(result), []
    names = cells["distribution"].values.tolist()
    if len(names) > 1 or result.not_judged:
        lowest = {n: result.lowest(n) for n in cells["length"].values.tolist()}
        over = f", mean over {result.n_seeds} seeds,"
        findings.append(lowest_finding(lowest, names, result.not_judged, over))
    for name in names:
        at = cells.sel(distribution=name)
        shares = [
            f"{float(at['exact_match'].sel(length=n)):.3f} "
            f"± {float(at['exact_match_se'].sel(length=n)):.3f} at length {n}"
            for n in sorted({cells["length"].values.tolist()[k] for k in (0, -1)})
        ]
        text = (
            f"Over {result.n_seeds} seeds, exact match on {readable(name)} is "
            f"{' and '.join(shares)} (mean ± standard error over seeds)."
        )
        findings.append(Finding(text, value=f"{float(at['exact_match'].min()):.2f} exact match"))
    return findings


def _nearest(result: SeedSummary) -> xr.Dataset:
    nearest = min(result.data["extra_loop"].values.tolist(), key=abs)
    return result.data.sel(extra_loop=nearest)


@figures_of.register
def _(result: SeedSummary) -> list[Figure]:
    """Exact match and bit accuracy against length, with the standard error over seeds."""
    cells = _nearest(result)
    marks = []
    if result.trained_up_to is not None:
        marks = [Reference(result.trained_up_to, "longest in training", "x")]
    panels, names = [], cells["distribution"].values.tolist()
    measures = [measure for measure in _TITLES if measure in cells]
    for measure in measures:
        lines = _lines(_mean_and_error(cells, measure), "distribution", names, measure)
        title = _TITLES[measure]
        panels.append(LinePanel(lines, title, title=title, y_range=(0, 1.04), references=marks))
    return [
        Figure(
            title=f"Accuracy against length, {result.n_seeds} seeds",
            plot=line_panels(panels, x_title="problem length n"),
            caption=f"Mean over {result.n_seeds} models trained from different seeds, "
            f"{result.n_samples} fresh problems each; bands are one standard error over seeds.",
            data=result.to_dataframe(*[m + end for m in measures for end in ("", "_se")]),
        )
    ]


@findings_of.register
def _(result: SweepResult) -> list[Finding]:
    """What failed, and each setting at the longest problems, on each distribution."""
    findings = []
    data = result.data.sel(extra_loop=result.nearest_extra_loop)
    n = data["length"].values.tolist()[-1]
    if result.failed:
        errors = "; ".join(f"{name} ({error})" for name, error in result.failed.items())
        text = f"{len(result.failed)} of {_n_cells(result)} cells failed: {errors}"
        findings.append(Finding(text, value=f"{len(result.failed)} failed", good=False))
    if result.missing:
        text = f"{len(result.missing)} of {_n_cells(result)} cells are not run yet."
        findings.append(Finding(text, value=f"{len(result.missing)} left"))
    if lowest := _lowest(result, n):
        findings.append(lowest)
    for name in data["distribution"].values.tolist():
        at = data.sel(distribution=name, length=n)
        columns = ("setting", "n_seeds", "exact_match", "exact_match_se")
        shares = [
            f"{setting} {mean_and_error(float(mean), float(error))}"
            for setting, n_seeds, mean, error in zip(*(at[column].values for column in columns))
            if n_seeds
        ]
        if shares:
            text = (
                f"Exact match on {readable(name)} of length {n}, mean ± standard error over seeds: "
                f"{'; '.join(shares)}."
            )
            findings.append(Finding(text))
    return findings


def _lowest(result: SweepResult, n: int) -> Finding | None:
    """Each setting's lowest distribution at a length; None where there is but one to judge."""
    names, ran = result.data["distribution"].values.tolist(), _ran(result)
    if not ran or (len(names) == 1 and not result.not_judged):
        return None
    lowest = {setting: result.lowest(setting, n) for setting in ran}
    each = "; ".join(
        f"{setting} {low.share:.3f} ({where_lowest(low, names)})" for setting, low in lowest.items()
    )
    text = f"Lowest exact match of length {n} over {len(names)} input distributions: {each}."
    if len(ran) > 1 and len({low.share for low in lowest.values()}) == 1:
        text += " All settings are equal there: none is the best."
    if result.not_judged:
        left = ", ".join(map(readable, result.not_judged))
        text += f" The task has others, on which nothing was measured: {left}."
    return Finding(text)


def _n_cells(result: SweepResult) -> int:
    return result.data.sizes["setting"] * len(result.seeds)


@figures_of.register
def _(result: SweepResult) -> list[Figure]:
    """Each measure along its axis: a panel for each distribution (and length, along loops).

    Where that would be more lines than there are colours, small multiples: a panel for each
    setting, with a line for each distribution, or along loops one figure for each distribution,
    with a line for each length.
    """
    figures = []
    for measure, along in result.figure_axes.items():
        cells = _cells(result, measure, along)
        if len(_ran(result)) <= _MOST_LINES:
            figures.append(_lines_by_setting(result, cells, measure, along))
        elif along == "length":
            figures.append(_panels_by_setting(result, cells, measure, along, ""))
        else:
            figures += [
                _panels_by_setting(result, part, measure, along, title)
                for title, part in _parts(cells, ["distribution"])
            ]
    return figures


def _cells(result: SweepResult, measure: str, along: str) -> xr.Dataset:
    """The cells of a measure that a figure along an axis shows."""
    cells = _mean_and_error(result.data, f"loop_{measure}" if along == "loop" else measure)
    return cells.sel(extra_loop=result.nearest_extra_loop) if along == "length" else cells


def _mean_and_error(data: xr.Dataset, measure: str) -> xr.Dataset:
    """A measure as ``mean``, and its standard error as ``error``."""
    names = {measure: "mean", f"{measure}_se": "error"}
    return data[[*names]].rename(names)


def _lines_by_setting(result: SweepResult, cells: xr.Dataset, measure: str, along: str) -> Figure:
    split = ["distribution"] + ([] if along == "length" else ["length"])
    marks = _cutoffs(result, None) if along == "length" else ()
    panels = [
        _panel(_lines(part, "setting", _ran(result), measure), measure, title, marks)
        for title, part in _parts(cells, split)
    ]
    plot = line_panels(panels, x_title=_WORDS[along])
    return _figure(result, plot, measure, along, "Each line is a setting")


def _panels_by_setting(
    result: SweepResult, cells: xr.Dataset, measure: str, along: str, title: str
) -> Figure:
    axis = "distribution" if "distribution" in cells.dims else "length"
    panels = [
        _panel(
            _lines(cells.sel(setting=setting), axis, cells[axis].values.tolist(), measure),
            measure,
            setting,
            _cutoffs(result, setting) if along == "length" else (),
        )
        for setting in _ran(result)
    ]
    plot = line_panels(panels, x_title=_WORDS[along], columns=_COLUMNS)
    mark = ", the dotted line the longest in training" if along == "length" else ""
    what = f"Each panel is a setting, each line {_LINES[axis]}{mark}"
    return _figure(result, plot, measure, along, what, title)


def _panel(
    lines: list[Series], measure: str, title: str, references: Sequence[Reference]
) -> LinePanel:
    return LinePanel(
        lines,
        _WORDS[measure],
        title=title,
        y_log=measure == "perplexity",
        y_range=None if measure == "perplexity" else (0, 1.04),
        references=references,
    )


def _figure(
    result: SweepResult, plot: Any, measure: str, along: str, what: str, on: str = ""
) -> Figure:
    over = f"mean over up to {len(result.seeds)} seeds, bands are one standard error of it"
    data = result.to_dataframe(f"loop_{measure}", f"loop_{measure}_se") if along == "loop" else None
    return Figure(
        title=f"{_WORDS[measure].capitalize()} by setting{on and f', {on}'}",
        plot=plot,
        caption=f"{result.about} {what}: {over}. {result.n_samples} fresh problems for each seed "
        "and point.",
        data=result.table() if data is None else data,
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


def _ran(result: SweepResult) -> list[str]:
    """Settings with a finished seed."""
    counts = result.data["n_seeds"]
    return [s for s in counts["setting"].values.tolist() if int(counts.sel(setting=s))]


def _lines(cells: xr.Dataset, axis: str, places: list[Any], measure: str) -> list[Series]:
    """A line with its band for each of some places on an axis."""
    colours = ramp(len(places)) if axis == "length" else [None] * len(places)
    lines = []
    for place, colour in zip(places, colours):
        at = cells.sel({axis: place})
        mean, error = at["mean"].values, np.nan_to_num(at["error"].values)
        if measure == "perplexity":  # a geometric mean, and the error of the logarithm
            low, high = mean * np.exp(-error), mean * np.exp(error)
        else:
            low, high = np.clip(mean - error, 0, 1), np.clip(mean + error, 0, 1)
        (x,) = (at[dim].values for dim in at["mean"].dims)
        name = {"setting": str(place), "length": f"n = {place}"}.get(axis) or readable(place)
        lines.append(Series(name, x, mean, low=low, high=high, colour=colour))
    return lines


def _cutoffs(result: SweepResult, setting: str | None) -> list[Reference]:
    """The greatest lengths in training; without words beside the title of one setting's panel."""
    seen = result.data["trained_up_to"]
    cutoffs = np.unique((seen if setting is None else seen.sel(setting=setting)).values)
    text = "longest in training" if setting is None else ""
    return [Reference(int(n), text, "x") for n in cutoffs[np.isfinite(cutoffs)]]
