"""A circuit's graph to look at: in a notebook, as a piece of a page, or as an SVG file.

Words are words, every node can be reached by keyboard, and no string of a saved file does anything.
"""

from __future__ import annotations

import base64
import hashlib
import re
import sys
import tempfile
import webbrowser
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from markupsafe import Markup

from loopinterp.core.errors import check_integer, check_number
from loopinterp.figures.circuit_layout import (
    LINE,
    ROW,
    Band,
    Label,
    Layout,
    Place,
    Route,
    folded,
    unfolded,
)
from loopinterp.figures.circuit_parts import KINDS, GraphNode, GraphParts, asset

# Plotly reads tags in its text; ours use these, without attributes, and no others pass.
_OTHER_TAG = re.compile(r"<(?!(?:/?(?:b|i|sub|sup|extra)|br/?)>)")

_BIDI_CONTROLS = {c: f"⟨{c:04x}⟩" for c in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))}

_POLICY = Markup('<meta http-equiv="Content-Security-Policy" content="{}">')


def security_policy(scripts: Iterable[str]) -> Markup:
    """The ``meta`` element that lets a page run these scripts and no other, and ask for nothing.

    Styles stay inline: Plotly sets them on the elements that it draws.

    Args:
        scripts: The text of every script that the page may run.

    Example:
        >>> "script-src 'sha256-" in security_policy(["1"])
        True
    """
    allowed = " ".join(dict.fromkeys(_source(script) for script in scripts)) or "'none'"
    return _POLICY.format(
        Markup(
            f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; "
            "img-src data: blob:; base-uri 'none'; form-action 'none'"
        )
    )


@cache
def _source(script: str) -> str:
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def script_json(text: str) -> Markup:
    """JSON that cannot end its own script element.

    Example:
        >>> script_json('["</script>"]')
        Markup('["\\\\u003c/script>"]')
    """
    return Markup(text.replace("<", "\\u003c"))


def figure_markup(text: str) -> str:
    """Text of a figure, or its JSON: a tag that Plotly would read is shown, but for bare ``<b>``.

    Example:
        >>> figure_markup("<b>loop</b> <a href='x'>")
        "<b>loop</b> &lt;a href='x'>"
    """
    return _OTHER_TAG.sub("&lt;", text)


def visible_controls(text: str) -> str:
    """A text whose direction-changing characters are written out, so that they change nothing.

    Example:
        >>> visible_controls("a\\u202eb")
        'a⟨202e⟩b'
    """
    return text.translate(_BIDI_CONTROLS)


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
        name = band.name
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
    spoken = f"{'injected input' if kind == 'input' else kind} {name}{note}{where}"
    text = Markup("<text>{}</text>").format(lines) if lines else ""
    return _NODE.format(kind, place.node, place.key, loop, spoken, reach, box, text)


def _box(place: Place, width: float, height: float, attributes: Markup) -> Markup:
    left, top = place.x - width / 2, place.y - height / 2
    return _BOX.format(attributes, left, top, width, height)


N_LOOPS = 8
"""Loops of the unfolded drawing."""

WIDE, WHOLE, NARROW = 528.0, 880.0, 336.0
"""Pixels of a drawing: beside the code, in a whole card, and on a phone."""


_ASK = "Choose a node: click it, or go from one to the next with the arrow keys."

_VIEW = Markup('<button type="button" data-view="{}" aria-pressed="{}">{}</button>')

_CODE = Markup(
    '<pre class="circuit-code" tabindex="0" role="group" aria-label="The program, as code: its '
    'names choose nodes, the arrow keys go from one to the next"><code>{}</code></pre>'
)

_FRAGMENT = Markup(
    '<div class="circuit" data-view="folded"><div class="circuit-bar">'
    '<div class="circuit-views" role="group" aria-label="Loops">{views}</div>'
    '<ul class="circuit-key" aria-label="Colours">{key}</ul>'
    '<span class="circuit-files">'
    '<button type="button" class="circuit-image">Image (SVG)</button>'
    '<button type="button" class="circuit-data">Data (JSON)</button></span></div>'
    '<div class="circuit-body"><div class="circuit-drawing">{drawings}</div>'
    '<div class="circuit-side">'
    '<div class="circuit-facts" aria-live="polite"><p>{ask}</p></div>{code}</div></div>'
    '<script type="application/json" class="circuit-json">{data}</script></div>'
)


