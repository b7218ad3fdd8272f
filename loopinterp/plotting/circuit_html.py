"""A circuit's graph as a piece of a page: drawings for wide and narrow, facts, and the code."""

from __future__ import annotations

import sys
import tempfile
import webbrowser
from pathlib import Path

from markupsafe import Markup

from loopinterp.plotting.circuit_folded import folded
from loopinterp.plotting.circuit_parts import KINDS, GraphParts, asset
from loopinterp.plotting.circuit_svg import svg_of
from loopinterp.plotting.circuit_unfolded import unfolded
from loopinterp.plotting.inert import script_json, security_policy

N_LOOPS = 8
"""Loops of the unfolded drawing."""

WIDE, WHOLE, NARROW = 528.0, 880.0, 336.0
"""Pixels of a drawing: beside the code, in a whole card, and on a phone."""

_KEY = {
    "input": "input",
    "variable": "variable",
    "head": "head",
    "neurons": "neurons",
    "readout": "readout",
}
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
        key=Markup().join(item.format(kind, _KEY[kind]) for kind in KINDS if kind in shown),
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
