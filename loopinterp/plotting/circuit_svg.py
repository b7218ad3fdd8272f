"""A laid-out circuit as SVG: words are words, and every node can be reached by keyboard."""

from __future__ import annotations

from html import escape

from loopinterp.plotting.circuit_layout import LINE, ROW, Band, Label, Layout, Place, Route
from loopinterp.plotting.circuit_parts import GraphNode, GraphParts, asset

_SECTION_WORDS = {"input": "input", "prelude": "prelude", "loop": "loop", "readout": "readout"}
_KIND_WORDS = {
    "input": "injected input",
    "variable": "variable",
    "head": "head",
    "neurons": "neurons",
    "readout": "readout",
}
_WIDEST, _THINNEST, _PLAIN, _FINE = 5.0, 0.8, 1.4, 1.0


def svg_of(graph: GraphParts, layout: Layout, *, alone: bool = False) -> str:
    """The drawing as an SVG element.

    Args:
        graph: The circuit.
        layout: Where everything is, of the same graph.
        alone: Whether it carries its own style, to be a file of its own.
    """
    nodes = graph.by_id
    largest = max((abs(e.effect) for e in graph.edges if e.effect is not None), default=0.0)
    parts = [_band(band) for band in layout.bands]
    parts += [
        f'<path class="rail" data-node="{_q(node)}" d="M{x0:.1f} {y:.1f}H{x1:.1f}"/>'
        for node, y, x0, x1 in layout.rails
    ]
    parts += [_edge(graph, route, largest) for route in layout.routes]
    parts += [_label(nodes.get(label.node), label) for label in layout.labels]
    parts += [_node(nodes.get(place.node), place) for place in layout.places]
    size = f'viewBox="0 0 {layout.width:.0f} {layout.height:.0f}" width="{layout.width:.0f}"'
    style = f"<style>{asset('circuit.css')}</style>" if alone else ""
    frame = 'xmlns="http://www.w3.org/2000/svg" ' if alone else ""
    title = _q(f"Circuit of {graph.title}")
    inside = "".join(parts)
    return (
        f'<svg {frame}class="circuit-svg" {size} height="{layout.height:.0f}" role="group" '
        f'aria-label="{title}">{style}{inside}</svg>'
    )


def _band(band: Band) -> str:
    box = (
        f'<rect class="band" x="{band.x:.1f}" y="{band.y:.1f}" width="{band.width:.1f}" '
        f'height="{band.height:.1f}" rx="8"/>'
    )
    if not band.name:
        return box
    if band.upright:
        x, y = band.x + 13, band.y + band.height / 2
        name = _SECTION_WORDS.get(band.name, band.name)
        turned = f'transform="rotate(-90 {x:.1f} {y:.1f})"'
        return f'{box}<text class="section" x="{x:.1f}" y="{y:.1f}" {turned}>{escape(name)}</text>'
    x = band.x + band.width / 2
    return (
        f'{box}<text class="section" x="{x:.1f}" y="{band.y + 15:.1f}">{escape(band.name)}</text>'
    )


def _edge(graph: GraphParts, route: Route, largest: float) -> str:
    edge = graph.edges[route.edge]
    width, words = _PLAIN if route.down else _FINE, ["edge"]
    if edge.effect is not None and largest > 0:
        width = _THINNEST + (_WIDEST - _THINNEST) * abs(edge.effect) / largest
        words += ["measured", *(["against"] if edge.effect < 0 else [])]
    words += ["later"] if edge.lag else []
    words += [f"as-{edge.role}"] if edge.role else []
    x, y = route.tip
    half = 3 + width / 3
    if route.down:
        head = f"M{x - half:.1f} {y - 6:.1f}L{x:.1f} {y:.1f}L{x + half:.1f} {y - 6:.1f}Z"
    else:
        head = f"M{x - 5:.1f} {y - half + 1:.1f}L{x:.1f} {y:.1f}L{x - 5:.1f} {y + half - 1:.1f}Z"
    ends = f'data-source="{_q(route.source)}" data-target="{_q(route.target)}"'
    return (
        f'<g class="{" ".join(words)}" data-edge="{route.edge}" {ends}>'
        f'<path d="{route.path}" style="stroke-width:{width:.2f}"/>'
        f'<path class="tip" d="{head}"/></g>'
    )


def _label(node: GraphNode | None, label: Label) -> str:
    kind = node.kind if node else "neurons" if label.node == "prelude" else "readout"
    top = label.y - LINE * (len(label.lines) - 1) / 2 + 4
    lines = "".join(
        f'<tspan x="{label.x:.1f}" y="{top + LINE * k:.1f}">{escape(line)}</tspan>'
        for k, line in enumerate(label.lines)
    )
    mark = f'<rect class="mark {kind}" x="2" y="{label.y - 4:.1f}" width="7" height="7" rx="2"/>'
    return f'<g class="row-label" data-node="{_q(label.node)}">{mark}<text>{lines}</text></g>'


def _node(node: GraphNode | None, place: Place) -> str:
    kind = node.kind if node else "neurons" if place.node == "prelude" else "readout"
    name = node.label if node else place.node
    where = "" if place.loop is None else f", loop {place.loop + 1}"
    if place.loop is not None and kind == "variable":
        where = f", after {place.loop} loops" if place.loop else ", before the first loop"
    note = f", {node.note}" if node and node.note else ""
    spoken = _q(f"{_KIND_WORDS[kind]} {name}{note}{where}")
    radius = min(place.height / 2, 6 if place.lines else 4)
    radius = place.height / 2 if kind in ("variable", "input") else radius
    box = _box(place, place.width, place.height, f'class="box" rx="{min(radius, 13):.1f}"')
    reach = "" if place.lines else _box(place, max(place.width, 22), ROW - 4, 'class="reach"')
    noted = bool(node and node.note) and bool(place.lines)
    top = place.y - LINE * (len(place.lines) - 1) / 2 + 4
    classes = ["", *[""] * len(place.lines)]
    classes[len(place.lines) - 1] = ' class="note"' if noted else ""
    lines = "".join(
        f'<tspan{classes[k]} x="{place.x:.1f}" y="{top + LINE * k:.1f}">{escape(line)}</tspan>'
        for k, line in enumerate(place.lines)
    )
    loop = "" if place.loop is None else f' data-loop="{place.loop}"'
    return (
        f'<g class="node {kind}" data-node="{_q(place.node)}" data-key="{_q(place.key)}"{loop} '
        f'role="button" tabindex="-1" aria-pressed="false" aria-label="{spoken}">'
        f"{reach}{box}{f'<text>{lines}</text>' if lines else ''}</g>"
    )


def _box(place: Place, width: float, height: float, attributes: str) -> str:
    return (
        f'<rect {attributes} x="{place.x - width / 2:.1f}" y="{place.y - height / 2:.1f}" '
        f'width="{width:.1f}" height="{height:.1f}"/>'
    )


def _q(text: str) -> str:
    return escape(text, quote=True)
