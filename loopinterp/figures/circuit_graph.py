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
from typing import Annotated, Any

from markupsafe import Markup
from pydantic import Field, NonNegativeInt

from loopinterp.core.boundary import checked
from loopinterp.figures.circuit_layout import LINE, ROW, Layout, Place, Route, folded, unfolded
from loopinterp.figures.circuit_parts import KINDS, GraphNode, GraphParts, asset


def security_policy(scripts: Iterable[str]) -> Markup:
    """The ``meta`` element that lets a page run these scripts and no other, and ask for nothing.

    Styles stay inline: Plotly sets them on the elements that it draws.

    Example:
        >>> "script-src 'sha256-" in security_policy(["1"])
        True
    """
    digests = (hashlib.sha256(script.encode()).digest() for script in dict.fromkeys(scripts))
    sources = [f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests]
    allowed = " ".join(sources) or "'none'"
    policy = (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    return Markup(f'<meta http-equiv="Content-Security-Policy" content="{policy}">')


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
    # Plotly reads tags in its text; ours use these, without attributes, and no others pass.
    return re.sub(r"<(?!(?:/?(?:b|i|sub|sup|extra)|br/?)>)", "&lt;", text)


def visible_controls(text: str) -> str:
    """A text whose direction-changing characters are written out, so that they change nothing.

    Example:
        >>> visible_controls("a\\u202eb")
        'a⟨202e⟩b'
    """
    # Embeddings and overrides of direction, and isolates.
    controls = (*range(0x202A, 0x202F), *range(0x2066, 0x206A))
    return text.translate({c: f"⟨{c:04x}⟩" for c in controls})


@cache
def _macros() -> Any:
    """The macros of ``circuit.html.j2``, which escape whatever is no Markup itself."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("loopinterp.figures", "circuit_assets"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["px"] = "{:.1f}".format
    environment.globals |= {"line": LINE, "row": ROW}
    return environment.get_template("circuit.html.j2").module


def svg_of(graph: GraphParts, layout: Layout, *, standalone: bool = False) -> Markup:
    """The drawing of a graph as an SVG element; standalone, with its own style, it is a file."""
    nodes = graph.by_id
    largest = max((abs(e.effect) for e in graph.edges if e.effect is not None), default=0.0)
    return _macros().svg(
        graph.title,
        layout,
        edges=[(route, *_edge(graph, route, largest)) for route in layout.routes],
        rows=[(label, _kind(nodes.get(label.node), label.node)) for label in layout.labels],
        nodes=[(place, *_node(nodes.get(place.node), place)) for place in layout.places],
        style=asset("circuit.css") if standalone else "",
    )


def _edge(graph: GraphParts, route: Route, largest: float) -> tuple[str, float, str]:
    """Classes, width in pixels, and the path of the tip."""
    edge = graph.edges[route.edge]
    width, classes = 1.4 if route.down else 1.0, ["edge"]
    if edge.effect is not None and largest > 0:
        width = 0.8 + 4.2 * abs(edge.effect) / largest  # up to 5 pixels
        classes += ["measured", *(["against"] if edge.effect < 0 else [])]
    classes += ["later"] if edge.lag else []
    classes += [f"as-{edge.role}"] if edge.role else []
    x, y = route.tip
    # The arrowhead grows with the line.
    half = 3 + width / 3
    if route.down:
        tip = f"M{x - half:.1f} {y - 6:.1f}L{x:.1f} {y:.1f}L{x + half:.1f} {y - 6:.1f}Z"
    else:
        tip = f"M{x - 5:.1f} {y - half + 1:.1f}L{x:.1f} {y:.1f}L{x - 5:.1f} {y + half - 1:.1f}Z"
    return " ".join(classes), width, tip


def _kind(node: GraphNode | None, name: str) -> str:
    """Also of what the unfolded drawing has for the whole prelude or readout."""
    return node.kind if node else "neurons" if name == "prelude" else "readout"


def _node(node: GraphNode | None, place: Place) -> tuple[str, str, bool, float]:
    """Kind, what a screen reader says, whether the last line is a note, and the box's radius."""
    kind = _kind(node, place.node)
    where = "" if place.loop is None else f", loop {place.loop + 1}"
    if place.loop is not None and kind == "variable":
        where = f", after {place.loop} loops" if place.loop else ", before the first loop"
    note = f", {node.note}" if node and node.note else ""
    name = node.label if node else place.node
    spoken = f"{'injected input' if kind == 'input' else kind} {name}{note}{where}"
    # Boxes with words have small corners; variables and inputs are pills.
    radius = min(place.height / 2, 6 if place.lines else 4)
    radius = place.height / 2 if kind in ("variable", "input") else radius
    return kind, spoken, bool(note), min(radius, 13)


WIDTHS = {"wide": 528.0, "full": 880.0, "narrow": 336.0}
"""Pixels of a drawing: beside the code, in a whole card, and on a phone."""


def fragment(graph: GraphParts, n_loops: int = 8) -> Markup:
    """The graph as HTML, folded and with some loops unfolded; a page has style and script once."""
    drawings = {
        "folded wide": svg_of(graph, folded(graph, WIDTHS["wide"])),
        "folded narrow": svg_of(graph, folded(graph, WIDTHS["narrow"])),
    }
    views = {"folded": "Folded"}
    if any(node.section == "loop" for node in graph.nodes):
        drawings["unfolded wide"] = svg_of(graph, unfolded(graph, n_loops, WIDTHS["full"]))
        drawings["unfolded narrow"] = svg_of(graph, unfolded(graph, n_loops, WIDTHS["narrow"]))
        views["unfolded"] = f"{n_loops} loops"
    shown = {node.kind for node in graph.nodes}
    kinds = [kind for kind in KINDS if kind in shown]
    return _macros().fragment(views, kinds, drawings, graph.code, script_json(graph.to_json()))


@dataclass(frozen=True, repr=False)
class CircuitGraph(GraphParts):
    """Nodes and edges of a circuit, folded: a node of the loop stands for one in every loop.

    Attributes:
        title: What it is the graph of.
        nodes: Of a loop once, for all loops.
        edges: Into a variable they have lag 1 where the loop writes it.
        code: The program, as text; "" where there is none.

    Raises:
        InputError: Two nodes of one id, an edge between what are no nodes, a kind, section or lag
            that there is not, an effect that is no finite number, or too many nodes to be drawn.

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

    @checked
    def to_svg(
        self, *, n_loops: NonNegativeInt = 0, width: Annotated[float, Field(ge=240)] = 560.0
    ) -> str:
        """The drawing as an SVG that stands by itself.

        Args:
            n_loops: Loops side by side; 0 for one block with an arrow from its end to its start.
            width: In pixels.

        Raises:
            InputError: A negative number of loops, or a width in which no words have room.
        """
        layout = unfolded(self, n_loops, width) if n_loops else folded(self, width)
        return svg_of(self, layout, standalone=True)

    def _repr_html_(self) -> str:
        """The graph with its own style and script, as a notebook keeps it."""
        template = Markup("<style>{}</style>{}<script>{}</script>")
        style, script = Markup(asset("circuit.css")), Markup(asset("circuit.js"))
        return template.format(style, fragment(self), script)

    def show(self) -> None:
        """Show it: in a notebook below the cell, else as a page in a browser."""
        if "IPython" in sys.modules and sys.modules["IPython"].get_ipython() is not None:
            from IPython.display import HTML, display

            display(HTML(self._repr_html_()))
            return
        page = Markup(
            '<!doctype html><meta charset="utf-8">{}<title>{}</title>'
            '<body style="font-family: sans-serif">{}'
        ).format(security_policy([asset("circuit.js")]), self.title, Markup(self._repr_html_()))
        options = {"suffix": ".html", "delete": False, "encoding": "utf-8"}
        with tempfile.NamedTemporaryFile("w", **options) as file:
            file.write(page)
        webbrowser.open(Path(file.name).as_uri())
