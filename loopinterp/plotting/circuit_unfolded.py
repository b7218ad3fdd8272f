"""A circuit unfolded: each loop a column, each node a row, its name once on the left.

Within a column what is computed first stands further left, so that every edge leads to the right.
"""

from __future__ import annotations

from dataclasses import replace

from loopinterp.plotting.circuit_layout import (
    CHAR,
    NODE,
    ROW,
    Band,
    Label,
    Layout,
    Place,
    Point,
    Route,
    wrapped,
)
from loopinterp.plotting.circuit_parts import SECTIONS, GraphNode, GraphParts


def unfolded(graph: GraphParts, n_loops: int, width: float) -> Layout:
    """Each loop a column, each node a row; before and after the loops a column each.

    What is done before and after the loops is one node each: the folded drawing has its parts.

    Args:
        graph: The circuit.
        n_loops: Loops.
        width: Pixels that there are.
    """
    graph, numbers = _outside_as_one(graph)
    rows = sorted(graph.nodes, key=lambda n: (SECTIONS.index(n.section), n.stage))
    letters = 27 if width > 600 else 15
    lines = {n.id: wrapped(n, letters, 2) for n in rows}
    names = letters * CHAR + 18
    side = 34.0 if width > 600 else 18.0
    after = NODE + 3 if any(node.kind == "variable" for node in rows) else 0.0
    pitch = (width - names - 2 * side - after) / n_loops
    stages = sorted({n.stage for n in rows if n.section == "loop"})
    top = 26.0
    y = {n.id: top + ROW * (k + 0.5) for k, n in enumerate(rows)}
    bottom = top + ROW * len(rows) + 4

    def x_of(node: GraphNode, loop: int) -> float:
        at = names + side + pitch * loop
        return at + pitch * (stages.index(node.stage) + 0.75) / (len(stages) + 0.6)

    beside = {"input": names + side * 0.2, "prelude": names + side * 0.7, "readout": width - 9.0}
    places: dict[str, Place] = {}
    rails = []
    size = min(NODE, pitch / 2.6)
    for node in rows:
        if node.section == "loop":
            last = n_loops + (node.kind == "variable")
            for loop in range(last):
                at = x_of(node, loop) if loop < n_loops else width - side - after / 2 + 1
                place = Place(node.id, at, y[node.id], size, size, (), loop)
                places[place.key] = place
        else:
            places[node.id] = Place(node.id, beside[node.section], y[node.id], size, size)
    rows_of = {node.id: node.section for node in rows}
    routes = []
    for source, target, number in graph.unfolded(n_loops):
        a, b = places[source], places[target]
        at_rail = a.loop is None and (b.loop or 0) > 0
        at_rail |= rows_of[a.node] == "input" and rows_of[b.node] == "readout"
        start = (b.x - min(pitch / 3, 26), a.y) if at_rail else (a.x + a.width / 2, a.y)
        tip = (b.x - b.width / 2 - 1, b.y)
        path = _curve(start, tip, most=pitch * 0.6)
        routes.append(Route(numbers[number], source, target, path, tip, down=False))
        if at_rail:
            rails.append((a.node, a.y, a.x, start[0]))
    held: dict[str, tuple[str, float, float, float]] = {}
    for name, at, start_x, end in rails:
        held[name] = (name, at, start_x, max(end, held[name][3] if name in held else end))
    bands = [
        Band(f"{loop + 1}", names + side + pitch * loop + 1, 1, pitch - 2, bottom - 2)
        for loop in range(n_loops)
    ]
    labels = [Label(n.id, 14.0, y[n.id], lines[n.id]) for n in rows]
    return Layout(width, bottom, list(places.values()), routes, bands, labels, list(held.values()))


def _curve(start: Point, tip: Point, most: float) -> str:
    """From left to right, level at both ends."""
    bend = min(max((tip[0] - start[0]) / 2, 4), most)
    return (
        f"M{start[0]:.1f} {start[1]:.1f}"
        f"C{start[0] + bend:.1f} {start[1]:.1f} {tip[0] - bend:.1f} {tip[1]:.1f} "
        f"{tip[0] - 3:.1f} {tip[1]:.1f}"
    )


def _outside_as_one(graph: GraphParts) -> tuple[GraphParts, list[int]]:
    """The graph with one node for its prelude, and one for what reads the last loop.

    Returns:
        The graph, and for each of its edges the number in the given one.
    """
    name_of = {}
    for node in graph.nodes:
        name_of[node.id] = {"prelude": "prelude", "readout": "readout"}.get(node.section, node.id)
    kept = [n for n in graph.nodes if name_of[n.id] == n.id and n.id not in ("prelude", "readout")]
    outside = {"prelude": "neurons", "readout": "readout"}
    for name, kind in outside.items():
        parts = [n for n in graph.nodes if n.section == name]
        if parts:
            facts = (("Parts", f"{len(parts)}; the folded drawing shows them"),)
            label = parts[0].label if len(parts) == 1 else name
            facts = parts[0].facts if len(parts) == 1 else facts
            kept.append(GraphNode(name, kind, label, name, facts=facts))
    first: dict[tuple[str, str, int], int] = {}
    # Of those that become one, the edge of the largest effect is kept.
    order = sorted(range(len(graph.edges)), key=lambda k: -abs(graph.edges[k].effect or 0))
    for number in order:
        edge = graph.edges[number]
        ends = name_of[edge.source], name_of[edge.target]
        if ends[0] != ends[1]:
            first.setdefault((*ends, edge.lag), number)
    edges = [
        replace(graph.edges[number], source=source, target=target)
        for (source, target, _), number in first.items()
    ]
    return GraphParts(graph.title, tuple(kept), tuple(edges)), [*first.values()]
