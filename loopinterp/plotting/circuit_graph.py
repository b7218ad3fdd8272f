"""A circuit as a graph to look at: what reads what within a loop, and what the next loop reads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from loopinterp.errors import CheckpointError, InputError, check_choice
from loopinterp.short_repr import ShortRepr

KINDS = ("input", "variable", "head", "neurons", "readout")
"""What a node is: read from the start, held from loop to loop, at work, or read at the end."""

SECTIONS = ("input", "prelude", "loop", "readout")
"""Where a node stands; those of the loop are there once in every loop."""

MOST_NODES = 400
"""Nodes of the largest graph that is drawn."""


@dataclass(frozen=True)
class GraphNode:
    """A node.

    Attributes:
        id: Its name in edges.
        kind: One of :data:`KINDS`.
        label: What it is called, in a few words or a line of code.
        section: One of :data:`SECTIONS`.
        stage: What is of a smaller stage in the same section has been computed before.
        note: Where it is, in a few words.
        names: Words of the program's code that are about it.
        facts: What there is to know, each a heading and a text.
    """

    id: str
    kind: str
    label: str
    section: str
    stage: int = 0
    note: str = ""
    names: tuple[str, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class GraphEdge:
    """An edge.

    Attributes:
        source: What is read.
        target: What reads it.
        lag: Loops between the two: 0 within one, 1 where the next one reads it, 2 a later one.
        role: What it is read as: ``value``, ``key``, ``query``, or "" where that is not told.
        effect: Measured; its size is the width of the edge. None where nothing was measured.
    """

    source: str
    target: str
    lag: int = 0
    role: str = ""
    effect: float | None = None


@dataclass(frozen=True, repr=False)
class CircuitGraph(ShortRepr):
    """Nodes and edges of a circuit, folded: a node of the loop stands for one in every loop.

    Attributes:
        title: What it is the graph of.
        nodes: Its nodes.
        edges: Its edges. Into a variable they have lag 1 where the loop writes it.
        code: The program, as text; "" where there is none.

    Raises:
        InputError: Two nodes of one id, an edge between what are no nodes, a kind, section or lag
            that there is not, or too many nodes to be looked at.

    Example:
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

    title: str
    nodes: tuple[GraphNode, ...]
    edges: tuple[GraphEdge, ...]
    code: str = ""

    def __repr__(self) -> str:
        return f"<CircuitGraph {self.title}: {len(self.nodes)} nodes, {len(self.edges)} edges>"

    def __post_init__(self) -> None:
        if len(self.nodes) > MOST_NODES:
            raise InputError(
                "what to draw",
                expected=f"at most {MOST_NODES} nodes",
                given=str(len(self.nodes)),
                fix="Draw a part of it: any subexpression can be drawn.",
            )
        if len(self.by_id) < len(self.nodes):
            raise _wrong("nodes", "one of each id", "two of the same")
        for node in self.nodes:
            check_choice(f"kind of node {node.id}", node.kind, KINDS)
            check_choice(f"section of node {node.id}", node.section, SECTIONS)
        for edge in self.edges:
            if not {edge.source, edge.target} <= self.by_id.keys():
                raise _wrong("edges", "edges between nodes", f"{edge.source} to {edge.target}")
            if edge.lag not in (0, 1, 2):
                raise _wrong("edges", "lags of 0, 1 or 2", repr(edge.lag))

    @property
    def by_id(self) -> dict[str, GraphNode]:
        """The nodes by their ids."""
        return {node.id: node for node in self.nodes}

    def unfolded(self, n_loops: int) -> list[tuple[str, str, int]]:
        """Edges of a run of so many loops: ends with their loop before them, and the edge's number.

        ``3:head`` is a node inside loop 3, ``3:carry`` the variable after 3 loops. What is outside
        of the loop has no loop, and reads the last one.

        Args:
            n_loops: Loops of the run.
        """
        edges = []
        for number, edge in enumerate(self.edges):
            source, target = self.by_id[edge.source], self.by_id[edge.target]
            inside = [node.section == "loop" for node in (source, target)]
            if inside == [True, True]:
                last = n_loops + (target.kind == "variable")
                for loop in range(n_loops):
                    if loop + edge.lag < last:
                        edges.append(
                            (f"{loop}:{source.id}", f"{loop + edge.lag}:{target.id}", number)
                        )
            elif inside == [True, False]:
                last = n_loops if source.kind == "variable" else n_loops - 1
                last = max(last - edge.lag, 0)
                edges.append((f"{last}:{source.id}", target.id, number))
            elif inside == [False, True]:
                loops = range(1 if target.kind == "variable" else n_loops)
                edges += [(source.id, f"{loop}:{target.id}", number) for loop in loops]
            else:
                edges.append((source.id, target.id, number))
        return edges

    def with_facts(self, facts: Mapping[str, Sequence[tuple[str, str]]]) -> CircuitGraph:
        """The same graph with more to be known of its nodes.

        Args:
            facts: By id, label or the first of a node's names; of variables, ``title.label``.
        """
        nodes = []
        for node in self.nodes:
            own = (node.id, node.label, *node.names[:1])
            keys = dict.fromkeys([f"{self.title}.{node.label}"] if node.kind == "variable" else own)
            more = [tuple(fact) for key in keys for fact in facts.get(key, ())]
            nodes.append(replace(node, facts=(*node.facts, *dict.fromkeys(more))))
        return replace(self, nodes=tuple(nodes))

    def to_dict(self) -> dict[str, Any]:
        """The graph, JSON-ready."""
        return asdict(self)

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> CircuitGraph:
        """Read what :meth:`to_dict` gave.

        Raises:
            CheckpointError: It is not of that form.
        """
        try:
            nodes = tuple(
                GraphNode(
                    **{
                        **node,
                        "names": tuple(node["names"]),
                        "facts": tuple((str(head), str(text)) for head, text in node["facts"]),
                    }
                )
                for node in saved["nodes"]
            )
            edges = tuple(GraphEdge(**edge) for edge in saved["edges"])
            return cls(str(saved["title"]), nodes, edges, str(saved["code"]))
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                "graph of a circuit",
                expected="what CircuitGraph.to_dict gives",
                given=f"{type(error).__name__}: {error}",
                fix="Make it again.",
            ) from error

    def to_json(self) -> str:
        """The graph as JSON."""
        return json.dumps(self.to_dict())

    def to_svg(self, *, n_loops: int = 0, width: float = 560.0) -> str:
        """The drawing as an SVG that stands by itself.

        Args:
            n_loops: Loops side by side; 0 for one block with an arrow from its end to its start.
            width: In pixels.
        """
        from loopinterp.plotting.circuit_layout import folded, unfolded
        from loopinterp.plotting.circuit_svg import svg_of

        layout = unfolded(self, n_loops, width) if n_loops else folded(self, width)
        return svg_of(self, layout, alone=True)

    def _repr_html_(self) -> str:
        from loopinterp.plotting.circuit_html import fragment_alone

        return fragment_alone(self)

    def show(self) -> None:
        """Show it: in a notebook below the cell, else as a page in a browser."""
        from loopinterp.plotting.circuit_html import show_fragment

        show_fragment(self)


def _wrong(what: str, expected: str, given: str) -> InputError:
    fix = "Graphs are best made by loopinterp.rasp.draw."
    return InputError(f"{what} of a circuit graph", expected=expected, given=given, fix=fix)


def asset(name: str) -> str:
    """The text of a file in ``circuit_assets/``."""
    folder = Path(__file__).parent / "circuit_assets"
    return (folder / name).read_text(encoding="utf-8")
