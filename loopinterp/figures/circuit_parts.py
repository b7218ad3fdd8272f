"""Nodes and edges of a circuit, and the files that its drawing needs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from loopinterp.core.boundary import Loops, checked
from loopinterp.core.text import ShortRepr

KINDS = ("input", "variable", "head", "neurons", "readout")

SECTIONS = ("input", "prelude", "loop", "readout")
"""Where a node is; a node of the loop occurs once in every loop."""

ROLES = ("", "value", "key", "query", "gate")
"""What a head reads along an edge; "" if unspecified."""

MOST_NODES = 400
"""Most nodes of a graph that is drawn."""


@dataclass(frozen=True, repr=False)
class GraphNode(ShortRepr):
    """A node of a circuit's graph.

    Attributes:
        kind: One of :data:`KINDS`.
        label: A few words or a line of code.
        section: One of :data:`SECTIONS`.
        stage: Order of computation in the section.
        note: Its place in the model.
        names: Words of the code that refer to it.
        facts: Headings and texts about it.
    """

    id: str
    kind: str
    label: str
    section: str
    stage: int = 0
    note: str = ""
    names: tuple[str, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, repr=False)
class GraphEdge(ShortRepr):
    """An edge from ``source`` to the ``target`` that reads it.

    Attributes:
        lag: 0 within a loop, 1 to the next one, 2 to a later one.
        role: One of :data:`ROLES`.
        effect: Width of the edge; None if not measured.
    """

    source: str
    target: str
    lag: int = 0
    role: str = ""
    effect: float | None = None


@dataclass(frozen=True, repr=False)
class GraphParts(ShortRepr):
    """The nodes and edges of a circuit.

    Attributes:
        edges: Into a variable that the loop writes they have lag 1.
        code: The program as text, or "".
    """

    title: str
    nodes: tuple[GraphNode, ...]
    edges: tuple[GraphEdge, ...]
    code: str = ""

    @property
    def by_id(self) -> dict[str, GraphNode]:
        return {node.id: node for node in self.nodes}

    @checked
    def unfolded(self, n_loops: Loops) -> list[tuple[str, str, int]]:
        """Edges of a run of ``n_loops`` loops: source, target, and the edge's number.

        ``3:head`` is a node inside loop 3, ``3:carry`` the variable after 3 loops. Nodes outside
        have no prefix, and read the last loop.
        """
        edges = []
        for number, edge in enumerate(self.edges):
            source, target = self.by_id[edge.source], self.by_id[edge.target]
            inside = (source.section == "loop", target.section == "loop")
            if inside == (True, True):  # from every loop to the same or a later one
                last = n_loops + (target.kind == "variable")
                for loop in range(min(n_loops, last - edge.lag)):
                    later = loop + edge.lag
                    edges.append((f"{loop}:{source.id}", f"{later}:{target.id}", number))
            elif inside == (True, False):
                last = n_loops if source.kind == "variable" else n_loops - 1
                last = max(last - edge.lag, 0)
                edges.append((f"{last}:{source.id}", target.id, number))
            elif inside == (False, True):
                first, last = 0, n_loops
                if target.kind == "variable":  # at the start, or by every loop
                    first, last = edge.lag, n_loops + 1 if edge.lag else 1
                loops = range(first, last)
                edges += [(source.id, f"{loop}:{target.id}", number) for loop in loops]
            else:
                edges.append((source.id, target.id, number))
        return edges


def asset(name: str) -> str:
    return (Path(__file__).parent / "circuit_assets" / name).read_text(encoding="utf-8")
