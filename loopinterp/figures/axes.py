"""Palette, template and grids of axes, what is drawn on them, and figures as files."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
import plotly.graph_objects as go
from plotly.colors import hex_to_rgb
from plotly.subplots import make_subplots
from pydantic import Field

from loopinterp.core.boundary import checked
from loopinterp.core.errors import check_choice, need
from loopinterp.core.intervals import ENDS, ESTIMATE
from loopinterp.core.text import ShortRepr

if TYPE_CHECKING:
    import xarray as xr
    from typing_extensions import Self

    from loopinterp.figures.circuit_graph import CircuitGraph


PALETTE = {
    "blue": "#3d68ea",
    "red": "#c93a2e",
    "green": "#2ca878",
    "ochre": "#bf9000",
    "magenta": "#b1389b",
    "grey": "#868c96",
}
"""Named colours, in the order in which series take them; grey is for controls."""

_COLOURS = [colour for name, colour in PALETTE.items() if name != "grey"]

# More than there are colours, and no multiple: a repeated colour has another marker.
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "triangle-down", "star",
            "pentagon", "hexagon", "bowtie", "hourglass")  # fmt: skip
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")

SCALES: dict[str, str | list[tuple[float, str]]] = {
    "sequential": "Viridis",
    "mass": [(0.0, "rgba(61,104,234,0.04)"), (1.0, "rgba(61,104,234,1)")],
    "faint": [(0.0, "rgba(61,104,234,0.04)"), (1.0, "rgba(61,104,234,0.55)")],
    "diverging": [
        (0.0, "rgba(201,58,46,1)"),
        (0.5, "rgba(134,140,150,0.08)"),
        (1.0, "rgba(61,104,234,1)"),
    ],
}
"""Colour scales of heat maps; 0 of ``mass`` is nearly clear, text is legible on ``faint``."""


def colour(index: int) -> str:
    """The palette's colour of series ``index``, in a cycle."""
    return _COLOURS[index % len(_COLOURS)]


def ramp(n: int) -> list[str]:
    """``n`` ordered colours (for lengths or loops), from blue to ochre."""
    stops = np.array([hex_to_rgb(PALETTE[k]) for k in ("blue", "magenta", "red", "ochre")], float)
    at = np.linspace(0, len(stops) - 1, n) if n > 1 else np.zeros(n)  # places between the stops
    mixed = [np.array([np.interp(a, range(len(stops)), stops[:, k]) for k in range(3)]) for a in at]
    return ["#" + "".join(f"{round(v):02x}" for v in c) for c in mixed]


def template() -> go.layout.Template:
    """The Plotly template of all figures."""
    line, clear = "rgba(128,134,144,0.55)", "rgba(0,0,0,0)"
    axis = {
        "showgrid": True,
        "gridcolor": "rgba(128,134,144,0.22)",
        "linecolor": line,
        "showline": True,
        "zeroline": False,
        "ticks": "outside",
        "ticklen": 4,
        "tickcolor": line,
        "automargin": True,
        "title": {"standoff": 10},
    }
    family = "Inter, system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial"
    return go.layout.Template(
        layout={
            "font": {"family": f"{family}, sans-serif", "size": 14},
            "paper_bgcolor": clear,
            "plot_bgcolor": clear,
            "colorway": _COLOURS,
            "margin": {"l": 64, "r": 20, "t": 44, "b": 56},
            "xaxis": axis,
            "yaxis": axis,
            "hovermode": "closest",
            "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "bgcolor": clear},
            "coloraxis": {"colorbar": {"outlinewidth": 0, "thickness": 14, "ticklen": 4}},
            "dragmode": False,
            "bargap": 0.3,
        }
    )


