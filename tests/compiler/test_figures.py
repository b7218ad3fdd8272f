"""Programs, expressions and circuits as graphs: their parts and edges are all there."""

from __future__ import annotations

from functools import reduce

import pytest

from loopinterp.compiler import draw, draw_program, rotate
from loopinterp.compiler.figures import MOST_NODES
from loopinterp.core.errors import InputError
from loopinterp.programs import get_program, list_programs, num_prev, shift_right, tokens, var
from tests.compiler.compiled_properties import unrolled
from tests.compiler.small_models import stock_model

pytestmark = pytest.mark.usefixtures("quick")


def labels(graph) -> list[str]:
    return [node.label for node in graph.nodes]


def contracted(edges, keep) -> set[tuple[str, str]]:
    """Edges between what is kept, through any number of nodes that are not."""
    after: dict[str, set[str]] = {}
    for source, target in edges:
        after.setdefault(source, set()).add(target)
    drawn = set()
    for start in keep:
        stack, seen = [*after.get(start, ())], set()
        while stack:
            node = stack.pop()
            if node in keep:
                drawn.add((start, node))
            elif node not in seen:
                seen.add(node)
                stack += after.get(node, ())
    return drawn


@pytest.mark.parametrize("name", list_programs())
def test_the_graph_of_a_circuit_unfolds_to_the_edges_of_a_run(name: str) -> None:
    circuit = stock_model(name).circuit
    graph = draw(circuit)
    edges = {(a, b) for a, b, _ in graph.unfolded(3) if b != "output"}
    keep = {end for edge in edges for end in edge}
    working = {part.id for part in (*circuit.heads, *circuit.neurons)}
    # Also what nothing in the graph reads or writes, so that an edge left out would show.
    inner = [n.id for n in graph.nodes if n.id != "output"]
    keep |= {f"{t}:{n}" for t in range(4) for n in inner} | set(inner)
    assert edges == contracted(unrolled(circuit, 3), keep)
    wipers = {group.id for group in circuit.neurons if not group.writes}
    assert working - wipers == {n.id for n in graph.nodes if n.kind in ("head", "neurons")}


@pytest.mark.parametrize("name", ["ripple_held_2", "lookahead", "copy"])
def test_a_program_is_drawn_compiled_without_weights(name: str) -> None:
    assert draw_program(get_program(name), max_length=7) == draw(stock_model(name, 7).circuit)


@pytest.mark.parametrize("name", list_programs())
def test_a_program_is_drawn_with_its_variables_and_selectors(name: str) -> None:
    program = get_program(name)
    graph = draw(program)
    assert graph.title == f"{name}: T(n) = {program.n_loops}" and graph.code == str(program)
    variables = {node.label for node in graph.nodes if node.kind == "variable"}
    assert variables == set(program.variables) and "output" in labels(graph)
    heads = [node.names[0] for node in graph.nodes if node.kind == "head"]
    assert {select.name for select in program.selectors.values() if select.name} <= set(heads)
    written = {edge.target for edge in graph.edges if edge.lag == 1}
    constant = {n for n, x in program.step.items() if not x.variables and "full" in repr(x)}
    assert written >= {f"var {name}" for name in program.step} - {f"var {n}" for n in constant}


def test_nodes_say_what_heads_select_and_maps_compute() -> None:
    graph = draw(get_program("unique_set"))
    titles = {node.id: node.names[0] if node.names else node.label for node in graph.nodes}
    (reader,) = (n for n in graph.nodes if n.names == ("next_symbol",) and n.section == "loop")
    computes = "mean of offered where indices == at, else 50"
    assert dict(reader.facts)["Computes"] == computes
    reads = {(titles[e.source], e.role) for e in graph.edges if e.target == reader.id}
    assert reads == {("positions", "key"), ("at", "query"), ("offered", "value")}
    ripple = {n.label for n in draw(get_program("ripple")).nodes if n.section == "loop"}
    labels = {"shift_1: map 1, 1 to the left", "map 1: generate | (propagate & carry)"}
    assert labels <= ripple


def test_heads_have_edges_for_key_query_and_value() -> None:
    graph = draw(num_prev(tokens, var("x")) + shift_right(var("x")))
    assert {edge.role for edge in graph.edges} == {"", "value", "key", "query"}
    assert labels(draw(tokens)) == ["tokens", "output"]


def test_long_code_goes_by_short_names() -> None:
    by_label = labels(draw(stock_model("unique_set").circuit))
    assert any(label.startswith("m1 = ") for label in by_label)
    assert not any("name='next_symbol'" in label for label in by_label)


def test_a_circuit_in_disguise_says_so() -> None:
    circuit = rotate(stock_model("copy"), seed=0).circuit
    assert draw(circuit).title == ", ".join(["copy", *circuit.disguises])


def test_what_cannot_be_drawn_is_refused() -> None:
    with pytest.raises(InputError) as caught:
        draw("ripple")  # type: ignore[arg-type]
    assert caught.value.what == "what to draw"
    with pytest.raises(InputError) as caught:
        draw(reduce(lambda x, _: shift_right(x), range(4000), tokens))
    assert f" {MOST_NODES} " in caught.value.expected and int(caught.value.given) > 4000
    with pytest.raises(InputError) as caught:
        draw_program(get_program("ripple"), max_length=0)
    assert caught.value.what == "max_length"
