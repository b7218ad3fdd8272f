from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loopinterp.compiler import draw, draw_program
from loopinterp.figures import CircuitGraph, GraphEdge, GraphNode
from loopinterp.figures.circuit_graph import _WIDTHS, svg_of
from loopinterp.figures.circuit_layout import folded, unfolded
from loopinterp.programs import get_program, list_programs
from tests.figures.drawn_paths import faults

WIDE, FULL, NARROW = _WIDTHS.values()

PLACES = [("prelude", 0), ("loop", -1), ("loop", 0), ("loop", 1), ("loop", 2), ("readout", 0)]


@pytest.mark.parametrize("name", list_programs())
def test_every_stock_program_can_be_read_folded_and_unfolded(name: str) -> None:
    graph = draw_program(get_program(name))
    layouts = [folded(graph, WIDE), folded(graph, NARROW)]
    layouts += [unfolded(graph, 8, width) for width in (FULL, NARROW)]
    for layout in (*layouts, folded(draw(get_program(name)), NARROW)):
        assert list(faults(layout)) == []
    assert {place.node for place in layouts[0].places} == set(graph.by_id)
    assert {route.edge for route in layouts[0].routes} == set(range(len(graph.edges)))


WORDS = st.text("abc +_(", min_size=1, max_size=60).filter(lambda text: text.strip())

NODES = st.lists(st.tuples(st.sampled_from(range(len(PLACES))), WORDS), min_size=1, max_size=12)

EDGES = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=24)


def graph_of(
    given_nodes: list[tuple[int, str]], given_edges: list[tuple[int, int]]
) -> CircuitGraph:
    """A graph of any form: what comes earlier is read by what comes later, or in the next loop."""
    nodes = [GraphNode("tokens", "input", "tokens", "input")]
    for k, (place, words) in enumerate(sorted(given_nodes)):
        section, stage = PLACES[place]
        kind = "variable" if (section, stage) == ("loop", -1) else "neurons"
        nodes.append(GraphNode(f"n{k}", kind, words, section, stage))
    edges = {}
    for a, b in given_edges:
        source, target = nodes[min(a, b) % len(nodes)], nodes[max(a, b) % len(nodes)]
        if nodes.index(source) > nodes.index(target):
            source, target = target, source
        if (source.section, source.stage) != (target.section, target.stage):
            edges[source.id, target.id] = GraphEdge(source.id, target.id)
        elif source.section == "loop":
            edges[target.id, source.id] = GraphEdge(target.id, source.id, lag=1)
    return CircuitGraph("any", tuple(nodes), tuple(edges.values()))


@given(nodes=NODES, edges=EDGES)
@settings(max_examples=20, deadline=None)
def test_no_graph_has_boxes_that_overlap_or_edges_behind_boxes(
    nodes: list[tuple[int, str]], edges: list[tuple[int, int]]
) -> None:
    graph = graph_of(nodes, edges)
    assert list(faults(folded(graph, NARROW))) == []
    assert list(faults(unfolded(graph, 8, NARROW))) == []


def test_a_drawing_with_a_fault_is_found_out() -> None:
    layout = folded(draw_program(get_program("ripple")), WIDE)
    first, *others, last = layout.places
    moved = replace(layout, places=[first, *others, replace(last, x=first.x, y=first.y)])
    assert any("overlap" in fault for fault in faults(moved))
    straight = [replace(r, path=f"M{first.x} 0V{layout.height}") for r in layout.routes]
    assert any("crosses" in fault for fault in faults(replace(layout, routes=straight)))


def test_edges_to_the_next_loop_go_around_and_others_go_down() -> None:
    graph = draw_program(get_program("ripple_held_2"))
    layout = folded(graph, WIDE)
    at = {place.node: place.y for place in layout.places}
    for route in layout.routes:
        again = graph.edges[route.edge].lag > 0
        assert (at[route.target] < at[route.source]) == again


def test_words_stay_words_in_the_drawing() -> None:
    hostile = "<script>alert('&')</script>"
    graph = CircuitGraph(hostile, (GraphNode(hostile, "head", hostile, "loop"),), ())
    for layout in (folded(graph, WIDE), unfolded(graph, 2, FULL)):
        svg = ET.fromstring(svg_of(graph, layout, standalone=True))
        assert not any("script" in node.tag for node in svg.iter())
        assert hostile.split("(")[0] in "".join(svg.itertext())


def test_edges_are_as_wide_as_their_effects() -> None:
    nodes = tuple(GraphNode(name, "head", name, "loop", k) for k, name in enumerate("abc"))
    edges = (GraphEdge("a", "b", effect=0.2), GraphEdge("b", "c", effect=-0.4))
    graph = CircuitGraph("effects", nodes, edges)
    svg = ET.fromstring(svg_of(graph, folded(graph, WIDE), standalone=True))
    found = [g for g in svg.iter() if "edge" in g.get("class", "").split()]
    widths = [float(g[0].get("style", "").removeprefix("stroke-width:")) for g in found]
    assert widths[1] == 5 and widths[1] - 0.8 == pytest.approx(2 * (widths[0] - 0.8))
    assert ["against" in g.get("class", "") for g in found] == [False, True]