@dataclass(frozen=True, repr=False)
class Series(ShortRepr):
    """One line, or one group of bars.

    Attributes:
        name: The legend entry; series of one name share it.
        x: Numbers, or names of categories.
        y: Values; NaN leaves a gap.
        low: Lower ends of the intervals; ``high`` upper ones.
        control: Whether it is drawn grey and dashed.
        colour: A name in :data:`PALETTE` or any CSS colour; by default the next of the palette.
        markers: Whether points are marked; by default up to 40 points.
    """

    name: str
    x: Collection[Any]
    y: Collection[Any]
    low: Collection[Any] | None = None
    high: Collection[Any] | None = None
    control: bool = False
    colour: str | None = None
    markers: bool | None = None

    @classmethod
    def of(cls, name: str, values: xr.DataArray, **style: Any) -> Self:
        """A line along the one axis of ``values``; an estimate brings its interval.

        ``style`` holds ``control``, ``colour`` or ``markers``.
        """
        along = [axis for axis in values.dims if axis != ESTIMATE]
        expected = f"values along one axis (and {ESTIMATE!r})"
        got = f"values along {dict(values.sizes)}"
        fix = "Select along the others, or use Series.each."
        need(len(along) == 1, f"line {name!r}", expected, got, fix)
        x = values[along[0]].values
        if ESTIMATE not in values.dims:
            return cls(name, x, values.values, **style)
        value, low, high = (values.sel({ESTIMATE: end}).values for end in ENDS)
        return cls(name, x, value, low=low, high=high, **style)

    @classmethod
    def each(
        cls,
        values: xr.DataArray,
        axis: str,
        name: Callable[[Any], str] = str,
        *,
        in_order: bool = False,
        **style: Any,
    ) -> list[Self]:
        """One line for each coordinate of ``axis``, along the other axis; see :meth:`of`.

        ``name`` maps a coordinate to the line's name; ``in_order`` colours the lines by a ramp.
        """
        places = values[axis].values.tolist()
        shades = [{"colour": c} if in_order else {} for c in ramp(len(places))]
        lines = zip(places, values.transpose(axis, ...), shades)
        return [cls.of(name(place), line, **style, **shade) for place, line, shade in lines]


@dataclass(frozen=True)
class Reference:
    """A dotted line at a value of an axis, with a short text beside it."""

    value: float
    text: str = ""
    axis: str = "y"


