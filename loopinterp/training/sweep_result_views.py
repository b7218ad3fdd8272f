"""What a sweep says and shows: a line for each setting, or a panel where they are many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from loopinterp.plotting import LinePanel, Reference, Series, line_panels, ramp
from loopinterp.results import Figure, Finding, figures_of, findings_of
from loopinterp.training.evaluation_views import SECTION as SECTION
from loopinterp.training.evaluation_views import readable, where_lowest
from loopinterp.training.sweep_result import SweepResult, mean_and_error

if TYPE_CHECKING:
    import xarray as xr

MOST_LINES = 5
"""On one panel: as many as there are colours."""

COLUMNS = 4
"""Of small multiples; the report takes fewer where it is narrow."""

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
    if lowest := _lowest(result, n):
        findings.append(lowest)
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


def _lowest(result: SweepResult, n: int) -> Finding | None:
    """Each setting's lowest distribution at a length; None where there is but one to judge."""
    names, ran = result.data["distribution"].values.tolist(), _ran(result)
    if not ran or (len(names) == 1 and not result.not_judged):
        return None
    lowest = {setting: result.lowest(setting, n) for setting in ran}
    each = "; ".join(
        f"{setting} {of.share:.3f} ({where_lowest(of, names)})" for setting, of in lowest.items()
    )
    text = f"Lowest exact match of length {n} over {len(names)} input distributions: {each}."
    if len(ran) > 1 and len({of.share for of in lowest.values()}) == 1:
        text += " All settings are equal there: none is the best."
    if result.not_judged:
        left = ", ".join(map(readable, result.not_judged))
        text += f" The task has others, on which nothing was measured: {left}."
    return Finding(text)


_SAID = ("setting", "n_seeds", "exact_match", "exact_match_se")


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
        if len(_ran(result)) <= MOST_LINES:
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
    """A measure as ``mean``, and its standard error as ``error``."""
    name = f"loop_{measure}" if along == "loop" else measure
    cells = result.data[[name, f"{name}_se"]].rename({name: "mean", f"{name}_se": "error"})
    return cells.sel(extra_loop=result.nearest_extra_loop) if along == "length" else cells


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
    of = "distribution" if "distribution" in cells.dims else "length"
    panels = [
        _panel(
            _lines(cells.sel(setting=setting), of, cells[of].values.tolist(), measure),
            measure,
            setting,
            _cutoffs(result, setting) if along == "length" else (),
        )
        for setting in _ran(result)
    ]
    plot = line_panels(panels, x_title=_WORDS[along], columns=COLUMNS)
    mark = ", the dotted line the longest in training" if along == "length" else ""
    what = f"Each panel is a setting, each line {_LINES[of]}{mark}"
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
    """Settings of which a seed came to its end."""
    counts = result.data["n_seeds"]
    return [s for s in counts["setting"].values.tolist() if int(counts.sel(setting=s))]


def _lines(cells: xr.Dataset, of: str, places: list[Any], measure: str) -> list[Series]:
    """A line with its band for each of some places on an axis."""
    colours = ramp(len(places)) if of == "length" else [None] * len(places)
    lines = []
    for place, colour in zip(places, colours):
        at = cells.sel({of: place})
        mean, error = at["mean"].values, np.nan_to_num(at["error"].values)
        if measure == "perplexity":  # a geometric mean, and the error of the logarithm
            low, high = mean * np.exp(-error), mean * np.exp(error)
        else:
            low, high = np.clip(mean - error, 0, 1), np.clip(mean + error, 0, 1)
        (x,) = (at[axis].values for axis in at["mean"].dims)
        name = {"setting": str(place), "length": f"n = {place}"}.get(of) or readable(place)
        lines.append(Series(name, x, mean, low=low, high=high, colour=colour))
    return lines


def _cutoffs(result: SweepResult, setting: str | None) -> list[Reference]:
    """The greatest lengths in training; without words beside the title of one setting's panel."""
    seen = result.data["trained_up_to"]
    cutoffs = np.unique((seen if setting is None else seen.sel(setting=setting)).values)
    text = "longest in training" if setting is None else ""
    return [Reference(int(n), text, "x") for n in cutoffs[np.isfinite(cutoffs)]]
