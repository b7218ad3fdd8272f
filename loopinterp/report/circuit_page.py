"""One circuit as a page of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from loopinterp.plotting.circuit_graph import CircuitGraph
from loopinterp.plotting.circuit_html import fragment
from loopinterp.rasp.drawing import draw
from loopinterp.report.assets import graph_assets
from loopinterp.report.html_report import need_page, render_page
from loopinterp.storage import write_bytes


def write_circuit_page(circuit: Any, out: str | Path) -> Path:
    """Write the graph of a circuit as a page: one file that works offline.

    Args:
        circuit: A compiled model or its circuit, a program, an expression, or a graph that is made
            already, such as :func:`loopinterp.circuits.edges.edge_graph` gives.
        out: The file to write.

    Returns:
        The file that was written.

    Raises:
        InputError: It is none of them, or too large to be looked at; or the file is there and no
            such page, or cannot be written.
    """
    graph = (
        circuit if isinstance(circuit, CircuitGraph) else draw(getattr(circuit, "circuit", circuit))
    )
    out = need_page(out)
    page = render_page(
        "circuit.html.j2",
        title=f"Circuit of {graph.title}",
        heading=graph.title,
        graph=fragment(graph),
        circuits=graph_assets(),
    )
    write_bytes(out, page.encode(errors="replace"))
    return out
