"""A circuit's graph as a piece of a page: drawings for wide and narrow, facts, and the code."""

from __future__ import annotations

import sys
import tempfile
import webbrowser
from html import escape
from pathlib import Path

from loopinterp.plotting.circuit_folded import folded
from loopinterp.plotting.circuit_parts import KINDS, GraphParts, asset
from loopinterp.plotting.circuit_svg import svg_of
from loopinterp.plotting.circuit_unfolded import unfolded

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


def fragment(graph: GraphParts) -> str:
    """The graph as HTML, without style and script, which a page has once (:func:`assets`)."""
    drawings = {
        "folded wide": svg_of(graph, folded(graph, WIDE)),
        "folded narrow": svg_of(graph, folded(graph, NARROW)),
    }
    loops = any(node.section == "loop" for node in graph.nodes)
    views = '<button type="button" data-view="folded" aria-pressed="true">Folded</button>'
    if loops:
        drawings["unfolded wide"] = svg_of(graph, unfolded(graph, N_LOOPS, WHOLE))
        drawings["unfolded narrow"] = svg_of(graph, unfolded(graph, N_LOOPS, NARROW))
        views += (
            f'<button type="button" data-view="unfolded" aria-pressed="false">{N_LOOPS} loops'
            "</button>"
        )
    shown = {node.kind for node in graph.nodes}
    key = "".join(f'<li class="{kind}">{_KEY[kind]}</li>' for kind in KINDS if kind in shown)
    code = (
        '<pre class="circuit-code" tabindex="0" role="group" aria-label="The program, as code: '
        'its names choose nodes, the arrow keys go from one to the next"><code>'
        f"{escape(graph.code)}</code></pre>"
        if graph.code
        else ""
    )
    svgs = "".join(f'<div class="{name}">{svg}</div>' for name, svg in drawings.items())
    data = graph.to_json().replace("<", "\\u003c")
    return (
        '<div class="circuit" data-view="folded"><div class="circuit-bar">'
        f'<div class="circuit-views" role="group" aria-label="Loops">{views}</div>'
        f'<ul class="circuit-key" aria-label="Colours">{key}</ul>'
        '<span class="circuit-files">'
        '<button type="button" class="circuit-image">Image (SVG)</button>'
        '<button type="button" class="circuit-data">Data (JSON)</button></span></div>'
        f'<div class="circuit-body"><div class="circuit-drawing">{svgs}</div>'
        '<div class="circuit-side">'
        f'<div class="circuit-facts" aria-live="polite"><p>{_ASK}</p></div>'
        f"{code}</div></div>"
        f'<script type="application/json" class="circuit-json">{data}</script></div>'
    )


def assets() -> tuple[str, str]:
    """Style and script of all graphs of a page."""
    return asset("circuit.css"), asset("circuit.js")


def fragment_alone(graph: GraphParts) -> str:
    """The graph with its own style and script, as a notebook keeps it."""
    style, script = assets()
    return f"<style>{style}</style>{fragment(graph)}<script>{script}</script>"


def show_fragment(graph: GraphParts) -> None:
    """In a notebook as the output of its cell, else as a page in a browser."""
    if "IPython" in sys.modules and sys.modules["IPython"].get_ipython() is not None:
        from IPython.display import HTML, display

        display(HTML(fragment_alone(graph)))
        return
    page = f'<!doctype html><meta charset="utf-8"><title>{escape(graph.title)}</title>'
    with tempfile.NamedTemporaryFile("w", suffix=".html", delete=False, encoding="utf-8") as file:
        file.write(f'{page}<body style="font-family: sans-serif">{fragment_alone(graph)}')
    webbrowser.open(Path(file.name).as_uri())
