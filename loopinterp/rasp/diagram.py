"""Programs and expressions as graphs to look at."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from loopinterp.errors import InputError
from loopinterp.rasp.compiler.circuit import Circuit
from loopinterp.rasp.diagram_boxes import Box, circuit_boxes, expression_boxes
from loopinterp.rasp.expr import Seq
from loopinterp.rasp.program import LoopProgram

if TYPE_CHECKING:
    import plotly.graph_objects as go

CHARACTER, GAP, LINE_HEIGHT, SPACE = 6.6, 70.0, 17.0, 26.0
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
    drawn = {name: expression_boxes(results) for name, results in parts.items()}
    return _figure(drawn, title)


def _figure(parts: dict[str, list[Box]], title: str) -> go.Figure:
    import plotly.graph_objects as go

    from loopinterp.plotting import PALETTE, template

    figure = go.Figure(layout={"template": template(), "title": title or None})
    top, right = 0.0, 0.0
    lines: dict[str, list[list[Stop]]] = {role: [] for role in ROLES}
    for name, drawn in parts.items():
        if name:
            figure.add_annotation(
                x=0, y=-top, text=f"<b>{name}</b>", showarrow=False, xanchor="left", yanchor="top"
            )
            top += 2 * LINE_HEIGHT
        columns, paths = layered(drawn)
        stops = _stops(columns, top)
        for role, path in paths:
            lines[role].append([stops[box] for box in path])
        for box in drawn:
            _add_box(figure, box, stops[box], PALETTE[BORDERS[box.kind]])
        top = SPACE - min(stop.y - _height(box) / 2 for box, stop in stops.items())
        right = max(right, *(stop.right for stop in stops.values()))
    for role, (dash, colour) in ROLES.items():
        if lines[role]:
            xs, ys = zip(*(point for path in lines[role] for point in _curve(path)))
            line = {"dash": dash, "color": PALETTE[colour], "width": 1.6}
            figure.add_scatter(
                x=xs, y=ys, mode="lines", line=line, name=role or "reads", hoverinfo="skip"
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


def layered(drawn: list[Box]) -> tuple[list[list[Box]], list[tuple[str, list[Box]]]]:
    """Boxes in columns, from left to right, and the way of each line through them.

    A box stands in the column of its topological generation, results in the last; a line that
    passes columns has a bend in each, so that it runs between boxes. Columns are in spectral
    order: the Fiedler vector of a graph orders its nodes so that neighbours are near.

    Returns:
        The columns, bends included; and (role, the boxes and bends that it leads through) of
        each line.
    """
    import networkx as nx

    inner, results = [], []
    for box in drawn:
        (results if box.kind == "result" else inner).append(box)
    reads: nx.DiGraph[Box] = nx.DiGraph()
    reads.add_nodes_from(inner)
    reads.add_edges_from((child, box) for box in inner for child, _ in box.inputs)
    columns = [*map(list, nx.topological_generations(reads)), results]
    columns = [column for column in columns if column]
    place = {box: k for k, column in enumerate(columns) for box in column}
    graph, paths = nx.Graph(), []
    graph.add_nodes_from(drawn)
    bends: dict[tuple[Box, str, int], Box] = {}
    for box in drawn:
        for child, role in box.inputs:
            path = [child]
            for k in range(place[child] + 1, place[box]):
                if (child, role, k) not in bends:
                    bends[child, role, k] = Box("bend", "", [], "")
                    columns[k].append(bends[child, role, k])
                path.append(bends[child, role, k])
            paths.append((role, [*path, box]))
            nx.add_path(graph, paths[-1][1])
    # By numbers, as sets of boxes would be walked in another order in every run.
    boxes = nx.convert_node_labels_to_integers(graph, label_attribute="box")
    in_order = nx.spectral_ordering(boxes, seed=0)
    order = {boxes.nodes[number]["box"]: k for k, number in enumerate(in_order)}
    return [sorted(column, key=order.__getitem__) for column in columns], paths


class Stop(NamedTuple):
    """Where a line comes to a box or bend, where it goes on, and its height."""

    left: float
    right: float
    y: float


def _stops(columns: list[list[Box]], top: float) -> dict[Box, Stop]:
    """Boxes and bends in pixels: columns below ``top``, each in the middle of the highest."""
    heights = [sum(_height(box) + SPACE for box in column) for column in columns]
    stops, left = {}, 0.0
    for column, height in zip(columns, heights):
        wide = max(_width(box) for box in column)
        down = top + (max(heights) - height) / 2
        for box in column:
            # Lines end inside a box, which hides them, as the width of its text is a guess.
            half = wide / 2 if box.kind == "bend" else 0.4 * _width(box)
            middle = left + wide / 2
            stops[box] = Stop(middle - half, middle + half, -(down + _height(box) / 2))
            down += _height(box) + SPACE
        left += wide + GAP
    return stops


def _add_box(figure: go.Figure, box: Box, stop: Stop, border: str) -> None:
    figure.add_annotation(
        x=(stop.left + stop.right) / 2,
        y=stop.y,
        text="<br>".join(
            [f"<b>{box.title}</b>", *(escape(line, quote=False) for line in box.lines)]
        ),
        showarrow=False,
        align="center",
        hovertext=escape(box.code, quote=False),
        borderpad=5,
        borderwidth=1.5,
        bordercolor=border,
        bgcolor="rgb(250,250,252)",
        font={"size": 12, "color": "#23262d"},
    )


def _curve(path: list[Stop]) -> Iterator[tuple[float | None, float | None]]:
    """The points of a line from stop to stop, and a gap."""
    for start, end in pairwise(path):
        for step in range(17):
            t = step / 16
            ease = t * t * (3 - 2 * t)
            yield start.right + (end.left - start.right) * t, start.y + (end.y - start.y) * ease
    yield None, None


def _width(box: Box) -> float:
    return CHARACTER * max(map(len, (box.title, *box.lines))) + 14


def _height(box: Box) -> float:
    return 0 if box.kind == "bend" else LINE_HEIGHT * (1 + len(box.lines)) + 12
