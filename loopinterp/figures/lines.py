"""Lines and bars with intervals, lines of heads, and lines in three dimensions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import plotly.graph_objects as go

from loopinterp.core.errors import InputError
from loopinterp.core.text import ShortRepr
from loopinterp.figures.axes import (
    PALETTE,
    Reference,
    Series,
    add_line,
    add_references,
    axes,
    axis_range,
    colour,
    need_panels,
    panel_figure,
    ramp,
    series_colour,
    suffix,
    template,
)

if TYPE_CHECKING:
    import xarray as xr


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
        panels: In a grid they share the first one's y-title and should share its range.
        x_title: Of the shared axis, like ``x_log``.
        columns: Panels side by side.
    """
    need_panels(panels)
    columns = min(columns, len(panels))
    height = 170 if columns > 1 else 300  # pixels of a panel
    figure = panel_figure([p.title for p in panels], columns, panel_height=height)
    places: dict[tuple[str, bool], int] = {}
    for k, panel in enumerate(panels):
        for line in panel.series:
            key = (line.name, line.control)
            first = key not in places
            if first:
                # Controls and other lines go through their own styles.
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
        value_title: With its unit, of the axis of values.
        value_range: Limits of that axis.
        references: Values to mark on that axis (their ``axis`` is ignored).
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
            # Plotly takes distances from the value, not ends.
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


def by_head(values: xr.DataArray) -> xr.DataArray:
    """Values with one axis of named heads in place of layer and head.

    Example:
        >>> import xarray as xr
        >>> by_head(xr.DataArray(np.zeros((2, 1)), dims=("layer", "head")))["head"].values.tolist()
        ['head 0.0', 'head 1.0']
    """
    n_layers, n_heads = values.sizes["layer"], values.sizes["head"]
    places = np.ndindex(n_layers, n_heads)
    names = [f"head {head}" if n_layers == 1 else f"head {layer}.{head}" for layer, head in places]
    # Layers and heads as one axis of heads.
    one = values.stack(by_head=("layer", "head"), create_index=False)
    one = one.drop_vars(("layer", "head"), errors="ignore")
    return one.rename(by_head="head").assign_coords(head=names)


def head_lines(values: xr.DataArray) -> list[Series]:
    """A line for each head along the remaining axis; colours follow from a head's place alone.

    Args:
        values: With axes layer and head, one more, and that of an estimate if it is one.
    """
    heads = by_head(values)
    n = heads.sizes["head"]
    shades = map(colour, range(n)) if n < len(PALETTE) else ramp(n)  # grey is a control's
    return [
        Series.of(str(name), heads.sel(head=name), colour=shade)
        for name, shade in zip(heads["head"].values, shades)
    ]


def joined(paths: np.ndarray) -> np.ndarray:
    """Paths ``[path, point, axis]`` as one line ``[point, axis]``, with a gap after each.

    Example:
        >>> joined(np.ones((2, 1, 2))).tolist()
        [[1.0, 1.0], [nan, nan], [1.0, 1.0], [nan, nan]]
    """
    # [path, 1, axis]: NaN interrupts a line.
    gap = np.full_like(paths[:, :1], np.nan, dtype=float)
    return np.concatenate([paths, gap], axis=1).reshape(-1, paths.shape[-1])


def space_figure(
    lines: Sequence[Series], heights: Mapping[str, np.ndarray], *, titles: Sequence[str]
) -> go.Figure:
    """Lines in space, that can be turned; a series without connecting line shows points.

    Args:
        lines: The first two coordinates; NaN leaves a gap. One with ``markers`` is points alone.
        heights: The third coordinate of each line, by its name.
        titles: Of the three axes.

    Raises:
        InputError: If a line has no height, or one of another length.
    """
    figure = go.Figure()
    for place, line in enumerate(lines):
        z = np.asarray(heights.get(line.name, ()), dtype=float)
        if len(z) != len(line.x):
            raise InputError(
                f"heights of line {line.name!r}",
                expected=f"{len(line.x)} values, one for each point",
                given=f"{len(z)}",
                fix="Name heights as the lines are named.",
            )
        shade = PALETTE.get(line.colour or "", line.colour) or colour(place)
        style: dict[str, Any] = {"mode": "lines", "line": {"color": shade, "width": 3}}
        if line.control:
            style["line"] |= {"dash": "dash"}
        if line.markers:
            style = {"mode": "markers", "marker": {"color": shade, "size": 4, "symbol": "x"}}
        hover = f"{line.name}<br>%{{x:.3g}}, %{{y:.3g}}, %{{z:.3g}}<extra></extra>"
        figure.add_scatter3d(
            x=list(line.x), y=list(line.y), z=z, name=line.name, hovertemplate=hover, **style
        )
    named: dict[str, Any] = {
        f"{axis}axis": {"title": {"text": t, "font": {"size": 11}}, "tickfont": {"size": 10}}
        for axis, t in zip("xyz", titles)
    }
    # From so far away, and looking so far below the middle, that the axis titles are seen whole.
    named["camera"] = {"eye": {"x": 1.7, "y": 1.7, "z": 1.1}, "center": {"z": -0.2}}
    margin = {"l": 0, "r": 0}
    return figure.update_layout(template=template(), height=520, scene=named, margin=margin)
