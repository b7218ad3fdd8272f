from __future__ import annotations

import json
import subprocess
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from loopinterp.core.errors import CheckpointError, InputError
from loopinterp.edges.figures import _ROLES
from loopinterp.edges.unrolled_graph import SLOTS
from loopinterp.figures import CircuitGraph, GraphEdge, GraphNode
from loopinterp.figures.circuit_graph import fragment

CARRY = GraphNode("carry", "variable", "carry", "loop", -1, names=("carry",))

HEAD = GraphNode("head", "head", "shift_1", "loop", 2, facts=(("Selector", "shift_1"),))

END = GraphNode("end", "readout", "output", "readout")

LOOP = (GraphEdge("carry", "head"), GraphEdge("head", "carry", lag=1, effect=0.5))

GRAPH = CircuitGraph("ripple", (CARRY, HEAD, END), (*LOOP, GraphEdge("carry", "end")), "carry = …")


def test_unfolded_by_hand() -> None:
    assert set(GRAPH.unfolded(2)) == {
        ("0:carry", "0:head", 0),
        ("1:carry", "1:head", 0),
        ("0:head", "1:carry", 1),
        ("1:head", "2:carry", 1),
        ("2:carry", "end", 2),
    }
    later = CircuitGraph(
        "", (HEAD, END), (GraphEdge("head", "head", 2), GraphEdge("head", "end", 1))
    )
    assert later.unfolded(3) == [("0:head", "2:head", 0), ("1:head", "end", 1)]


def test_what_every_loop_writes_from_outside_is_written_in_every_loop() -> None:
    tokens = GraphNode("tokens", "input", "tokens", "input")
    start, again = GraphEdge("tokens", "carry"), GraphEdge("tokens", "carry", lag=1)
    assert CircuitGraph("", (tokens, CARRY), (start,)).unfolded(2) == [("tokens", "0:carry", 0)]
    written = CircuitGraph("", (tokens, CARRY), (again,))
    assert written.unfolded(2) == [("tokens", "1:carry", 0), ("tokens", "2:carry", 0)]
    assert 'data-target="2:carry"' in written.to_svg(n_loops=2)


def test_a_drawing_needs_room_and_loops() -> None:
    cases: list[dict[str, Any]] = [{"n_loops": -1}, {"width": 100.0}, {"width": float("nan")}]
    for wrong in cases:
        with pytest.raises(InputError, match=next(iter(wrong))):
            GRAPH.to_svg(**wrong)
    with pytest.raises(InputError, match="n_loops"):
        GRAPH.unfolded(0)


@pytest.mark.parametrize("slot", SLOTS)
def test_all_that_a_head_reads_can_be_drawn(slot: str) -> None:
    edge = GraphEdge("carry", "head", role=_ROLES[slot])
    drawn = CircuitGraph("", (CARRY, HEAD), (edge,)).to_svg()
    assert f"as-{_ROLES[slot]}" in drawn


def test_it_goes_to_json_and_back() -> None:
    assert CircuitGraph.from_dict(json.loads(GRAPH.to_json())) == GRAPH
    with pytest.raises(CheckpointError, match="KeyError"):
        CircuitGraph.from_dict({"title": "x"})
    with pytest.raises(CheckpointError, match="kind of"):
        CircuitGraph.from_dict(
            {**GRAPH.to_dict(), "nodes": [{**GRAPH.to_dict()["nodes"][0], "kind": "x"}]}
        )


def test_facts_are_added_by_name_and_of_variables_by_program() -> None:
    told = GRAPH.with_facts(
        {"shift_1": [("a", "b")], "carry": [("no", "")], "ripple.carry": [("c", "d")]}
    )
    assert told.by_id["head"].facts == (("Selector", "shift_1"), ("a", "b"))
    assert told.by_id["carry"].facts == (("c", "d"),)


@pytest.mark.parametrize(
    ("nodes", "edges", "message"),
    [
        ((CARRY, CARRY), (), "one of each id"),
        ((CARRY,), (GraphEdge("carry", "head"),), "carry to head"),
        ((CARRY, HEAD), (GraphEdge("carry", "head", lag=3),), "lags of 0, 1 or 2"),
        ((CARRY, HEAD), (GraphEdge("carry", "head", effect=float("nan")),), "are finite"),
        ((GraphNode("a", "b", "c", "loop"),), (), "kind of node a"),
        ((GraphNode("a", "head", "c", "d"),), (), "section of node a"),
        (tuple(GraphNode(str(k), "head", "x", "loop") for k in range(401)), (), "at most 400"),
    ],
)
def test_what_is_no_graph_is_refused(nodes, edges, message: str) -> None:
    with pytest.raises(InputError, match=message):
        CircuitGraph("x", nodes, edges)


def test_the_drawing_is_a_file_and_names_its_nodes() -> None:
    for n_loops, label in ((0, "head shift_1"), (3, "head shift_1, loop 3")):
        svg = ET.fromstring(GRAPH.to_svg(n_loops=n_loops))
        assert label in [g.get("aria-label") for g in svg.iter() if g.get("role") == "button"]
    page = fragment(GRAPH)
    assert "carry = …" in page and "8 loops" in page
    assert GRAPH._repr_html_().count("<style>") == 1
    still = CircuitGraph("no loop", (END,), ())
    assert "8 loops" not in fragment(still)


def test_the_script_passes_its_own_tests(node: str) -> None:
    tests = Path(__file__).with_name("circuit_script.test.js")
    done = subprocess.run([node, "--test", str(tests)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout
