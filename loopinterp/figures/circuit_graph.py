"""A circuit as a graph, drawn in a notebook, in a page, or as an SVG file.

Every node can be reached by keyboard. Text from saved files is escaped.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import sys
import tempfile
import webbrowser
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from markupsafe import Markup
from pydantic import Field, NonNegativeInt

from loopinterp.core.boundary import checked
from loopinterp.core.errors import CheckpointError, check_choice, need
from loopinterp.figures.circuit_layout import (
    KINDS,
    LINE,
    MOST_NODES,
    ROLES,
    ROW,
    SECTIONS,
    GraphEdge,
    GraphNode,
    GraphParts,
    Layout,
    Place,
    Route,
    asset,
    folded,
    unfolded,
)

if TYPE_CHECKING:
    from typing_extensions import Self

_WIDTHS = {"wide": 528.0, "full": 880.0, "narrow": 336.0}
"""Widths of a drawing in pixels: beside the code, in a whole card, and on a phone."""


@dataclass(frozen=True, repr=False)
class CircuitGraph(GraphParts):
    """Nodes (at most :data:`MOST_NODES`) and edges of a circuit.

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

    def __repr__(self) -> str:
        sizes = f"{len(self.nodes)} nodes, {len(self.edges)} edges"
        return f"<CircuitGraph {self.title}: {sizes}>"

    def __post_init__(self) -> None:
        nodes, edges = "nodes of a circuit graph", "edges of a circuit graph"
        fix = "Make graphs with loopinterp.compiler.draw, which draws any subexpression."
        n_nodes, ids = len(self.nodes), self.by_id.keys()
        most, got = f"at most {MOST_NODES} nodes", f"{n_nodes}; draw a part"
        need(n_nodes <= MOST_NODES, nodes, most, got, fix)
        need(len(ids) == n_nodes, nodes, "one of each id", "two of the same", fix)
        for node in self.nodes:
            check_choice(f"kind of node {node.id}", node.kind, KINDS)
            check_choice(f"section of node {node.id}", node.section, SECTIONS)
        for edge in self.edges:
            ends = f"{edge.source} to {edge.target}"
            check_choice(f"role of the edge {ends}", edge.role, ROLES)
            need({edge.source, edge.target} <= ids, edges, "edges between nodes", ends, fix)
            need(edge.lag in (0, 1, 2), edges, "lags of 0, 1 or 2", repr(edge.lag), fix)
            finite = edge.effect is None or math.isfinite(edge.effect)
            need(finite, edges, "effects that are finite", repr(edge.effect), fix)

    def with_facts(self, facts: Mapping[str, Sequence[tuple[str, str]]]) -> Self:
        """The graph with further facts about its nodes.

        Keys are a node's id, label or first name; for a variable ``title.label``.
        """
        nodes = []
        for node in self.nodes:
            names = [node.id, node.label, *node.names[:1]]
            if node.kind == "variable":
                names = [f"{self.title}.{node.label}"]
            more = [tuple(fact) for key in dict.fromkeys(names) for fact in facts.get(key, ())]
            nodes.append(replace(node, facts=(*node.facts, *dict.fromkeys(more))))
        return replace(self, nodes=tuple(nodes))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Self:
        """Read the output of :meth:`to_dict`."""
        try:
            nodes = []
            for node in saved["nodes"]:
                facts = tuple((str(head), str(text)) for head, text in node["facts"])
                nodes.append(GraphNode(**{**node, "names": tuple(node["names"]), "facts": facts}))
            edges = tuple(GraphEdge(**edge) for edge in saved["edges"])
            return cls(str(saved["title"]), tuple(nodes), edges, str(saved["code"]))
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                "graph of a circuit",
                expected="what CircuitGraph.to_dict gives",
                given=f"{type(error).__name__}: {error}",
                fix="Make it again.",
            ) from error

    def to_json(self) -> str:
        return json.dumps(self.to_dict())

    @checked
    def to_svg(
        self, *, n_loops: NonNegativeInt = 0, width: Annotated[float, Field(ge=240)] = 560.0
    ) -> str:
        """The drawing as a standalone SVG.

        ``n_loops`` are shown side by side; 0 for one block with arrows from its end to its start.
        """
        layout = unfolded(self, n_loops, width) if n_loops else folded(self, width)
        return svg_of(self, layout, standalone=True)

    def to_html(self) -> str:
        page = Markup(
            '<!doctype html><meta charset="utf-8">{}<title>{}</title>'
            '<body style="font-family: sans-serif">{}'
        )
        policy = security_policy([asset("circuit.js")])
        return page.format(policy, self.title, Markup(self._repr_html_()))

    def _repr_html_(self) -> str:
        """The graph with its own style and script, for a notebook."""
        template = Markup("<style>{}</style>{}<script>{}</script>")
        style, script = Markup(asset("circuit.css")), Markup(asset("circuit.js"))
        return template.format(style, fragment(self), script)

    def show(self) -> None:
        """Show the graph below the notebook cell, or in a browser."""
        if "IPython" in sys.modules and sys.modules["IPython"].get_ipython() is not None:
            from IPython.display import HTML, display

            display(HTML(self._repr_html_()))
            return
        options = {"suffix": ".html", "delete": False, "encoding": "utf-8"}
        with tempfile.NamedTemporaryFile("w", **options) as file:
            file.write(self.to_html())
        webbrowser.open(Path(file.name).as_uri())


