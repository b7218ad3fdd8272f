"""Nodes and edges of a circuit's graph, and the files that its drawing needs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from loopinterp.core.text import ShortRepr

KINDS = ("input", "variable", "head", "neurons", "readout")

SECTIONS = ("input", "prelude", "loop", "readout")
"""Where a node is; a node of the loop occurs once in every loop."""

MOST_NODES = 400
"""Nodes of the largest graph that is drawn."""


@dataclass(frozen=True, repr=False)
class GraphNode(ShortRepr):
    """A node of a circuit's graph.

    Attributes:
        id: The name by which edges refer to it.
        kind: One of :data:`KINDS`.
        label: A few words or a line of code.
        section: One of :data:`SECTIONS`.
        stage: Nodes of a section are computed in the order of their stages.
        note: Its place in the model, in a few words.
        names: Words of the program's code that refer to it.
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
    """An edge of a circuit's graph, from ``source`` to the ``target`` that reads it.

    Attributes:
        lag: Loops between the two: 0 within a loop, 1 to the next one, 2 to a later one.
        role: ``value``, ``key`` or ``query``; "" if unspecified.
        effect: Sets the width of the edge; None if not measured.
    """

    source: str
    target: str
    lag: int = 0
    role: str = ""
    effect: float | None = None


def asset(name: str) -> str:
    """The text of a file in ``circuit_assets/``."""
    return (Path(__file__).parent / "circuit_assets" / name).read_text(encoding="utf-8")