def panel_figure(
    titles: Sequence[str], columns: int, *, panel_height: int, square: bool = False
) -> go.Figure:
    """Empty axes in a grid; ``layout.meta`` lets the report adapt it to its width."""
    need(titles, "panels", "at least one", "none", "Give one.")
    columns = min(columns, len(titles))
    rows = -(-len(titles) // columns)
    figure = go.Figure(_empty_grid(len(titles), rows, columns))
    for k in range(len(titles)):
        figure.layout[f"yaxis{suffix(k)}"].showticklabels = k % columns == 0
    meta = {"panels": len(titles), "columns": columns}
    meta |= {"panel_height": panel_height, "square": square}
    heads = [
        {
            "text": f"<b>{title}</b>",
            "xref": f"x{suffix(k)} domain",
            "yref": f"y{suffix(k)} domain",
            "x": 0,
            "y": 1,
            "xanchor": "left",
            "yanchor": "bottom",
            "showarrow": False,
            "font": {"size": 13},
            "name": "panel title",
        }
        for k, title in enumerate(titles)
        if title
    ]
    layout: dict[str, Any] = {"height": rows * panel_height + 110, "meta": {"loopinterp": meta}}
    if heads:  # the legend stands above them
        figure.layout.annotations = heads
        top = 1 + 22 / (rows * panel_height)
        layout = {"legend": {"y": top}, "margin": {"t": 64}, **layout}
    return figure.update_layout(layout)


@cache
def _empty_grid(panels: int, rows: int, columns: int) -> go.Figure:
    """Empty axes; copied, as Plotly takes ten times as long to lay them out."""
    # Cells of the grid that hold a panel, [row, column]; the last row may be short.
    in_use = np.arange(rows * columns).reshape(rows, columns) < panels
    return make_subplots(
        rows,
        columns,
        specs=[[{} if used else None for used in row] for row in in_use],
        horizontal_spacing=0.06,
        vertical_spacing=min(0.16 / rows + 0.04, 0.9 / rows),
        figure=go.Figure(layout={"template": template()}),
    )


class Style(NamedTuple):
    """How one series is drawn; ``repeat`` counts earlier series of its colour."""

    colour: str
    place: int
    repeat: int


def styles(series: Iterable[Series]) -> dict[tuple[str, bool], Style]:
    """The style of each (name, control); twelve differ in colour, marker or dash."""
    given: dict[tuple[str, bool], Style] = {}
    for one in series:
        key = (one.name, one.control)
        if key not in given:
            # Controls and other series are numbered apart.
            place = sum(control == one.control for _, control in given)
            shade = PALETTE["grey"] if one.control else colour(place)
            if one.colour is not None:
                shade = PALETTE.get(one.colour, one.colour)
            given[key] = Style(shade, place, sum(shade == each.colour for each in given.values()))
    return given


def add_line(figure: go.Figure, line: Series, panel: int, style: Style, *, legend: bool) -> None:
    x, shade = list(line.x), style.colour
    # The interval band has the colour of its line, at 18%; a CSS colour stays as it is.
    faint = shade
    if shade[0] == "#":
        faint = f"rgba({','.join(map(str, hex_to_rgb(shade)))},0.18)"
    common = {"name": line.name, "legendgroup": line.name, **axes(panel)}
    if line.low is not None and line.high is not None:
        low, high = np.asarray(line.low, float), np.asarray(line.high, float)
        gaps = ~(np.isfinite(low) & np.isfinite(high))
        # In stretches without a gap, which a filled outline cannot have.
        for part in np.ma.clump_unmasked(np.ma.masked_where(gaps, low)):
            figure.add_scatter(
                x=x[part] + x[part][::-1],
                y=np.concatenate([high[part], low[part][::-1]]),
                mode="lines",
                line={"width": 0},
                fill="toself",
                fillcolor=faint,
                hoverinfo="skip",
                showlegend=False,
                **common,
            )
    dash = _DASHES[(style.repeat + line.control) % len(_DASHES)]  # of controls never solid
    markers = len(x) <= 40 if line.markers is None else line.markers
    figure.add_scatter(
        x=x,
        y=np.asarray(line.y, dtype=float),
        mode="lines+markers" if markers else "lines",
        line={"color": shade, "width": 2, "dash": dash},
        marker={"size": 6, "symbol": _SYMBOLS[style.place % len(_SYMBOLS)], "color": shade},
        hovertemplate=f"{line.name}<br>%{{x}}: %{{y:.4g}}<extra></extra>",
        showlegend=legend,
        **common,
    )


def add_references(figure: go.Figure, marks: Sequence[Reference], panel: int) -> None:
    """Draw references; a logarithmic axis skips values of 0 and below."""
    name = suffix(panel)
    is_log = {axis: figure.layout[f"{axis}axis{name}"]["type"] == "log" for axis in "xy"}
    marks = [mark for mark in marks if mark.value > 0 or not is_log[mark.axis]]
    if not marks:
        return
    on_x = sorted(mark.value for mark in marks if mark.axis == "x" and mark.text)
    on_panel: Any = figure.select_traces({"xaxis": f"x{name}"})
    # Names of categories have no place on a scale.
    numbers = [v for t in on_panel for v in t.x if isinstance(v, (int, float, np.number))]
    if is_log["x"]:
        numbers = [float(np.log10(v)) for v in numbers if v > 0]
    far_right = math.inf
    if numbers:
        far_right = min(numbers) + 0.65 * (max(numbers) - min(numbers))
    for mark in marks:
        at = float(np.log10(mark.value)) if is_log[mark.axis] else mark.value
        across = {"x": f"x{name}", "y": f"y{name} domain"}
        ends = {"x0": mark.value, "x1": mark.value, "y0": 0, "y1": 1}
        # Above the axes, where no line crosses the text. The text of the first of several marks,
        # and of one near the right edge, is on its left.
        left = at > far_right or mark.value in on_x[: len(on_x) // 2]
        text: dict[str, Any] = {"x": at, "y": 1, "xanchor": "right" if left else "left"}
        text |= {"yanchor": "bottom", "name": "x reference"}
        if mark.axis == "y":
            across = {"x": f"x{name} domain", "y": f"y{name}"}
            ends = {"x0": 0, "x1": 1, "y0": mark.value, "y1": mark.value}
            text = {"x": 1, "y": at, "xanchor": "right", "yanchor": "bottom"}
        refs = {"xref": across["x"], "yref": across["y"]}
        stroke = {"color": "rgba(128,134,144,0.9)", "width": 1.2, "dash": "dot"}
        figure.add_shape(type="line", line=stroke, layer="below", **refs, **ends)
        if mark.text:
            about = {"text": mark.text, "showarrow": False, "font": {"size": 12}}
            figure.add_annotation(**about, **refs, **text)


def axis_range(
    limits: tuple[float, float] | None, log: bool, values: Collection[Any] = ()
) -> dict[str, Any]:
    """Kind and limits (in data units) of an axis."""
    kind: dict[str, Any] = {"type": "log"} if log else {}
    counts = all(isinstance(v, (int, np.integer)) and not isinstance(v, bool) for v in values)
    ends = limits or values
    if values and counts and not log and max(ends) - min(ends) <= 5:
        kind |= {"dtick": 1}  # no half loops
    positive = [v for v in (limits or values) if v > 0] if log else []
    if positive and max(positive) > 8 * min(positive):  # within one decade all ticks are needed
        # At most about six labels on an axis.
        decades = math.log10(max(positive) / min(positive))
        kind |= {"dtick": max(1, math.ceil(decades / 6)), "exponentformat": "power"}
        if decades < 2:  # a single power of ten says nothing of the scale
            low, high = min(positive), max(positive)
            powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
            marks = [float(f"{digit}e{power}") for power in powers for digit in (1, 2, 5)]
            del kind["dtick"]
            kind["tickvals"] = [v for v in marks if low <= v <= high]
    if limits is None:
        return kind
    return kind | {"range": [float(np.log10(v)) for v in limits] if log else list(limits)}


def axis_title(axis: Hashable) -> str:
    return {"pos": "position", "batch": "example"}.get(str(axis), str(axis).replace("_", " "))


def suffix(panel: int) -> str:
    return str(panel + 1) if panel else ""


def axes(panel: int) -> dict[str, str]:
    return {"xaxis": f"x{suffix(panel)}", "yaxis": f"y{suffix(panel)}"}


_TITLE = 34  # pixels of a title
_GAP = 12  # pixels between legend and panel titles


def titled(plot: go.Figure | CircuitGraph, title: str) -> go.Figure | CircuitGraph:
    """A copy of a figure with a title above its legend, on white; a graph has its own."""
    from loopinterp.figures.circuit_graph import CircuitGraph, figure_markup

    if isinstance(plot, CircuitGraph):
        return plot
    copy: Any = go.Figure(plot)
    copy.update_layout(paper_bgcolor="white", plot_bgcolor="white")
    if title:
        height = (copy.layout.height or 450) + _TITLE
        heading = {"text": f"<b>{figure_markup(title)}</b>", "font": {"size": 16}, "x": 0.01}
        heading |= {"y": 1, "yref": "container", "yanchor": "top", "pad": {"t": 12}}
        # Placed in the container, the legend takes its room below the title from the plot.
        legend = {"yref": "container", "y": 1 - (_TITLE - _GAP) / height, "yanchor": "top"}
        # A clear border is the only room that a legend of several rows leaves to panel titles.
        legend |= {"borderwidth": _GAP, "bordercolor": "rgba(0, 0, 0, 0)"}
        margin = (copy.layout.margin.t or 44) + _TITLE
        copy.update_layout(title=heading, legend=legend, height=height, margin_t=margin)
    return copy


@checked
def save_figure(
    plot: go.Figure | CircuitGraph,
    path: str | Path,
    *,
    title: str = "",
    width: Annotated[int, Field(ge=240)] = 800,
) -> Path:
    """Write a figure as html, svg, png or pdf, by the ending of its name.

    Args:
        plot: A Plotly figure, or the graph of a circuit (html or svg).
        width: Width of pictures in pixels.

    Raises:
        InputError: For another ending, or a picture without kaleido.

    Example:
        >>> from loopinterp.figures import Series, line_figure
        >>> plot = line_figure([Series("model", [1, 2], [0, 1])], x_title="loop", y_title="share")
        >>> save_figure(plot, getfixture("tmp_path") / "share.html", title="Share by loop").suffix
        '.html'
    """
    from loopinterp.figures.circuit_graph import CircuitGraph

    path = Path(path)
    kind, is_graph = path.suffix.lower(), isinstance(plot, CircuitGraph)
    check_choice("ending", kind, (".html", ".svg", *(() if is_graph else (".png", ".pdf"))))
    if isinstance(plot, CircuitGraph):
        text = plot.to_html() if kind == ".html" else plot.to_svg(width=float(width))
        path.write_text(text, encoding="utf-8")
        return path
    figure: Any = titled(plot, title)
    if kind == ".html":
        figure.write_html(path, include_plotlyjs=True)
        return path
    expected = "an .html file, as kaleido is not installed"
    fix = "Install it with: pip install kaleido."
    need(importlib.util.find_spec("kaleido"), "path", expected, str(path), fix)
    figure.write_image(path, width=width, scale=2 if kind == ".png" else 1)
    return path
