"""A circuit as a graph to look at: in a notebook, in a page, or as a file."""

from __future__ import annotations

from dataclasses import dataclass

from loopinterp.errors import check_integer, check_number
from loopinterp.plotting.circuit_folded import folded
from loopinterp.plotting.circuit_html import fragment_alone, show_fragment
from loopinterp.plotting.circuit_parts import GraphParts
from loopinterp.plotting.circuit_svg import svg_of
from loopinterp.plotting.circuit_unfolded import unfolded

NARROWEST = 240.0
"""Pixels that a drawing needs at least."""


@dataclass(frozen=True, repr=False)
class CircuitGraph(GraphParts):
    """Nodes and edges of a circuit, folded: a node of the loop stands for one in every loop.

    Attributes:
        title: What it is the graph of.
        nodes: Its nodes.
        edges: Its edges. Into a variable they have lag 1 where the loop writes it.
        code: The program, as text; "" where there is none.

    Raises:
        InputError: Two nodes of one id, an edge between what are no nodes, a kind, section or lag
            that there is not, an effect that is no finite number, or too many nodes to be looked
            at.

    Example:
        >>> from loopinterp.plotting import GraphEdge, GraphNode
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

    def to_svg(self, *, n_loops: int = 0, width: float = 560.0) -> str:
        """The drawing as an SVG that stands by itself.

        Args:
            n_loops: Loops side by side; 0 for one block with an arrow from its end to its start.
            width: In pixels.

        Raises:
            InputError: A negative number of loops, or a width in which no words have room.
        """
        check_integer("n_loops", n_loops, least=0)
        check_number("width", width, least=NARROWEST)
        layout = unfolded(self, n_loops, width) if n_loops else folded(self, width)
        return svg_of(self, layout, alone=True)

    def _repr_html_(self) -> str:
        return fragment_alone(self)

    def show(self) -> None:
        """Show it: in a notebook below the cell, else as a page in a browser."""
        show_fragment(self)
