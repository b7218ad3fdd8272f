"""What a drawing of a circuit is made of: places of nodes, routes of edges, bands, and words.

The words are in a fixed pitch, so that their widths are known without a browser.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field

from loopinterp.plotting.circuit_parts import GraphNode

CHAR, LINE = 6.7, 14.0
"""Pixels: of a letter of 11 pixels (at most, in any fixed pitch), and between lines."""

NODE, ROW = 11.0, 30.0
"""Pixels: a node of the unfolded drawing, and from row to row."""

_LONGEST = 3

Point = tuple[float, float]


@dataclass(frozen=True)
class Place:
    """A node in the drawing: the middle of its box, its size, and the lines written in it."""

    node: str
    x: float
    y: float
    width: float
    height: float
    lines: tuple[str, ...] = ()
    loop: int | None = None

    @property
    def key(self) -> str:
        """As in :meth:`GraphParts.unfolded`."""
        return self.node if self.loop is None else f"{self.loop}:{self.node}"


@dataclass(frozen=True)
class Route:
    """A drawn edge: its number in the graph, its ends, and its path as SVG has it."""

    edge: int
    source: str
    target: str
    path: str
    tip: Point
    down: bool = True


@dataclass(frozen=True)
class Band:
    """A part of the drawing that belongs together, with its name: a section, or one loop."""

    name: str
    x: float
    y: float
    width: float
    height: float
    upright: bool = False


@dataclass(frozen=True)
class Label:
    """Words on the left of a row."""

    node: str
    x: float
    y: float
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Layout:
    """A whole drawing."""

    width: float
    height: float
    places: list[Place]
    routes: list[Route]
    bands: list[Band]
    labels: list[Label] = field(default_factory=list)
    rails: list[tuple[str, float, float, float]] = field(default_factory=list)


def wrapped(node: GraphNode, letters: int, most: int = _LONGEST) -> tuple[str, ...]:
    """A node's label in lines of at most so many letters, cut off where it is too long.

    Example:
        >>> wrapped(GraphNode("a", "neurons", "generate | (propagate & carry)", "loop"), 16)
        ('generate |', '(propagate &', 'carry)')
    """
    lines = textwrap.wrap(node.label, letters, break_long_words=True) or [node.id[:letters]]
    if len(lines) > most:
        lines = [*lines[: most - 1], f"{lines[most - 1][: letters - 1].rstrip()}…"]
    return tuple(lines)
