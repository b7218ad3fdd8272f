"""Edges in the form of other tools: EAP-IG's graph as JSON, which MIB's circuit track reads too.

A run of T loops over a block of L layers is a model of T·L layers there, as TransformerLens sees
it, with prelude and coda layers before and after: head 1 of the block's first layer at loop 3 is
``a{3L}.h1``, its MLP ``m{3L}``, and ``logits`` is the readout. An edge into a head is three:
``m0->a3.h1<q>``, ``<k>`` and ``<v>``.

Source: the code of arXiv 2403.17806, and arXiv 2504.13151.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from loopinterp.circuits.edges.unrolled_graph import INPUT, READOUT, SLOTS, UnrolledGraph
from loopinterp.errors import InputError

if TYPE_CHECKING:
    from loopinterp.benchmark.benchmark_folder import Exercise, KnownCircuit
    from loopinterp.benchmark.edge_scores import UnrolledEdge
    from loopinterp.circuits.edges.unrolled_graph import Component
    from loopinterp.models import LoopedTransformerConfig


def eap_graph(known: KnownCircuit) -> dict[str, Any]:
    """The true edges of a model's run, as EAP-IG's ``Graph.from_json`` reads them.

    Edges of the program have score 1 and are in the graph, all others 0. Which of a head's
    queries, keys and values read a feature is not told apart: all three are in the graph, or none.

    Returns:
        ``cfg``, ``nodes`` by name with ``in_graph``, ``edges`` with ``score`` and ``in_graph``.

    Raises:
        InputError: The model was trained: its edges are not known.

    Example:
        >>> from loopinterp.benchmark import KnownCircuit, benchmark_models
        >>> (about,) = benchmark_models(["prefix_xor.bare"])
        >>> document = eap_graph(KnownCircuit(about, about.compiled, *about.pairs(), {}))
        >>> [edge for edge, of in document["edges"].items() if of["in_graph"]][:3]
        ['input->m0', 'input->m1', 'input->m2']
    """
    exercise, true = known.exercise, known.true_edges()
    graph, config = _graph(exercise), exercise.model.config
    edges = {
        name: {"score": float(there), "in_graph": there}
        for (s, r), names in _named(graph, config)
        for there in [graph.tied_edges[int(graph.tied_index[s, r])] in true]
        for name in names
    }
    used = {end for edge, of in edges.items() if of["in_graph"] for end in _ends(edge)}
    nodes = [_name(of, config, graph.n_loops) for of in (*graph.senders, graph.readers[-1])]
    return {
        "cfg": {
            "n_layers": config.n_prelude + config.n_layers * graph.n_loops + config.n_coda,
            "n_heads": config.n_heads,
            "d_model": config.d_model,
            "parallel_attn_mlp": False,
        },
        "nodes": {name: {"in_graph": name in used} for name in nodes},
        "edges": edges,
    }


def edges_of_eap_graph(
    document: Mapping[str, Any], exercise: Exercise
) -> dict[UnrolledEdge, float]:
    """Scores in a graph that EAP-IG or a tool like it wrote, by the run's edges.

    What a head reads is one edge here: the absolute scores of queries, keys and values are added.

    Args:
        document: What is in the JSON file.
        exercise: The model that they are of.

    Raises:
        InputError: An edge of the run is missing: it is another model's graph.
    """
    graph = _graph(exercise)
    scores = document.get("edges", {})
    found: dict[UnrolledEdge, float] = defaultdict(float)
    for (s, r), names in _named(graph, exercise.model.config):
        missing = [name for name in names if name not in scores]
        if missing:
            raise InputError(
                "graph of edges",
                expected=f"edges such as {missing[0]}, of a run of {graph.n_loops} loops",
                given=f"{len(scores)} edges, and not this one",
                fix="Pass the graph that was made of this model.",
            )
        pair = (graph.sender_names[s], graph.receiver_names[r])
        found[pair] += sum(abs(float(scores[name]["score"])) for name in names)
    return dict(found)


def _graph(exercise: Exercise) -> UnrolledGraph:
    return UnrolledGraph(exercise.model.config, exercise.n_loops)


def _named(
    graph: UnrolledGraph, config: LoopedTransformerConfig
) -> Iterator[tuple[tuple[int, int], list[str]]]:
    """Sender and receiver of each edge, and what it is called there."""
    for s, r in graph.edges.nonzero().tolist():
        reader = graph.readers[graph.receivers[r][0]]
        ends = [_name(of, config, graph.n_loops) for of in (graph.senders[s], reader)]
        slots = [f"<{slot}>" for slot in SLOTS] if reader.head is not None else [""]
        yield (s, r), [f"{ends[0]}->{ends[1]}{slot}" for slot in slots]


def _name(component: Component, config: LoopedTransformerConfig, n_loops: int) -> str:
    if component.tied in (INPUT, READOUT):
        return {INPUT: "input", READOUT: "logits"}[component.tied]
    before = {
        "prelude": 0,
        "block": config.n_prelude + config.n_layers * (component.loop or 0),
        "coda": config.n_prelude + config.n_layers * n_loops,
    }
    layer = before[component.section] + (component.layer or 0)
    return f"m{layer}" if component.head is None else f"a{layer}.h{component.head}"


def _ends(edge: str) -> tuple[str, str]:
    sender, receiver = edge.split("->")
    return sender, receiver.split("<")[0]
