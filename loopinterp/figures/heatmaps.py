"""Heat maps: one, several on one scale, of categories, and with a slider over loops."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import plotly.graph_objects as go

from loopinterp.core.boundary import checked
from loopinterp.core.errors import need
from loopinterp.figures.axes import (
    PALETTE,
    SCALES,
    Series,
    Style,
    add_line,
    axes,
    axis_title,
    panel_figure,
    suffix,
)

if TYPE_CHECKING:
    import xarray as xr


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
