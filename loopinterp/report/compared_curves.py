"""Curves that several runs have in common, read from their saved results, one table for all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from loopinterp.intervals import ENDS
from loopinterp.plotting import LinePanel, Series, bars_with_intervals, line_panels
from loopinterp.results import Figure, Result

if TYPE_CHECKING:
    import pandas as pd

    from loopinterp.report.run_record import RunRecord

COLUMNS = ("run", "figure", "panel", "x", "value", "low", "high")
_MOST_POINTS = 300

Point = tuple[Any, float, float, float]


@dataclass(frozen=True)
class Shared:
    """A figure that runs have in common: what it is, and how it is read."""

    title: str
    x_title: str
    caption: str
    control: str = ""
    logarithmic: tuple[str, ...] = ()
    bars: bool = False


EXACT = Shared(
    "Exact match by length",
    "length",
    "Whole answers that are right, a line for each run, at the loops that the task asks for. "
    "Bands: 95% intervals. Runs may have been measured at other lengths.",
    "Each run's own report has what a constant answer would get.",
)
SETTLING = Shared(
    "Settling, loop by loop",
    "loop",
    "Above: examples whose whole answer is right after so many loops. Below: how far the last loop "
    "moved the state, relative to its size, at the position that moved most; median over examples. "
    "A line ends where the state rests.",
    "A state can settle on a wrong answer: both belong together.",
    logarithmic=("relative residual",),
)
PROGRAMS = Shared(
    "Each program against each run",
    "whole runs that are the program's",
    "After the exchange of a state, over pairs on which something happens: how often the run's "
    "answer is the program's at every delay to the end.",
    "Each run's verdict names its controls; a random change of equal norm is in its own report.",
    bars=True,
)
TRAINING = Shared(
    "Training loss",
    "step",
    "What training wrote down, on its own batches. Runs that were not trained have none.",
    logarithmic=("loss",),
)
FIGURES = (EXACT, PROGRAMS, SETTLING, TRAINING)
"""In reading order."""


def curve_rows(name: str, record: RunRecord) -> list[tuple[Any, ...]]:
    """The rows of :data:`COLUMNS` of one run.

    Args:
        name: What the run is called in the comparison.
        record: The run.
    """
    rows: list[tuple[Any, ...]] = []
    readers = {"evaluation": _exact, "program-comparison": _programs, "convergence": _settling}
    for result in record.results.values():
        if result.kind in readers:
            try:
                found = [*readers[result.kind](result)]
            except Exception:  # a damaged value; the run's own report says so
                continue
            rows += [(name, figure, panel, *point) for figure, panel, point in found]
    step = max(len(record.metrics) // _MOST_POINTS, 1)
    rows += [
        (name, TRAINING.title, "loss", row["step"], row["loss"], np.nan, np.nan)
        for row in record.metrics[::step]
        if "step" in row and row.get("loss", 0) > 0
    ]
    return rows


Found = Iterator[tuple[str, str, Point]]


def _exact(result: Result) -> Found:
    extra = result.data["extra_loop"].values
    data = result.data["exact_match"].sel(extra_loop=extra[np.abs(extra).argmin()])
    for distribution in data["distribution"].values.tolist():
        for n in data["length"].values.tolist():
            at = data.sel(distribution=distribution, length=n)
            yield EXACT.title, f"{distribution} inputs", (n, *_ends(at))


def _programs(result: Result) -> Found:
    data = result.data["whole_run"].isel(model=0).sel(stratum="all")
    for program in data["program"].values.tolist():
        yield PROGRAMS.title, "", (program, *_ends(data.sel(program=program)))


def _settling(result: Result) -> Found:
    right = result.data["right"].transpose("loop", "batch", "pos").values
    whole = ((right != 0).all(-1)).mean(-1)
    residual = np.nanmedian(result.data["residual_max"].values[1:], axis=1)
    for loop, share in zip(result.data["loop"].values.tolist(), whole):
        yield SETTLING.title, "whole answers right", (loop, float(share), np.nan, np.nan)
    for loop, moved in zip(result.data["loop"].values.tolist()[1:], residual):
        yield SETTLING.title, "relative residual", (loop, float(moved), np.nan, np.nan)


def _ends(values: Any) -> tuple[float, float, float]:
    value, low, high = (float(values.sel(estimate=end)) for end in ENDS)
    return value, low, high


def compared_figures(curves: pd.DataFrame, runs: list[str]) -> list[Figure]:
    """The figures of a table of curves, each run in its colour in all of them."""
    from loopinterp.plotting import colour

    figures = []
    shades = {run: colour(k) for k, run in enumerate(runs)}
    for shared in FIGURES:
        table: Any = curves[curves["figure"] == shared.title]
        if len(table):
            plot = (_bars if shared.bars else _lines)(shared, table, shades)
            about = {"caption": shared.caption, "control": shared.control}
            figures.append(
                Figure(title=shared.title, plot=plot, data=table, section="curves", **about)
            )
    return figures


def _lines(shared: Shared, table: Any, shades: Mapping[str, str]) -> Any:
    panels = []
    for panel, rows in table.groupby("panel", sort=False):
        log = panel in shared.logarithmic
        rows = rows[rows["value"] > 0] if log else rows
        lines = [_series(run, rows[rows["run"] == run], shades) for run in shades]
        lines = [line for line in lines if len(line.x)]
        unit = None if log else (0, 1.03)
        panels.append(LinePanel(lines, str(panel), y_range=unit, y_log=log))
    return line_panels(panels, x_title=shared.x_title)


def _bars(shared: Shared, table: Any, shades: Mapping[str, str]) -> Any:
    best: Any = table.groupby("x")["value"].max()
    order = best.sort_values(ascending=False, kind="stable").index[:6].tolist()
    groups = []
    for run in shades:
        rows = table[table["run"] == run].set_index("x").reindex(order).reset_index()
        if rows["value"].notna().any():
            rows["x"] = [name.replace("_", " ") for name in rows["x"]]
            groups.append(_series(run, rows, shades))
    return bars_with_intervals(groups, value_title=shared.x_title, value_range=(0, 1.02))


def _series(run: str, rows: Any, shades: Mapping[str, str]) -> Series:
    known = rows["low"].notna().any()
    low, high = (rows["low"], rows["high"]) if known else (None, None)
    return Series(run, rows["x"].tolist(), rows["value"], low, high, colour=shades[run])
