"""Lines and bars with intervals, lines in three dimensions, and heat maps.

A heat map is one, several on one scale, of categories, or with a slider over loops.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import plotly.graph_objects as go

from loopinterp.core.boundary import checked
from loopinterp.core.errors import need
from loopinterp.core.text import ShortRepr
from loopinterp.figures.axes import (
    PALETTE,
    SCALES,
    Reference,
    Series,
    Style,
    add_line,
    add_references,
    axes,
    axis_range,
    axis_title,
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


@checked
def heatmap_panels(
    panels: Mapping[str, xr.DataArray],
    *,
    value_title: str,
    x_title: str | None = None,
    y_title: str | None = None,
    scale: Literal["sequential", "mass", "faint", "diverging"] = "sequential",
    value_range: tuple[float, float] | None = None,
    columns: int | None = None,
    square: bool = False,
    y_down: bool | None = None,
    overlay: Mapping[str, Series] | None = None,
    marks: Mapping[str, tuple[float, float]] | None = None,
) -> go.Figure:
    """Heat maps side by side on one colour scale.

    Args:
        panels: Values [row, column] by title ("" for none), all along the same two axes; NaN stays
            empty.
        x_title: Title of the columns, by default their name; ``y_title`` of the rows.
        scale: ``mass`` and ``faint`` are for shares; ``diverging`` needs a symmetric
            ``value_range``.
        value_range: Ends of the scale; by default 0 and 1 for shares, else the data's.
        columns: Panels in a row, by default up to four.
        y_down: The first row is on top; by default if rows have names.
        overlay: A line over the panel of that title.
        marks: Named points (column, row) on every panel.
    """
    need(panels, "panels", "at least one", "none", "Give one.")
    first = next(iter(panels.values()))
    expected = f"values [row, column], along the axes {dict(first.sizes)} of the first"
    for title, values in panels.items():
        fits = len(first.dims) == 2 and [*values.sizes.items()] == [*first.sizes.items()]
        got = f"values along {dict(values.sizes)}"
        need(fits, f"heat map {title!r}", expected, got, "Select or transpose them.")
    (y_axis, x_axis), (y, x) = first.dims, (first[axis].values for axis in first.dims)
    x_title = axis_title(x_axis) if x_title is None else x_title
    y_title = axis_title(y_axis) if y_title is None else y_title
    y_down = not _is_numeric(y) if y_down is None else y_down
    columns = columns or min(len(panels), 4)
    # 360 pixels, or 19 for each row that has a name where that is more.
    height = max(360, 0 if _is_numeric(y) else 19 * len(y))
    figure = panel_figure(list(panels), columns, panel_height=height, square=square)
    hover = f"{x_title} %{{x}}<br>{y_title} %{{y}}<br>{value_title} %{{z:.3g}}<extra></extra>"
    # Lines between cells, as long as cells are larger than lines.
    gap = 1 if max(first.shape) <= 40 else 0
    for k, (title, values) in enumerate(panels.items()):
        figure.add_heatmap(
            z=values.values.astype(float),
            x=x.tolist(),
            y=y.tolist(),
            coloraxis="coloraxis",
            hovertemplate=hover,
            xgap=gap,
            ygap=gap,
            **axes(k),
        )
        if overlay and title in overlay:
            line = overlay[title]
            shade = line.colour or ("grey" if line.control else "red")  # blue is the map's
            style = Style(PALETTE.get(shade, shade), 1, 0)
            add_line(figure, line, k, style, legend=k == 0)
        if marks:
            _add_marks(figure, marks, k)
        figure.layout[f"xaxis{suffix(k)}"].update(
            title_text=x_title if k + columns >= len(panels) else None,
            showgrid=False,
            range=_cell_range(x),
        )
        figure.layout[f"yaxis{suffix(k)}"].update(
            title_text=y_title if k % columns == 0 else None,
            showgrid=False,
            autorange="reversed" if y_down else None,
            range=None if y_down else _cell_range(y),
        )
    low, high = value_range or ((0, 1) if scale in ("mass", "faint") else _limits(panels))
    colorbar = {"title": {"text": value_title}}
    return figure.update_layout(
        coloraxis={"colorscale": SCALES[scale], "cmin": low, "cmax": high, "colorbar": colorbar}
    )


def category_maps(
    panels: Mapping[str, xr.DataArray], categories: Mapping[str, str], **options: Any
) -> go.Figure:
    """Maps side by side whose cells belong to categories.

    Args:
        panels: As for :func:`heatmap_panels`; values are numbers of categories.
        categories: Colours (:class:`Series`) by category.
    """
    figure = heatmap_panels(panels, value_title="category", **options)
    names, count = list(categories), len(categories)
    colours = [PALETTE.get(shade, shade) for shade in categories.values()]
    low, high = _limits(panels)
    # Else a cell has the colour of another category.
    expected, got = f"numbers of categories from 0 to {count - 1}", f"{low:g} to {high:g}"
    need(low >= 0 and high < count, "panels", expected, got, "Name every category.")
    # Each colour at both ends of its interval: steps instead of a gradient.
    steps = [((k + end) / count, shade) for k, shade in enumerate(colours) for end in (0, 1)]
    style = {"colorscale": steps, "zmin": -0.5, "zmax": count - 0.5, "showscale": False}
    for trace, values in zip(figure.select_traces({"type": "heatmap"}), panels.values()):
        texts = [["" if np.isnan(v) else names[int(v)] for v in row] for row in values.values]
        hover = trace.hovertemplate.replace("category %{z:.3g}", "%{text}")
        trace.update(coloraxis=None, text=texts, hovertemplate=hover, **style)
    figure.layout.coloraxis = None
    for name, shade in zip(names, colours):
        square = {"symbol": "square", "size": 10, "color": shade}
        # A trace without points, for its entry in the legend.
        figure.add_scatter(x=[None], y=[None], mode="markers", marker=square, name=name, **axes(0))
    return figure.update_layout(showlegend=True)


def loop_slider_figure(
    values: xr.DataArray,
    *,
    value_title: str,
    x_title: str | None = None,
    y_title: str | None = None,
) -> go.Figure:
    """Square heat maps with a slider over loops, such as attention patterns.

    ``values`` are shares [loop, panel, row, column]; coordinates of the second axis are the titles.
    """
    expected, got = "values [loop, panel, row, column]", f"values along {dict(values.sizes)}"
    need(values.ndim == 4, "values", expected, got, "Select or stack the other axes.")
    loop_axis, panel_axis = values.dims[:2]
    titles = values[panel_axis].values.tolist()
    figure = heatmap_panels(
        dict(zip(titles, values.isel({loop_axis: 0}))),
        value_title=value_title,
        x_title=x_title,
        y_title=y_title,
        scale="mass",
        square=True,
        y_down=True,
    )
    loops = [str(loop) for loop in values[loop_axis].values]
    # One frame per loop, with the maps [row, column] of all panels.
    figure.frames = [
        go.Frame(name=loop, data=[go.Heatmap(z=z) for z in maps], traces=list(range(len(titles))))
        for loop, maps in zip(loops, values.values.astype(np.float32))
    ]
    jump = {"mode": "immediate", "frame": {"duration": 0}, "transition": {"duration": 0}}
    steps = [{"label": loop, "method": "animate", "args": [[loop], jump]} for loop in loops]
    return figure.update_layout(
        sliders=[{"steps": steps, "currentvalue": {"prefix": "loop "}, "pad": {"t": 60}}]
    )


def _add_marks(figure: go.Figure, marks: Mapping[str, tuple[float, float]], panel: int) -> None:
    x, y = zip(*marks.values())
    # Names of points on one height stand above and below by turns.
    rank = np.argsort(np.lexsort((x, y)))
    figure.add_scatter(
        x=x,
        y=y,
        text=list(marks),
        mode="markers+text",
        textposition=[("top center", "bottom center")[k % 2] for k in rank],
        # A halo, as cells may be as dark as the text.
        textfont={"color": "black", "shadow": "0 0 2px white, 0 0 2px white, 0 0 4px white"},
        marker={"symbol": "cross", "size": 9, "color": "white", "line": {"color": "black"}},
        marker_line_width=1,
        hovertemplate="%{text}<extra></extra>",
        showlegend=False,
        **axes(panel),
    )


def _is_numeric(names: np.ndarray) -> bool:
    return np.issubdtype(names.dtype, np.number)


def _cell_range(at: np.ndarray) -> list[float] | None:
    """From edge to edge of the cells, if coordinates are evenly spaced numbers."""
    steps = np.diff(at) if _is_numeric(at) else np.array([])
    if not steps.size or not np.allclose(steps, steps[0]):
        return None
    # Half a cell beyond the outer centres.
    return [float(at[0] - steps[0] / 2), float(at[-1] + steps[0] / 2)]


def _limits(panels: Mapping[str, xr.DataArray]) -> tuple[float, float]:
    everything = np.concatenate([values.values.reshape(-1) for values in panels.values()])
    # NaN marks empty cells.
    finite = everything[np.isfinite(everything)]
    return (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
