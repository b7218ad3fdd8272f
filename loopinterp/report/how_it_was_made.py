"""How a run was made: training curve, time by stage, configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd

from loopinterp.plotting import LinePanel, Series, bars_with_intervals, line_panels
from loopinterp.results import Figure

if TYPE_CHECKING:
    from loopinterp.report.run_record import RunRecord

_MOST_POINTS = 600
_CURVES = {"loss": "loss", "exact_match": "exact match", "longest_n": "longest length"}


@dataclass(frozen=True)
class SettingGroup:
    """A table of settings."""

    title: str
    rows: list[tuple[str, str]]


def made_figures(record: RunRecord) -> list[Figure]:
    """The training curve and the wall time by stage, where the run has them."""
    figures = [_training_curve(record), _stage_times(record)]
    return [figure for figure in figures if figure is not None]


def setting_groups(config: Mapping[str, Any]) -> list[SettingGroup]:
    """A nested configuration as tables, one for each of its parts.

    Example:
        >>> setting_groups({"seed": 0, "model": {"d_model": 64, "norm": None}})
        [SettingGroup(title='run', rows=[('seed', '0')]),
         SettingGroup(title='model', rows=[('d_model', '64'), ('norm', 'none')])]
    """
    own = [(k, _shown(v)) for k, v in config.items() if not isinstance(v, Mapping)]
    groups = [SettingGroup("run", own)] if own else []
    for title, part in config.items():
        if isinstance(part, Mapping):
            groups.append(SettingGroup(title, list(_flat(part))))
    return [group for group in groups if group.rows]


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


def _flat(part: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for key, value in part.items():
        if isinstance(value, Mapping):
            rows += _flat(value, f"{prefix}{key}.")
        else:
            rows.append((f"{prefix}{key}", _shown(value)))
    return rows


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


def _training_curve(record: RunRecord) -> Figure | None:
    table = pd.DataFrame(record.metrics)
    panels = _training_panels(table)
    if not panels:
        return None
    plot = line_panels(panels, x_title="step")
    plot.update_layout(showlegend=False)  # each panel says on its axis what it shows
    return Figure(
        title="Training",
        plot=plot,
        caption=(
            "What training wrote down, on its own batches. Where the longest length drawn goes up, "
            "the batches become harder: the loss jumps and the exact match drops."
        ),
        data=table,
        section="made",
    )


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


def _stage_times(record: RunRecord) -> Figure | None:
    stages = {k: v for k, v in record.stage_seconds.items() if v > 0}
    if not stages:
        return None
    bars = Series("seconds", list(stages), list(stages.values()))
    return Figure(
        title="Time by stage",
        plot=bars_with_intervals([bars], value_title="seconds"),
        caption=f"Wall time of each stage; {seconds(sum(stages.values()))} in all.",
        data=pd.DataFrame({"stage": list(stages), "seconds": list(stages.values())}),
        section="made",
    )