def fragment(graph: GraphParts) -> Markup:
    """The graph as HTML, without style and script, which a page has once (:func:`assets`)."""
    drawings = {
        "folded wide": svg_of(graph, folded(graph, WIDE)),
        "folded narrow": svg_of(graph, folded(graph, NARROW)),
    }
    views = _VIEW.format("folded", "true", "Folded")
    if any(node.section == "loop" for node in graph.nodes):
        drawings["unfolded wide"] = svg_of(graph, unfolded(graph, N_LOOPS, WHOLE))
        drawings["unfolded narrow"] = svg_of(graph, unfolded(graph, N_LOOPS, NARROW))
        views += _VIEW.format("unfolded", "false", f"{N_LOOPS} loops")
    shown = {node.kind for node in graph.nodes}
    item, drawing = Markup('<li class="{}">{}</li>'), Markup('<div class="{}">{}</div>')
    return _FRAGMENT.format(
        views=views,
        key=Markup().join(item.format(kind, kind) for kind in KINDS if kind in shown),
        drawings=Markup().join(drawing.format(name, svg) for name, svg in drawings.items()),
        ask=_ASK,
        code=_CODE.format(graph.code) if graph.code else "",
        data=script_json(graph.to_json()),
    )


def assets() -> tuple[str, str]:
    """Style and script of all graphs of a page."""
    return asset("circuit.css"), asset("circuit.js")


def fragment_alone(graph: GraphParts) -> Markup:
    """The graph with its own style and script, as a notebook keeps it."""
    style, script = (Markup(text) for text in assets())  # our own files
    alone = Markup("<style>{}</style>{}<script>{}</script>")
    return alone.format(style, fragment(graph), script)


def show_fragment(graph: GraphParts) -> None:
    """In a notebook as the output of its cell, else as a page in a browser."""
    if "IPython" in sys.modules and sys.modules["IPython"].get_ipython() is not None:
        from IPython.display import HTML, display

        display(HTML(fragment_alone(graph)))
        return
    page = Markup(
        '<!doctype html><meta charset="utf-8">{}<title>{}</title>'
        '<body style="font-family: sans-serif">{}'
    ).format(security_policy([assets()[1]]), graph.title, fragment_alone(graph))
    with tempfile.NamedTemporaryFile("w", suffix=".html", delete=False, encoding="utf-8") as file:
        file.write(page)
    webbrowser.open(Path(file.name).as_uri())


NARROWEST = 240.0
"""Pixels that a drawing needs at least."""


@dataclass(frozen=True, repr=False)
class CircuitGraph(GraphParts):
    """Nodes and edges of a circuit, folded: a node of the loop stands for one in every loop.

    Attributes:
        title: What it is the graph of.
        nodes: Its nodes.
        edges: Its edges. Into a variable they have lag 1 where the loop writes it.
        code: The program, as text; "" where there is none.

    Raises:
        InputError: Two nodes of one id, an edge between what are no nodes, a kind, section or lag
            that there is not, an effect that is no finite number, or too many nodes to be looked
            at.

    Example:
        >>> from loopinterp.figures import GraphEdge, GraphNode
        >>> graph = CircuitGraph(
        ...     "ripple",
        ...     (GraphNode("carry", "variable", "carry", "loop"),
        ...      GraphNode("head", "head", "shift_1", "loop", stage=1)),
        ...     (GraphEdge("carry", "head"), GraphEdge("head", "carry", lag=1)),
        ... )
        >>> graph
        <CircuitGraph ripple: 2 nodes, 2 edges>
        >>> graph.unfolded(2)[:3]
        [('0:carry', '0:head', 0), ('1:carry', '1:head', 0), ('0:head', '1:carry', 1)]
    """

    def to_svg(self, *, n_loops: int = 0, width: float = 560.0) -> str:
        """The drawing as an SVG that stands by itself.

        Args:
            n_loops: Loops side by side; 0 for one block with an arrow from its end to its start.
            width: In pixels.

        Raises:
            InputError: A negative number of loops, or a width in which no words have room.
        """
        check_integer("n_loops", n_loops, least=0)
        check_number("width", width, least=NARROWEST)
        layout = unfolded(self, n_loops, width) if n_loops else folded(self, width)
        return svg_of(self, layout, alone=True)

    def _repr_html_(self) -> str:
        return fragment_alone(self)

    def show(self) -> None:
        """Show it: in a notebook below the cell, else as a page in a browser."""
        show_fragment(self)
