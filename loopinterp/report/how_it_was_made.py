"""How a run was made: training curve, time by stage, configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pandas as pd

from loopinterp.plotting import LinePanel, Series, bars_with_intervals, line_panels
from loopinterp.results import Figure
from loopinterp.settings import flatten

if TYPE_CHECKING:
    from loopinterp.report.run_record import RunRecord

_MOST_POINTS = 600
_CURVES = {"loss": "loss", "exact_match": "exact match", "longest_n": "longest length"}


def made_figures(record: RunRecord) -> tuple[list[Figure], list[str]]:
    """The training curve and the wall time by stage, where the run has them.

    Returns:
        The figures, and a sentence for each that cannot be drawn.
    """
    figures: list[Figure] = []
    problems = []
    parts = {"metrics of training": _training_curve, "times of the stages": _stage_times}
    for name, draw in parts.items():
        try:
            figures += draw(record)
        except Exception as error:  # whatever a damaged value makes of Plotly's and pandas' code
            problems.append(f"The {name} cannot be drawn ({type(error).__name__}).")
    return figures, problems


def setting_groups(config: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """A nested configuration as tables by title, one for each of its parts.

    Example:
        >>> setting_groups({"seed": 0, "model": {"d_model": 64, "norm": None}})
        {'run': {'seed': '0'}, 'model': {'d_model': '64', 'norm': 'none'}}
    """
    parts = {title: part for title, part in config.items() if isinstance(part, Mapping)}
    own = {name: value for name, value in config.items() if name not in parts}
    tables = {title: flatten(part) for title, part in {"run": own, **parts}.items()}
    return {t: {k: _shown(v) for k, v in table.items()} for t, table in tables.items() if table}


def seconds(value: float) -> str:
    """A duration as people say it.

    Example:
        >>> seconds(0.25), seconds(7.34), seconds(80), seconds(4020)
        ('0.25 s', '7.3 s', '1 min 20 s', '1 h 7 min')
    """
    if value < 60:
        return f"{value:.2g} s" if value < 10 else f"{value:.0f} s"
    if value < 3600:
        return f"{int(value // 60)} min {int(value % 60)} s"
    return f"{int(value // 3600)} h {int(value % 3600 // 60)} min"


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(_shown(v) for v in value)
    return str(value)


def _training_curve(record: RunRecord) -> list[Figure]:
    table = pd.DataFrame(record.metrics)
    panels = _training_panels(table)
    if not panels:
        return []
    plot = line_panels(panels, x_title="step")
    plot.update_layout(showlegend=False)  # each panel says on its axis what it shows
    caption = (
        "What training wrote down, on its own batches. Where the longest length drawn goes up, "
        "the batches become harder: the loss jumps and the exact match drops."
    )
    return [Figure(title="Training", plot=plot, caption=caption, data=table, section="made")]


def _training_panels(table: pd.DataFrame) -> list[LinePanel]:
    if "step" not in table:
        return []
    # A curve of some hundred points looks the same and keeps the page small.
    table = table.iloc[:: max(len(table) // _MOST_POINTS, 1)]
    panels = []
    for column, name in _CURVES.items():
        if column in table:
            log = column == "loss" and bool((table[column] > 0).all())
            unit = (0, 1.02) if column == "exact_match" else None
            line = Series(name, table["step"], table[column], markers=False)
            panels.append(LinePanel([line], name, y_log=log, y_range=unit))
    return panels


def _stage_times(record: RunRecord) -> list[Figure]:
    times = pd.Series(
        {s: time for s, time in record.stage_seconds.items() if time > 0}, dtype=float
    )
    if times.empty:
        return []
    bars = Series("seconds", times.index, times)
    return [
        Figure(
            title="Time by stage",
            plot=bars_with_intervals([bars], value_title="seconds"),
            caption=f"Wall time of each stage; {seconds(times.sum())} in all.",
            data=times.rename_axis("stage").reset_index(name="seconds"),
            section="made",
        )
    ]
