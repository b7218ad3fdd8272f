"""Lines and bars with intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import plotly.graph_objects as go

from loopinterp.plotting.axes import (
    Reference,
    Series,
    add_line,
    add_references,
    axes,
    axis_range,
    need_panels,
    panel_figure,
    series_colour,
    suffix,
)
from loopinterp.short_repr import ShortRepr

SMALL_HEIGHT = 170
"""Of a panel in a grid of several columns."""


@dataclass(frozen=True, repr=False)
class LinePanel(ShortRepr):
    """Lines that share one pair of axes; panels are stacked over a shared x-axis."""

    series: Sequence[Series]
    y_title: str
    title: str = ""
    y_range: tuple[float, float] | None = None
    y_log: bool = False
    references: Sequence[Reference] = ()


def line_figure(
    series: Sequence[Series],
    *,
    x_title: str,
    y_title: str,
    y_range: tuple[float, float] | None = None,
    x_log: bool = False,
    y_log: bool = False,
    references: Sequence[Reference] = (),
) -> go.Figure:
    """Lines with interval bands on one pair of axes.

    Args:
        series: The lines; controls come out grey and dashed.
        y_range: Limits of the y-axis, in data units also on a logarithmic axis.
        references: Values to mark (chance level, training length).
    """
    panel = LinePanel(series, y_title, y_range=y_range, y_log=y_log, references=references)
    return line_panels([panel], x_title=x_title, x_log=x_log)


def line_panels(
    panels: Sequence[LinePanel], *, x_title: str, x_log: bool = False, columns: int = 1
) -> go.Figure:
    """Panels of lines, over one shared x-axis: one above the other, or small multiples in a grid.

    Series of one name have one colour and one legend entry in all panels.

    Args:
        panels: The panels; in a grid they share the first one's y-title and should share its range.
        x_title: Title of the shared axis.
        x_log: Whether it is logarithmic.
        columns: Panels side by side.
    """
    need_panels(panels)
    columns = min(columns, len(panels))
    height = 300 if columns == 1 else SMALL_HEIGHT
    figure = panel_figure([p.title for p in panels], columns, panel_height=height)
    places: dict[tuple[str, bool], int] = {}
    for k, panel in enumerate(panels):
        for line in panel.series:
            key = (line.name, line.control)
            first = key not in places
            if first:
                places[key] = sum(control == line.control for _, control in places)
            add_line(figure, line, k, places[key], legend=first)
        figure.layout[f"xaxis{suffix(k)}"].update(
            matches="x" if k else None,
            title_text=x_title if k + columns >= len(panels) else None,
            showticklabels=k + columns >= len(panels),
            **axis_range(None, x_log, [v for p in panels for s in p.series for v in s.x]),
        )
        figure.layout[f"yaxis{suffix(k)}"].update(
            title_text=panel.y_title if k % columns == 0 else None,
            **axis_range(panel.y_range, panel.y_log, [v for s in panel.series for v in s.y]),
        )
        add_references(figure, panel.references, k)
    return figure


def bars_with_intervals(
    groups: Sequence[Series],
    *,
    value_title: str,
    value_range: tuple[float, float] | None = None,
    references: Sequence[Reference] = (),
) -> go.Figure:
    """Bars with intervals: ``x`` of each series names the categories, ``y`` gives the values.

    They are horizontal, which leaves room for long names.

    Args:
        groups: One series for each colour; the first category is drawn at the top.
        value_title: Title of the value axis, with its unit.
        value_range: Limits of the value axis.
        references: Values to mark on the value axis (their ``axis`` is ignored).
    """
    n_bars = sum(len(s.x) for s in groups)
    figure = panel_figure([""], columns=1, panel_height=max(26 * n_bars + 40, 160))
    place = 0
    for bars in groups:
        values = np.asarray(bars.y, float)
        shade = series_colour(bars, place)
        place += not bars.control
        interval = None
        if bars.low is not None and bars.high is not None:
            up = np.asarray(bars.high, float) - values
            down = values - np.asarray(bars.low, float)
            interval = {"array": up, "arrayminus": down, "thickness": 1.5, "width": 5}
        figure.add_bar(
            name=bars.name,
            orientation="h",
            marker={"color": shade, "pattern": {"shape": "/" if bars.control else ""}},
            hovertemplate=f"%{{y}}<br>{bars.name}: %{{x:.3g}}<extra></extra>",
            x=values,
            y=list(bars.x),
            error_x=interval,
            **axes(0),
        )
    figure.update_xaxes(title_text=value_title, **axis_range(value_range, False))
    figure.update_yaxes(type="category", showgrid=False, autorange="reversed")
    figure.update_layout(showlegend=len(groups) > 1, barmode="group")
    add_references(figure, [replace(mark, axis="x") for mark in references], 0)
    return figure
