"""The circuit of a study of edges as a graph, each edge as wide as its score."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from loopinterp.circuits.edges.edge_attribution import EDGE_IG
from loopinterp.circuits.edges.edge_study_result import EdgeStudy
from loopinterp.circuits.edges.known_edges import TiedEdge
from loopinterp.circuits.edges.unrolled_graph import INPUT, READOUT, SLOTS
from loopinterp.errors import InputError
from loopinterp.plotting import CircuitGraph, GraphEdge, GraphNode

_SECTIONS = {"prelude": "prelude", "block": "loop", "coda": "readout"}
_ROLES: dict[str, str] = dict(zip(SLOTS, ("query", "key", "value")))
_LAST = 10_000
"""A stage behind all layers."""


def edge_graph(result: EdgeStudy, edges: Iterable[TiedEdge] | None = None) -> CircuitGraph:
    """The graph of some tied edges, each as wide as its score, that of ``edge_ig`` if there is one.

    Args:
        result: The study.
        edges: Sender, receiver and lag of each; those that pruning kept by default.

    Raises:
        InputError: An edge that the study has not.
    """
    scores = result.data["score"].values.tolist()
    best = EDGE_IG if EDGE_IG in scores else scores[0]
    table = result.to_dataframe()
    table = table[table["score"] == best].set_index(["sender", "receiver", "lag"])
    chosen = sorted(result.tied_edges() if edges is None else edges)
    nodes: dict[str, GraphNode] = {}
    links = []
    for sender, receiver, lag in chosen:
        if (sender, receiver, lag) not in table.index:
            raise InputError(
                "edges",
                expected="tied edges of this study, (sender, receiver, lag) each",
                given=repr((sender, receiver, lag)),
                fix="result.to_dataframe() lists them.",
            )
        name, _, slot = receiver.rpartition(".")
        role = _ROLES.get(slot, "") if name else ""
        reader = name if role else receiver
        effect, size = table.loc[(sender, receiver, lag), ["effect", "size"]]
        minimal = result.data["minimality"].sel(tied_sender=sender, tied_receiver=receiver, lag=lag)
        for end in (sender, reader):
            nodes.setdefault(end, _node(end))
        links.append(GraphEdge(sender, reader, lag, role, float(size) * (-1 if effect < 0 else 1)))
        if not bool(minimal.isnull()):
            words = f"without the edge to {reader}, faithfulness loses {float(minimal):.3f}"
            nodes[sender] = _told(nodes[sender], "Ablation", words)
    title = f"{'what pruning left' if edges is None else 'edges'}, scored by {best}"
    return CircuitGraph(title, tuple(nodes.values()), tuple(links))


def _node(name: str) -> GraphNode:
    if name == INPUT:
        return GraphNode(name, "input", "injected input", "input")
    if name == READOUT:
        return GraphNode(name, "readout", "readout", "readout", _LAST)
    section, layer, rest = name.split(".", 2)
    head = re.fullmatch(r"head\.(\d+)", rest)
    kind = "head" if head else "neurons"
    label = f"head {layer}.{head[1]}" if head else f"MLP {layer}" if rest == "mlp" else rest
    stage = 2 * int(layer) + (not head)
    note = "" if head or rest == "mlp" else f"neurons of MLP {layer}"
    return GraphNode(name, kind, label, _SECTIONS[section], stage, note)


def _told(node: GraphNode, heading: str, text: str) -> GraphNode:
    return replace(node, facts=(*node.facts, (heading, text)))