@cache
def _macros() -> Any:
    """The macros of ``circuit.html.j2``, which escape everything but Markup."""
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


def svg_of(graph: CircuitGraph, layout: Layout, *, standalone: bool = False) -> Markup:
    """The drawing as an SVG element; ``standalone`` adds its style."""
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


def _edge(graph: CircuitGraph, route: Route, largest: float) -> tuple[str, float, str]:
    """Classes, width in pixels, and the path of the arrowhead."""
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
    """The kind of a node, or of the box that stands for a whole section."""
    return node.kind if node else "neurons" if name == "prelude" else "readout"


def _node(node: GraphNode | None, place: Place) -> tuple[str, str, bool, float]:
    """Kind, text for screen readers, whether the last line is a note, and the box's radius."""
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


def fragment(graph: CircuitGraph, n_loops: int = 8) -> Markup:
    """The graph as HTML, folded and unfolded, without style and script."""
    drawings = {
        "folded wide": svg_of(graph, folded(graph, _WIDTHS["wide"])),
        "folded narrow": svg_of(graph, folded(graph, _WIDTHS["narrow"])),
    }
    views = {"folded": "Folded"}
    if any(node.section == "loop" for node in graph.nodes):
        drawings["unfolded wide"] = svg_of(graph, unfolded(graph, n_loops, _WIDTHS["full"]))
        drawings["unfolded narrow"] = svg_of(graph, unfolded(graph, n_loops, _WIDTHS["narrow"]))
        views["unfolded"] = f"{n_loops} loops"
    shown = {node.kind for node in graph.nodes}
    kinds = [kind for kind in KINDS if kind in shown]
    return _macros().fragment(views, kinds, drawings, graph.code, script_json(graph.to_json()))


def security_policy(scripts: Iterable[str]) -> Markup:
    """The ``meta`` element that limits a page to these scripts and to no requests.

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
    """Text of a figure, or its JSON, with all tags escaped but our own.

    Example:
        >>> figure_markup("<b>loop</b> <a href='x'>")
        "<b>loop</b> &lt;a href='x'>"
    """
    # Plotly interprets tags in text. Ours are these, without attributes.
    return re.sub(r"<(?!(?:/?(?:b|i|sub|sup|extra)|br/?)>)", "&lt;", text)


def visible_controls(text: str) -> str:
    """A text with its direction-changing characters written out.

    Example:
        >>> visible_controls("a\\u202eb")
        'a⟨202e⟩b'
    """
    # Embeddings and overrides of direction, and isolates.
    controls = (*range(0x202A, 0x202F), *range(0x2066, 0x206A))
    return text.translate({c: f"⟨{c:04x}⟩" for c in controls})
