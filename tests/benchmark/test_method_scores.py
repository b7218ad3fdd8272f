"""Scores of edges on the benchmark: right ones are told from wrong ones, whoever made them."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import pandas as pd
import pytest
import torch

from loopinterp.benchmark import (
    OWN_EDGE_METHODS,
    Exercise,
    KnownCircuit,
    benchmark_models,
    by_comparing,
    by_decompiling,
    by_means,
    by_probing,
    eap_graph,
    edges_of_eap_graph,
    own_edge_method,
    score_edges,
    score_program,
    score_variables,
)
from loopinterp.comparison import program_comparison
from loopinterp.core.errors import InputError
from loopinterp.decompiler import Decompiled
from loopinterp.decompiler.evidence import INTERCHANGED
from loopinterp.edges import UnrolledGraph, edge_study, edges_recovered, program_edges
from loopinterp.programs import get_program
from loopinterp.programs.mutations import negated
from tests.small_studies import name_on_few_pairs


@cache
def known_circuit(name: str, n_pairs: int = 24) -> KnownCircuit:
    (about,) = benchmark_models([name])
    base, source = about.pairs()
    return KnownCircuit(about, about.compiled, base[:n_pairs], source[:n_pairs], {})


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


def test_own_methods_score_as_the_study_of_edges_does() -> None:
    known = known_circuit("prefix_xor.rotated-permuted", n_pairs=8)
    exercise = known.exercise
    study = edge_study(
        exercise.model, exercise.base, exercise.source, n_loops=exercise.n_loops, n_steps=8,
        methods=["exact", "eap"], curve_points=2, threshold=10.0,
    )  # fmt: skip
    expected = edges_recovered(study, known.compiled).query("by == 'size'")
    keys = ["graph", "truth"]
    areas = study.areas().query("graph == 'tied'").set_index("score")
    for name in ("exact", "eap", "magnitude"):
        scored = score_edges(own_edge_method(name), known)
        both = scored.merge(expected[expected["score"] == name], on=keys, suffixes=("", "_study"))
        assert len(both) == len(scored) >= 3
        assert both["auroc"].tolist() == pytest.approx(both["auroc_study"].tolist(), abs=1e-9)
        assert both["n_edges"].tolist() == both["n_edges_study"].tolist()
        tied = scored[scored["graph"] == "tied"]
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
    ("scores", "refused"),
    [
        ({}, "none"),
        ({("input", "block.7.mlp", 0): 1.0}, "block.7.mlp"),
        ({("block.0.mlp", "input", 0): 1.0}, "block.0.mlp"),
        ({("input", "block.0.mlp", 0): float("nan")}, "nan"),
    ],
)
def test_scores_of_what_is_no_edge_are_refused(scores: dict, refused: str) -> None:
    with pytest.raises(InputError) as caught:
        score_edges(lambda _: scores, known_circuit("prefix_xor.bare"))
    assert caught.value.what == "scores of edges" and refused in caught.value.given


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
    ends = {name for name, entry in document["nodes"].items() if entry["in_graph"]}
    true = [name for name, entry in document["edges"].items() if entry["in_graph"]]
    assert {end for name in true for end in name.split("<")[0].split("->")} == ends


def test_scores_in_that_form_are_read_back(known: KnownCircuit) -> None:
    document = eap_graph(known)
    scores = edges_of_eap_graph(document, known.exercise)
    scored = score_edges(lambda _: scores, known).query("truth == 'program'")
    assert (scored["auroc"] == 1).all()
    document["edges"].pop("input->m0")
    with pytest.raises(InputError, match="input->m0"):
        edges_of_eap_graph(document, known.exercise)


SCORES = "loopinterp.benchmark.method_scores"


def test_the_same_program_in_other_words_is_equivalent() -> None:
    other = negated(get_program("ripple"), "carry")
    (row,) = score_program(lambda _: other, known_circuit("ripple.bare")).to_dict("records")
    assert row == {"outcome": "equivalent", "told_apart": 0}


def test_a_near_miss_is_a_false_name() -> None:
    (row,) = score_program(
        lambda _: get_program("ripple_held_2"), known_circuit("ripple.bare")
    ).to_dict("records")
    assert row["outcome"] == "false name"
    assert 0 < row["told_apart"] < 1


def test_none_is_no_name() -> None:
    (row,) = score_program(lambda _: None, known_circuit("ripple.bare")).to_dict("records")
    assert row["outcome"] == "no program"


def test_the_name_of_a_program_is_not_a_program() -> None:
    with pytest.raises(InputError) as caught:
        score_program(lambda _: "ripple", known_circuit("ripple.bare"))  # type: ignore[arg-type, return-value]
    assert caught.value.given == "str"


def test_the_comparison_names_the_program_if_it_is_listed_and_no_other_if_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name_on_few_pairs(monkeypatch, program_comparison, 768)
    known = known_circuit("ripple.distracted-rotated")
    identified = by_comparing(known.exercise)
    assert identified is not None and identified.name == "ripple"
    assert by_comparing(known.exercise, left_out="ripple") is None


def test_a_task_with_one_program_has_no_rival() -> None:
    known = known_circuit("parity.bare")
    assert by_comparing(known.exercise, left_out="parity") is None


def test_the_decompiler_is_told_nothing_and_reads_it_off() -> None:
    known = known_circuit("prefix_xor.rotated-permuted")
    assert score_program(by_decompiling, known)["outcome"].tolist() == ["equivalent"]


def test_a_program_that_is_only_nearly_right_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    known = known_circuit("ripple.bare")
    held_2 = get_program("ripple_held_2")
    rows = [(5, what, 399, 400, 90) for what in ("undisturbed", *INTERCHANGED)]
    evidence = pd.DataFrame(rows, columns=["n", "what", "agree", "of", "inputs"])
    for agree, outcome in ((399, "no program"), (400, "false name")):
        decompiled = Decompiled(held_2, closest=held_2, evidence=evidence.assign(agree=agree))
        monkeypatch.setattr(f"{SCORES}.decompile", lambda *_, result=decompiled, **__: result)
        assert score_program(by_decompiling, known)["outcome"].tolist() == [outcome]


if TYPE_CHECKING:
    from loopinterp.programs import LoopProgram


@pytest.fixture(params=["ripple.rotated-permuted", "carry_save.noisy"])
def known_places(request: pytest.FixtureRequest) -> KnownCircuit:
    return known_circuit(request.param)


def test_the_subspaces_of_the_circuit_are_right(known_places: KnownCircuit) -> None:
    circuit = known_places.compiled.circuit
    (row,) = score_variables(
        lambda *_: {name: circuit.subspace(name) for name in circuit.variables}, known_places
    ).to_dict("records")
    assert row["iia"] == row["found"] == 1
    assert row["low"] < row["iia"] <= row["high"]
    assert row["random"] < 0.5


@pytest.mark.parametrize(("method", "least"), [(by_probing, 0.95), (by_means, 0.5)])
def test_those_that_are_found_are_better_than_chance(
    known_places: KnownCircuit, method: Any, least: float
) -> None:
    (row,) = score_variables(method, known_places).to_dict("records")
    assert row["found"] == 1
    assert row["iia"] > max(least, row["random"] + 0.3)


def test_directions_at_random_are_not(known_places: KnownCircuit) -> None:
    generator = torch.Generator().manual_seed(0)

    def anywhere(exercise: Exercise, program: LoopProgram) -> dict[str, torch.Tensor]:
        width = exercise.model.config.d_model
        return {v: torch.randn(1, width, generator=generator) for v in program.variables}

    (row,) = score_variables(anywhere, known_places).to_dict("records")
    assert row["iia"] < 0.5


def test_variables_without_a_subspace_are_not_found() -> None:
    known_places = known_circuit("carry_save.noisy")
    carry = known_places.compiled.circuit.subspace("carry")
    (row,) = score_variables(lambda *_: {"carry": carry}, known_places).to_dict("records")
    assert row["found"] == 0.5
    (row,) = score_variables(lambda *_: {"carry": carry[:0]}, known_places).to_dict("records")
    assert row["found"] == 0
    assert row["iia"] != row["iia"]


@pytest.mark.parametrize(
    "subspaces",
    [{"carry": torch.ones(1, 3)}, {"carry": torch.ones(14)}, {"age": torch.ones(1, 14)}],
)
def test_what_is_no_subspace_is_refused(subspaces: dict[str, torch.Tensor]) -> None:
    with pytest.raises(InputError) as caught:
        score_variables(lambda *_: subspaces, known_circuit("carry_save.noisy"))
    assert caught.value.what.startswith("subspace of ")
