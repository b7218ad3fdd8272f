"""Programs and expressions as graphs to look at."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loopinterp.errors import InputError
from loopinterp.rasp.compiler.circuit import Circuit
from loopinterp.rasp.compiler.drawing import circuit_boxes
from loopinterp.rasp.diagram import Box, boxes, layers
from loopinterp.rasp.expr import Seq
from loopinterp.rasp.program import LoopProgram

if TYPE_CHECKING:
    import plotly.graph_objects as go

CHARACTER, GAP, LINE_HEIGHT, SPACE = 7.0, 70.0, 17.0, 26.0
"""Pixels: width of a character, between columns, of a line, between boxes."""

ROLES = {
    "": ("solid", "grey"),
    "value": ("solid", "blue"),
    "key": ("dash", "green"),
    "query": ("dot", "magenta"),
}
BORDERS = {"source": "grey", "head": "blue", "map": "ochre", "result": "red"}


def draw(what: LoopProgram | Seq | Circuit) -> go.Figure:
    """A layered graph of a program, an expression or a circuit, from left to right.

    Boxes are what is read (grey), heads with their selectors (blue), maps (ochre) and results
    (red); lines into a head say what it reads as value, key and query. A program is drawn in its
    three parts, prepare, loop and finish, one below the other; a circuit in its prelude, its loop
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
    drawn = {name: boxes(results) for name, results in parts.items()}
    return _figure(drawn, title)


def _figure(parts: dict[str, list[Box]], title: str) -> go.Figure:
    import plotly.graph_objects as go

    from loopinterp.plotting import PALETTE, template

    places: dict[Box, tuple[float, float]] = {}
    figure = go.Figure(layout={"template": template(), "title": title or None})
    top, right = 0.0, 0.0
    for name, drawn in parts.items():
        if name:
            figure.add_annotation(
                x=0, y=-top, text=f"<b>{name}</b>", showarrow=False, xanchor="left", yanchor="top"
            )
            top += 2 * LINE_HEIGHT
        width, height = _place(drawn, top, places)
        top, right = top + height + SPACE, max(right, width)
    _lines(figure, places)
    for box, (x, y) in places.items():
        text = "<br>".join([f"<b>{box.title}</b>", *map(_escaped, box.lines)])
        figure.add_annotation(
            x=x,
            y=y,
            text=text,
            showarrow=False,
            align="center",
            hovertext=_escaped(box.code),
            borderpad=5,
            borderwidth=1.5,
            bordercolor=PALETTE[BORDERS[box.kind]],
            bgcolor="rgba(250,250,252,0.97)",
            font={"size": 12, "color": "#23262d"},
        )
    hidden = {"visible": False}
    figure.update_layout(
        xaxis={**hidden, "range": [-10, right + 10]},
        yaxis={**hidden, "range": [-top, 10]},
        width=right + 60,
        height=top + 110,
        margin={"l": 20, "r": 20, "t": 50, "b": 20},
        legend={"orientation": "h", "y": 0, "yanchor": "top"},
    )
    return figure


def _width(box: Box) -> float:
    return CHARACTER * max(map(len, (box.title, *box.lines))) + 14


def _height(box: Box) -> float:
    return LINE_HEIGHT * (1 + len(box.lines)) + 12


def _place(
    drawn: list[Box], top: float, places: dict[Box, tuple[float, float]]
) -> tuple[float, float]:
    """Put boxes in columns below ``top``, and return the right and the height they take."""
    columns = layers(drawn)
    heights = [sum(_height(box) + SPACE for box in column) for column in columns]
    height, left = max(heights), 0.0
    for column, tall in zip(columns, heights):
        wide = max((_width(box) for box in column), default=0)
        down = top + (height - tall) / 2
        for box in column:
            places[box] = (left + wide / 2, -(down + _height(box) / 2))
            down += _height(box) + SPACE
        left += wide + GAP
    return left - GAP, height


def _lines(figure: go.Figure, places: dict[Box, tuple[float, float]]) -> None:
    """A curve from each box to each that reads it; one trace for each role."""
    from loopinterp.plotting import PALETTE

    for role, (dash, colour) in ROLES.items():
        xs: list[float | None] = []
        ys: list[float | None] = []
        for box, (x1, y1) in places.items():
            for child, kind in box.inputs:
                if kind != role:
                    continue
                x0, y0 = places[child]
                start, end = x0 + _width(child) / 2, x1 - _width(box) / 2
                for step in range(17):
                    t = step / 16
                    ease = t * t * (3 - 2 * t)
                    xs.append(start + (end - start) * t)
                    ys.append(y0 + (y1 - y0) * ease)
                xs.append(None)
                ys.append(None)
        if xs:
            line = {"dash": dash, "color": PALETTE[colour], "width": 1.6}
            figure.add_scatter(
                x=xs, y=ys, mode="lines", line=line, name=role or "reads", hoverinfo="skip"
            )


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
