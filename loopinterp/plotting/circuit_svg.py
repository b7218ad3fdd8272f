"""A laid-out circuit as SVG: words are words, and every node can be reached by keyboard."""

from __future__ import annotations

from markupsafe import Markup

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


# Every piece is made by Markup.format, which escapes whatever is no Markup itself.
_RAIL = Markup('<path class="rail" data-node="{}" d="M{:.1f} {:.1f}H{:.1f}"/>')
_SVG = Markup(
    '<svg {}class="circuit-svg" viewBox="0 0 {:.0f} {:.0f}" width="{:.0f}" height="{:.0f}" '
    'role="group" aria-label="{}">{}{}</svg>'
)
_BAND = Markup('<rect class="band" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" rx="8"/>')
_SECTION = Markup('<text class="section" x="{0:.1f}" y="{1:.1f}"{2}>{3}</text>')
_TURNED = Markup(' transform="rotate(-90 {:.1f} {:.1f})"')
_EDGE = Markup(
    '<g class="{}" data-edge="{}" data-source="{}" data-target="{}">'
    '<path d="{}" style="stroke-width:{:.2f}"/><path class="tip" d="{}"/></g>'
)
_LINE = Markup('<tspan{} x="{:.1f}" y="{:.1f}">{}</tspan>')
_MARK = Markup('<rect class="mark {}" x="2" y="{:.1f}" width="7" height="7" rx="2"/>')
_ROW = Markup('<g class="row-label" data-node="{}">{}<text>{}</text></g>')
_NODE = Markup(
    '<g class="node {}" data-node="{}" data-key="{}"{} role="button" tabindex="-1" '
    'aria-pressed="false" aria-label="{}">{}{}{}</g>'
)
_BOXED, _REACH = Markup('class="box" rx="{:.1f}"'), Markup('class="reach"')
_BOX = Markup('<rect {} x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"/>')


def svg_of(graph: GraphParts, layout: Layout, *, alone: bool = False) -> Markup:
    """The drawing as an SVG element.

    Args:
        graph: The circuit.
        layout: Where everything is, of the same graph.
        alone: Whether it carries its own style, to be a file of its own.
    """
    nodes = graph.by_id
    largest = max((abs(e.effect) for e in graph.edges if e.effect is not None), default=0.0)
    parts = [_band(band) for band in layout.bands]
    parts += [_RAIL.format(node, x0, y, x1) for node, y, x0, x1 in layout.rails]
    parts += [_edge(graph, route, largest) for route in layout.routes]
    parts += [_label(nodes.get(label.node), label) for label in layout.labels]
    parts += [_node(nodes.get(place.node), place) for place in layout.places]
    style = Markup("<style>{}</style>").format(asset("circuit.css")) if alone else ""
    frame = Markup('xmlns="http://www.w3.org/2000/svg" ') if alone else ""
    width, height = layout.width, layout.height
    title = f"Circuit of {graph.title}"
    return _SVG.format(frame, width, height, width, height, title, style, Markup().join(parts))


def _band(band: Band) -> Markup:
    box = _BAND.format(band.x, band.y, band.width, band.height)
    if not band.name:
        return box
    if band.upright:
        x, y = band.x + 13, band.y + band.height / 2
        name = _SECTION_WORDS.get(band.name, band.name)
        return box + _SECTION.format(x, y, _TURNED.format(x, y), name)
    return box + _SECTION.format(band.x + band.width / 2, band.y + 15, "", band.name)


def _edge(graph: GraphParts, route: Route, largest: float) -> Markup:
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
    return _EDGE.format(
        " ".join(words), route.edge, route.source, route.target, route.path, width, head
    )


def _lines(
    x: float, y: float, lines: tuple[str, ...] | list[str], *, noted: bool = False
) -> Markup:
    """Lines of text around a height; the last one is a note where there is one."""
    top = y - LINE * (len(lines) - 1) / 2 + 4
    styles = [""] * len(lines)
    if noted:
        styles[-1] = Markup(' class="note"')
    return Markup().join(
        _LINE.format(styles[k], x, top + LINE * k, line) for k, line in enumerate(lines)
    )


def _kind(node: GraphNode | None, name: str) -> str:
    return node.kind if node else "neurons" if name == "prelude" else "readout"


def _label(node: GraphNode | None, label: Label) -> Markup:
    mark = _MARK.format(_kind(node, label.node), label.y - 4)
    return _ROW.format(label.node, mark, _lines(label.x, label.y, label.lines))


def _node(node: GraphNode | None, place: Place) -> Markup:
    kind = _kind(node, place.node)
    name = node.label if node else place.node
    where = "" if place.loop is None else f", loop {place.loop + 1}"
    if place.loop is not None and kind == "variable":
        where = f", after {place.loop} loops" if place.loop else ", before the first loop"
    note = f", {node.note}" if node and node.note else ""
    radius = min(place.height / 2, 6 if place.lines else 4)
    radius = place.height / 2 if kind in ("variable", "input") else radius
    box = _box(place, place.width, place.height, _BOXED.format(min(radius, 13)))
    reach = "" if place.lines else _box(place, max(place.width, 22), ROW - 4, _REACH)
    noted = bool(node and node.note) and bool(place.lines)
    lines = _lines(place.x, place.y, place.lines, noted=noted)
    loop = "" if place.loop is None else Markup(' data-loop="{}"').format(place.loop)
    spoken = f"{_KIND_WORDS[kind]} {name}{note}{where}"
    text = Markup("<text>{}</text>").format(lines) if lines else ""
    return _NODE.format(kind, place.node, place.key, loop, spoken, reach, box, text)


def _box(place: Place, width: float, height: float, attributes: Markup) -> Markup:
    left, top = place.x - width / 2, place.y - height / 2
    return _BOX.format(attributes, left, top, width, height)
