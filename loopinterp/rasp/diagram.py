"""Programs and expressions as graphs to look at."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import TYPE_CHECKING, Any

from loopinterp.errors import InputError
from loopinterp.rasp.compiler.circuit import Circuit
from loopinterp.rasp.diagram_boxes import Box, circuit_boxes, expression_boxes
from loopinterp.rasp.diagram_column import LINE_HEIGHT, TIP, WIDTH, Column, column_of
from loopinterp.rasp.expr import Seq
from loopinterp.rasp.program import LoopProgram

if TYPE_CHECKING:
    import plotly.graph_objects as go

GAP = 28.0
"""Pixels between the parts of a drawing."""

ROLES = {
    "": ("solid", "grey"),
    "value": ("solid", "blue"),
    "key": ("dash", "green"),
    "query": ("dot", "magenta"),
}
BORDERS = {"source": "grey", "head": "blue", "map": "ochre", "result": "red"}
TEXT: dict[str, Any] = {"showarrow": False, "borderpad": 0}


def draw(what: LoopProgram | Seq | Circuit) -> go.Figure:
    """A program, an expression or a circuit as boxes in a column, each below what it reads.

    Boxes are what is read (grey), heads with their selectors (blue), maps (ochre) and results
    (red); arrows into a head say what it reads as value, key and query. A program is drawn in its
    three parts, prepare, loop and finish, side by side; a circuit in its prelude, its loop
    and its readout, with the heads and neurons that do the work.

    Args:
        what: A program, a sequence expression, or the circuit of a compiled model.

    Raises:
        InputError: it is none of them, or too large to be looked at.

    Example:
        >>> from loopinterp.rasp import get_program
        >>> figure = draw(get_program("ripple"))
        >>> sorted({trace.name for trace in figure.data})
        ['reads', 'value']
    """
    if isinstance(what, LoopProgram):
        after = {f"{name} after a loop": x for name, x in what.step.items()}
        parts: dict[str, dict[str, Seq]] = {
            "prepare": dict(what.prepare),
            "loop": after,
            "finish": {"output": what.finish},
        }
        title = f"{what.name}: T(n) = {what.n_loops}"
    elif isinstance(what, Seq):
        parts, title = {"": {"output": what}}, ""
    elif isinstance(what, Circuit):
        title = ", ".join((what.program, *what.disguises))
        return _figure(circuit_boxes(what), title)
    else:
        raise InputError(
            "what to draw",
            expected="a LoopProgram, a sequence expression or a Circuit",
            given=type(what).__name__,
            fix="Pass get_program('ripple'), an expression such as cumsum(tokens), or "
            "compiled.circuit.",
        )
    drawn = {name: expression_boxes(results) for name, results in parts.items()}
    return _figure(drawn, title)


def _figure(parts: dict[str, list[Box]], title: str) -> go.Figure:
    """The parts side by side, each on axes of its own that count pixels.

    ``layout.meta`` has their sizes: where a page is narrow, the report puts one below the other.
    """
    from plotly.subplots import make_subplots

    from loopinterp.plotting import template

    figure = make_subplots(1, len(parts))
    columns = [column_of(boxes, -2 * LINE_HEIGHT if name else -2) for name, boxes in parts.items()]
    sizes = [(column.lanes + WIDTH + 2, 2 - column.lowest) for column in columns]
    width, height = sum(w + GAP for w, _ in sizes) - GAP, max(h for _, h in sizes)
    figure.update_xaxes(visible=False, fixedrange=True).update_yaxes(visible=False, fixedrange=True)
    left = 0.0
    for k, (name, column, (w, h)) in enumerate(zip(parts, columns, sizes), 1):
        part: dict[str, Any] = {"row": 1, "col": k}
        across, down = [left / width, min((left + w) / width, 1)], [1 - h / height, 1]
        figure.update_xaxes(range=[-column.lanes, WIDTH + 2], domain=across, **part)
        figure.update_yaxes(range=[-h, 0], domain=down, **part)
        _add_arrows(figure, column, part)
        if name:
            place = {"x": 0, "y": 0, "yanchor": "top", "xanchor": "left"}
            figure.add_annotation(text=f"<b>{name}</b>", **TEXT, **place, **part)
        for box, span in column.spans.items():
            _add_box(figure, box, span, part)
        left += w + GAP
    return figure.update_layout(
        template=template(),
        title=title or None,
        width=width + 40,
        height=height + 110,
        margin={"l": 20, "r": 20, "t": 50, "b": 60},
        legend={"orientation": "h", "y": 0, "yanchor": "top"},
        meta={"loopinterp": {"parts": sizes}},
    )


def _add_arrows(figure: go.Figure, column: Column, part: Mapping[str, Any]) -> None:
    """A line for each role; of its points only the last of each arrow is marked, with a head."""
    from loopinterp.plotting import PALETTE

    for role, (dash, colour) in ROLES.items():
        arrows = [arrow for r, arrow in column.arrows if r == role]
        if not arrows:
            continue
        name = role or "reads"
        points = [point for arrow in arrows for point in (*arrow, (None, None))]
        tips = [k == len(a) - 1 for a in arrows for k in range(len(a) + 1)]
        down = [len(a) == 2 and a[0][0] == a[1][0] for a in arrows for _ in (*a, None)]
        figure.add_scatter(
            x=[x for x, _ in points],
            y=[y for _, y in points],
            mode="lines+markers",
            line={"dash": dash, "color": PALETTE[colour], "width": 1.6},
            marker={
                "size": [2 * TIP if tip else 0 for tip in tips],
                "symbol": ["triangle-down" if d else "triangle-right" for d in down],
                "color": PALETTE[colour],
                "opacity": 1,
                "line": {"width": 0},
            },
            name=name,
            legendgroup=name,
            showlegend=not any(figure.select_traces({"name": name})),
            hoverinfo="skip",
            **part,
        )


def _add_box(
    figure: go.Figure, box: Box, span: tuple[float, float], part: Mapping[str, Any]
) -> None:
    from loopinterp.plotting import PALETTE

    top, bottom = span
    border = {"color": PALETTE[BORDERS[box.kind]], "width": 1.5}
    place = {"x0": 0, "x1": WIDTH, "y0": bottom, "y1": top}
    figure.add_shape(type="rect", line=border, fillcolor="rgb(250,250,252)", **place, **part)
    lines = [f"<b>{box.title}</b>", *(escape(line, quote=False) for line in box.lines)]
    figure.add_annotation(
        text="<br>".join(lines),
        x=WIDTH / 2,
        y=(top + bottom) / 2,
        hovertext=escape(box.code, quote=False),
        font={"size": 12, "color": "#23262d"},
        **TEXT,
        **part,
    )
