"""Scores of edges on the benchmark: right ones are told from wrong ones, whoever made them."""

from __future__ import annotations

from functools import cache

import pytest

from loopinterp.benchmark import (
    OWN_EDGE_METHODS,
    KnownCircuit,
    benchmark_models,
    eap_graph,
    edges_of_eap_graph,
    own_edge_method,
    score_edges,
)
from loopinterp.circuits import UnrolledGraph, edge_study, edges_recovered, program_edges
from loopinterp.errors import InputError


@cache
def known_circuit(name: str) -> KnownCircuit:
    (about,) = benchmark_models([name])
    return KnownCircuit(about, about.compiled, *about.pairs(), {})


@pytest.fixture(params=["prefix_xor.bare", "ripple.rotated-permuted"])
def known(request: pytest.FixtureRequest) -> KnownCircuit:
    return known_circuit(request.param)


def test_the_true_edges_have_the_best_score_there_is(known: KnownCircuit) -> None:
    true = program_edges(known.compiled)
    scores = score_edges(lambda _: dict.fromkeys(true, -2.0), known)  # signs say nothing
    (row,) = scores.query("truth == 'program'").to_dict("records")
    assert (row["graph"], row["auroc"], row["average_precision"]) == ("tied", 1, 1)
    assert row["n_true"] == len(true)
    others = set(UnrolledGraph(known.exercise.model.config, known.exercise.n_loops).tied_edges)
    worst = score_edges(lambda _: dict.fromkeys(others - true, 1.0), known)
    assert worst.query("truth == 'program'")["auroc"].max() == 0
    assert row["cmd"] < worst["cmd"].min()


def test_edges_of_the_run_give_those_of_the_block(known: KnownCircuit) -> None:
    exercise, true = known.exercise, program_edges(known.compiled)
    graph = UnrolledGraph(exercise.model.config, exercise.n_loops)
    run = {
        (graph.sender_names[s], graph.receiver_names[r]): 1.0
        for s, r in graph.edges.nonzero().tolist()
        if graph.tied_edges[int(graph.tied_index[s, r])] in true
    }
    scores = score_edges(lambda _: run, known).query("truth == 'program'")
    assert scores["graph"].tolist() == ["tied", "unrolled"]
    assert (scores["auroc"] == 1).all()


def test_own_methods_score_as_the_study_of_edges_does(known: KnownCircuit) -> None:
    exercise = known.exercise
    study = edge_study(
        exercise.model, exercise.base, exercise.source, n_loops=exercise.n_loops, n_steps=8,
        methods=["exact", "eap"], curve_points=2, threshold=10.0,
    )  # fmt: skip
    expected = edges_recovered(study, known.compiled).query("by == 'size'")
    keys = ["graph", "truth"]
    areas = study.areas().query("graph == 'tied'").set_index("score")
    for name in ("exact", "eap", "magnitude"):
        found = score_edges(own_edge_method(name), known)
        both = found.merge(expected[expected["score"] == name], on=keys, suffixes=("", "_study"))
        assert len(both) == len(found) >= 3
        assert both["auroc"].tolist() == pytest.approx(both["auroc_study"].tolist(), abs=1e-9)
        assert both["n_edges"].tolist() == both["n_edges_study"].tolist()
        tied = found[found["graph"] == "tied"]
        assert tied["cmd"].tolist()[0] == pytest.approx(areas.loc[name, "cmd"], abs=1e-6)


def test_the_best_method_finds_the_edges_and_chance_does_not() -> None:
    known = known_circuit("ripple.rotated-permuted")
    auroc = {}
    for name in ("edge_ig", "random"):
        scores = score_edges(own_edge_method(name), known)
        tied = scores.query("graph == 'tied' and truth == 'program'")
        auroc[name] = tied["auroc"].iloc[0]
    assert auroc["edge_ig"] >= 0.95
    assert auroc["random"] < 0.8


@pytest.mark.parametrize(
    ("scores", "said"),
    [
        ({}, "got none"),
        ({("input", "block.7.mlp", 0): 1.0}, r"block\.7\.mlp"),
        ({("block.0.mlp", "input", 0): 1.0}, "block.0.mlp"),
        ({("input", "block.0.mlp", 0): float("nan")}, "a finite number, got nan"),
    ],
)
def test_scores_of_what_is_no_edge_are_refused(scores: dict, said: str) -> None:
    with pytest.raises(InputError, match=said):
        score_edges(lambda _: scores, known_circuit("prefix_xor.bare"))


def test_an_unknown_method_is_named() -> None:
    with pytest.raises(InputError, match="eap_ig"):
        own_edge_method("eap_gi")
    assert {"exact", "magnitude", "random"} < set(OWN_EDGE_METHODS)


def test_a_graph_in_the_form_of_eap_ig_has_its_nodes_and_edges(known: KnownCircuit) -> None:
    config, n_loops = known.exercise.model.config, known.exercise.n_loops
    document = eap_graph(known)
    n_layers = config.n_prelude + config.n_layers * n_loops + config.n_coda
    assert document["cfg"]["n_layers"] == n_layers
    heads = [f"h{head}" for head in range(config.n_heads)]
    # As that tool builds its graph: each layer's heads read all before them, then its MLP does.
    stream, edges = ["input"], []
    for layer in range(n_layers):
        attention = [f"a{layer}.{head}" for head in heads]
        edges += [f"{s}->{a}<{qkv}>" for s in stream for a in attention for qkv in "qkv"]
        stream += attention
        edges += [f"{s}->m{layer}" for s in stream]
        stream.append(f"m{layer}")
    edges += [f"{s}->logits" for s in stream]
    assert set(document["edges"]) == set(edges)
    assert set(document["nodes"]) == {*stream, "logits"}
    ends = {name for name, of in document["nodes"].items() if of["in_graph"]}
    true = [name for name, of in document["edges"].items() if of["in_graph"]]
    assert {end for name in true for end in name.split("<")[0].split("->")} == ends


def test_scores_in_that_form_are_read_back(known: KnownCircuit) -> None:
    document = eap_graph(known)
    scores = edges_of_eap_graph(document, known.exercise)
    found = score_edges(lambda _: scores, known).query("truth == 'program'")
    assert (found["auroc"] == 1).all()
    document["edges"].pop("input->m0")
    with pytest.raises(InputError, match="input->m0"):
        edges_of_eap_graph(document, known.exercise)
