"""Lines and bars with intervals, lines of heads, and lines in three dimensions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import plotly.graph_objects as go

from loopinterp.core.errors import need
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
    panel_figure,
    ramp,
    styles,
    suffix,
    template,
)

if TYPE_CHECKING:
    import xarray as xr


@dataclass(frozen=True, repr=False)
class LinePanel(ShortRepr):
    """Lines on one pair of axes."""

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

    ``y_range`` is in data units, also on a logarithmic axis.
    """
    panel = LinePanel(series, y_title, y_range=y_range, y_log=y_log, references=references)
    return line_panels([panel], x_title=x_title, x_log=x_log)


def line_panels(
    panels: Sequence[LinePanel], *, x_title: str, x_log: bool = False, columns: int = 1
) -> go.Figure:
    """Panels of lines over one x-axis, one above the other or in a grid of ``columns``.

    Series of one name have one style and legend entry. In a grid, panels show the first one's
    y-title and should share its range.
    """
    columns = min(columns, len(panels))
    height = 170 if columns > 1 else 300  # pixels of a panel
    figure = panel_figure([p.title for p in panels], columns, panel_height=height)
    style_of = styles(line for panel in panels for line in panel.series)
    in_legend = set[tuple[str, bool]]()
    for k, panel in enumerate(panels):
        positive = [v for line in panel.series for v in line.y if v > 0]
        for line in panel.series:
            if panel.y_log and positive and line.low is not None:
                # The end of an interval below 0 has no place on the axis.
                line = replace(line, low=np.clip(np.asarray(line.low, float), min(positive), None))
            key = (line.name, line.control)
            add_line(figure, line, k, style_of[key], legend=key not in in_legend)
            in_legend.add(key)
        figure.layout[f"xaxis{suffix(k)}"].update(
            matches="x" if k else None,
            title_text=x_title if k + columns >= len(panels) else None,
            showticklabels=k + columns >= len(panels),
            **axis_range(None, x_log, [v for p in panels for s in p.series for v in s.x]),
        )
        figure.layout[f"yaxis{suffix(k)}"].update(
            title_text=panel.y_title if k % columns == 0 else None,
            **axis_range(_y_range(panel), panel.y_log, [v for s in panel.series for v in s.y]),
        )
        add_references(figure, panel.references, k)
    return figure


def _y_range(panel: LinePanel) -> tuple[float, float] | None:
    """The panel's own limits, or 1% about values that differ by no more than rounding."""
    values = np.concatenate([np.asarray(line.y, float) for line in panel.series] or [np.empty(0)])
    values = values[np.isfinite(values)]
    if panel.y_range or panel.y_log or not values.size:
        return panel.y_range
    middle, spread = float(values.mean()), float(np.ptp(values))
    if not 0 < spread < 1e-4 * abs(middle):
        return None
    return middle - 0.01 * abs(middle), middle + 0.01 * abs(middle)


def bars_with_intervals(
    groups: Sequence[Series],
    *,
    value_title: str,
    value_range: tuple[float, float] | None = None,
    references: Sequence[Reference] = (),
) -> go.Figure:
    """Horizontal bars with intervals; ``x`` of a series names categories, ``y`` has the values.

    Args:
        groups: A series for each colour; the first category is on top.
        references: Values to mark (their ``axis`` is ignored).
    """
    n_bars = sum(len(s.x) for s in groups)
    figure = panel_figure([""], columns=1, panel_height=max(26 * n_bars + 40, 160))
    style_of = styles(groups)
    for bars in groups:
        style = style_of[bars.name, bars.control]
        values = np.asarray(bars.y, float)
        hatches = ("/", "\\", "x", ".", "+") if bars.control else ("", "\\", "x", ".", "+")
        interval = None
        if bars.low is not None and bars.high is not None:
            # Plotly takes distances from the value, not ends.
            up = np.asarray(bars.high, float) - values
            down = values - np.asarray(bars.low, float)
            interval = {"array": up, "arrayminus": down, "thickness": 1.5, "width": 5}
        figure.add_bar(
            name=bars.name,
            orientation="h",
            marker={"color": style.colour, "pattern": {"shape": hatches[style.repeat % 5]}},
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
    """Values with one axis of named heads instead of the axes layer and head.

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
    """A line for each head of values with axes layer, head and one more (besides ``estimate``)."""
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
    """Lines in three dimensions; a series with ``markers`` is drawn as points only.

    Args:
        lines: The first two coordinates; NaN leaves a gap.
        heights: The third coordinate of each line, by its name.
    """
    figure, style_of = go.Figure(), styles(lines)
    for line in lines:
        z = np.asarray(heights.get(line.name, ()), dtype=float)
        what, expected = f"heights of line {line.name!r}", f"{len(line.x)}, one for each point"
        fix = "Name heights as the lines are named."
        need(len(z) == len(line.x), what, expected, str(len(z)), fix)
        shade = style_of[line.name, line.control].colour
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
    # Far enough away, and looking below the middle, so that axis titles are not cut off.
    named["camera"] = {"eye": {"x": 1.7, "y": 1.7, "z": 1.1}, "center": {"z": -0.2}}
    margin = {"l": 0, "r": 0}
    return figure.update_layout(template=template(), height=520, scene=named, margin=margin)
