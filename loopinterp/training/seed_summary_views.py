"""What evaluations of several seeds say and show together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from loopinterp.plotting import LinePanel, Reference, Series, line_panels
from loopinterp.results import Figure, Finding, figures_of, findings_of
from loopinterp.training.evaluation_views import SECTION as SECTION
from loopinterp.training.evaluation_views import lowest_finding, readable
from loopinterp.training.seed_summary import SeedSummary

if TYPE_CHECKING:
    import xarray as xr

TITLES = {"exact_match": "Exact match", "bit_accuracy": "Bit accuracy"}


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
        said = [
            f"{float(at['exact_match'].sel(length=n)):.3f} "
            f"± {float(at['exact_match_se'].sel(length=n)):.3f} at length {n}"
            for n in sorted({cells["length"].values.tolist()[k] for k in (0, -1)})
        ]
        text = (
            f"Over {result.n_seeds} seeds, exact match on {readable(name)} is "
            f"{' and '.join(said)} (mean ± standard error over seeds)."
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
    panels = []
    shown = [measure for measure in TITLES if measure in cells]
    for measure in shown:
        lines = [
            _line(cells.sel(distribution=name), measure, readable(name))
            for name in cells["distribution"].values.tolist()
        ]
        title = TITLES[measure]
        panels.append(LinePanel(lines, title, title=title, y_range=(0, 1.04), references=marks))
    return [
        Figure(
            title=f"Accuracy against length, {result.n_seeds} seeds",
            plot=line_panels(panels, x_title="problem length n"),
            caption=f"Mean over {result.n_seeds} models trained from different seeds, "
            f"{result.n_samples} fresh problems each; bands are one standard error over seeds.",
            data=result.to_dataframe(*[m + end for m in shown for end in ("", "_se")]),
        )
    ]


def _line(cells: xr.Dataset, measure: str, name: str) -> Series:
    mean, error = cells[measure].values, cells[f"{measure}_se"].values
    low, high = (np.clip(mean + sign * error, 0, 1) for sign in (-1, 1))
    return Series(name, cells["length"].values, mean, low=low, high=high)
