"""The parts of a circuit: what reads what within a loop, and what the next loop reads."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopinterp.core.boundary import Loops, checked
from loopinterp.core.errors import CheckpointError, InputError, check_choice
from loopinterp.core.text import ShortRepr

if TYPE_CHECKING:
    from typing_extensions import Self


KINDS = ("input", "variable", "head", "neurons", "readout")
"""What a node is: read from the start, held from loop to loop, at work, or read at the end."""

SECTIONS = ("input", "prelude", "loop", "readout")
"""Where a node stands; those of the loop are there once in every loop."""

MOST_NODES = 400
"""Nodes of the largest graph that is drawn."""


@dataclass(frozen=True, repr=False)
class GraphNode(ShortRepr):
    """A node of a circuit's graph.

    Attributes:
        id: As edges name it.
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


@dataclass(frozen=True, repr=False)
class GraphEdge(ShortRepr):
    """An edge of a circuit's graph.

    Attributes:
        source: What is read.
        target: What reads it.
        lag: Loops between the two: 0 within one, 1 where the next one reads it, 2 a later one.
        role: ``value``, ``key`` or ``query``; "" where that is not told.
        effect: Its size is the width of the edge; None where nothing was measured.
    """

    source: str
    target: str
    lag: int = 0
    role: str = ""
    effect: float | None = None


@dataclass(frozen=True, repr=False)
class GraphParts(ShortRepr):
    """Nodes and edges of a circuit, without its drawing (:class:`CircuitGraph` has that)."""

    title: str
    nodes: tuple[GraphNode, ...]
    edges: tuple[GraphEdge, ...]
    code: str = ""

    def __repr__(self) -> str:
        sizes = f"{len(self.nodes)} nodes, {len(self.edges)} edges"
        return f"<{type(self).__name__} {self.title}: {sizes}>"

    def __post_init__(self) -> None:
        if len(self.nodes) > MOST_NODES:
            raise InputError(
                "what to draw",
                expected=f"at most {MOST_NODES} nodes",
                given=str(len(self.nodes)),
                fix="Draw a part of it: any subexpression can be drawn.",
            )
        for node in self.nodes:
            check_choice(f"kind of node {node.id}", node.kind, KINDS)
            check_choice(f"section of node {node.id}", node.section, SECTIONS)
        wrong = []
        if len(self.by_id) < len(self.nodes):
            wrong = [("nodes", "one of each id", "two of the same")]
        for edge in self.edges:
            ends = f"{edge.source} to {edge.target}"
            check_choice(f"role of the edge {ends}", edge.role, ("", "value", "key", "query"))
            if not {edge.source, edge.target} <= self.by_id.keys():
                wrong.append(("edges", "edges between nodes", ends))
            if edge.lag not in (0, 1, 2):
                wrong.append(("edges", "lags of 0, 1 or 2", repr(edge.lag)))
            if edge.effect is not None and not math.isfinite(edge.effect):
                wrong.append(("edges", "effects that are finite", repr(edge.effect)))
        for what, expected, actual in wrong:
            fix = "Graphs are best made by loopinterp.compiler.draw."
            raise InputError(f"{what} of a circuit graph", expected=expected, given=actual, fix=fix)

    @property
    def by_id(self) -> dict[str, GraphNode]:
        """The nodes by their ids."""
        return {node.id: node for node in self.nodes}

    @checked
    def unfolded(self, n_loops: Loops) -> list[tuple[str, str, int]]:
        """Edges of a run of so many loops: ends with their loop before them, and the edge's number.

        ``3:head`` is a node inside loop 3, ``3:carry`` the variable after 3 loops. What is outside
        of the loop has no loop, and reads the last one.

        Raises:
            InputError: If there is no loop.
        """
        edges = []
        for number, edge in enumerate(self.edges):
            source, target = self.by_id[edge.source], self.by_id[edge.target]
            inside = (source.section == "loop", target.section == "loop")
            # Within the loop: from every loop to the same or a later one.
            if inside == (True, True):
                last = n_loops + (target.kind == "variable")
                for loop in range(min(n_loops, last - edge.lag)):
                    later = loop + edge.lag
                    edges.append((f"{loop}:{source.id}", f"{later}:{target.id}", number))
            # Out of the loop: only what the last loop leaves is read.
            elif inside == (True, False):
                last = n_loops if source.kind == "variable" else n_loops - 1
                last = max(last - edge.lag, 0)
                edges.append((f"{last}:{source.id}", target.id, number))
            # Into the loop.
            elif inside == (False, True):
                first, last = 0, n_loops
                if target.kind == "variable":  # at the start, or by every loop
                    first, last = edge.lag, n_loops + 1 if edge.lag else 1
                loops = range(first, last)
                edges += [(source.id, f"{loop}:{target.id}", number) for loop in loops]
            else:
                edges.append((source.id, target.id, number))
        return edges

    def with_facts(self, facts: Mapping[str, Sequence[tuple[str, str]]]) -> Self:
        """The same graph with more to be known of its nodes.

        Args:
            facts: By id, label or the first of a node's names; of variables, ``title.label``.
        """
        nodes = []
        for node in self.nodes:
            names = [node.id, node.label, *node.names[:1]]
            if node.kind == "variable":
                # Variables of several programs may have one name.
                names = [f"{self.title}.{node.label}"]
            keys = dict.fromkeys(names)
            more = [tuple(fact) for key in keys for fact in facts.get(key, ())]
            nodes.append(replace(node, facts=(*node.facts, *dict.fromkeys(more))))
        return replace(self, nodes=tuple(nodes))

    def to_dict(self) -> dict[str, Any]:
        """The graph, JSON-ready."""
        return asdict(self)

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Self:
        """Read what :meth:`to_dict` gave.

        Raises:
            CheckpointError: It is not of that form.
        """
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
        """The graph as JSON."""
        return json.dumps(self.to_dict())


def asset(name: str) -> str:
    """The text of a file in ``circuit_assets/``."""
    folder = Path(__file__).parent / "circuit_assets"
    return (folder / name).read_text(encoding="utf-8")
