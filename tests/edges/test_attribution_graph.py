"""The file of an attribution graph: its schema, its weights, and the addresses of its nodes."""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from loopinterp.core.errors import InputError
from loopinterp.edges import EdgeStudy, UnrolledGraph, edge_study, write_attribution_graph
from loopinterp.models import LoopedTransformer
from tests.edges.test_edge_runs import model_with, tokens

TEXT, NUMBER, WHOLE = {"type": "string"}, {"type": "number"}, {"type": "integer"}
TEXTS = {"type": "array", "items": TEXT}


def fields(more: dict[str, Any] | None = None, **required: Any) -> dict[str, Any]:
    properties = {**required, **(more or {})}
    return {"type": "object", "required": [*required], "properties": properties}


# What both readers require: Neuronpedia's graph-schema.json and circuit-tracer's graph models.
SCHEMA = fields(
    metadata=fields(
        slug=TEXT, scan=TEXT, prompt_tokens=TEXTS, prompt=TEXT, transcoder_list=TEXTS,
        more={"schema_version": WHOLE, "info": fields(generator=fields(name=TEXT, version=TEXT))},
    ),
    qParams=fields(
        pinnedIds=TEXTS, supernodes={"type": "array"}, linkType=TEXT, clickedId=TEXT, sg_pos=TEXT
    ),
    nodes={
        "type": "array",
        "items": fields(
            node_id=TEXT, feature=WHOLE, layer=TEXT, ctx_idx=WHOLE, feature_type=TEXT,
            jsNodeId=TEXT, clerp=TEXT,
        ),
    },
    links={"type": "array", "items": fields(source=TEXT, target=TEXT, weight=NUMBER)},
)  # fmt: skip

N_LOOPS = 3


def model_of(n_layers: int) -> LoopedTransformer:
    """Of several heads, or of several layers."""
    return model_with(n_layers=n_layers, n_heads=3 - n_layers, d_mlp=4, n_prelude=1, n_coda=1)


def studied(*, n_layers: int = 2, **options: Any) -> EdgeStudy:
    model, (base, source) = model_of(n_layers), tokens()
    options = {"methods": ["edge_ig"], "n_steps": 2, "curve_points": 1, "threshold": 0.2, **options}
    return edge_study(model, base, source, n_loops=N_LOOPS, **options)


@cache
def studied_once() -> EdgeStudy:
    """What several tests write in different ways."""
    return studied()


def written(result: EdgeStudy, folder: Path, **options: Any) -> dict[str, Any]:
    path = write_attribution_graph(result, folder / "graph.json", **options)
    return json.loads(path.read_text())


@pytest.mark.parametrize("options", [{}, {"split": True}, {"neurons": {"block.0.one": [0, 2]}}])
def test_links_add_up_to_the_effects_of_tied_edges(
    options: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No format of the schema is an IRI, and the grammar that checks these takes seconds to build.
    monkeypatch.setitem(sys.modules, "rfc3987_syntax", None)
    import jsonschema

    result = studied(**options, n_layers=1) if options else studied_once()
    every = int(result.data["pruned"].count())
    document = written(result, tmp_path, score="edge_ig", count=every)
    jsonschema.validate(document, SCHEMA)
    nodes = {node["node_id"]: node for node in document["nodes"]}
    assert len(nodes) == len(document["nodes"])
    assert len({(node["layer"], node["feature"]) for node in document["nodes"]}) == len(nodes)
    sums: dict[tuple[str, str, int], float] = {}
    for link in document["links"]:
        s, r = nodes[link["source"]], nodes[link["target"]]
        ends = [node["component"].rpartition(":")[2] for node in (s, r)]
        at = N_LOOPS - 1 if r["loop"] is None else r["loop"]
        lag = 0 if s["loop"] is None else min(at - s["loop"], 2)
        key = (ends[0], ends[1], lag)
        sums[key] = sums.get(key, 0.0) + link["weight"]
    table: Any = result.to_dataframe().query("score == 'edge_ig'")
    table["receiver"] = table["receiver"].str.replace(r"\.[qkv]$", "", regex=True)
    tied: Any = table.groupby(["sender", "receiver", "lag"])["effect"].sum()
    assert sums.keys() == set(tied.index)
    for key, total in sums.items():
        assert total == pytest.approx(tied[key], abs=1e-9)


def test_layers_are_those_of_the_unrolled_run_and_addresses_those_of_hooks(tmp_path: Path) -> None:
    model, result = model_of(2), studied_once()
    every = int(result.data["pruned"].count())
    document = written(result, tmp_path, score="edge_ig", count=every)
    _, cache = model.run_with_cache(tokens()[0], n_loops=N_LOOPS)
    _, by_number = model.unroll(N_LOOPS).run_with_cache(tokens()[0])
    graph = UnrolledGraph(model.config, N_LOOPS)
    for node in document["nodes"]:
        if node["feature_type"] == "logit":
            assert int(node["layer"]) > 1 + 2 * N_LOOPS and "logit difference" in node["clerp"]
            continue
        named = [graph.senders[k].name for k in graph.senders_named(node["address"])]
        assert node["component"] in named
        if node["feature_type"] == "embedding":
            assert node["layer"] == "E" and node["address"] in cache
            continue
        # TransformerLens' numbers are the layers of the unrolled model.
        hook = node["address"].split(".", 4 if "loops" in node["address"] else 2)[-1]
        flat = f"blocks.{node['layer']}.{hook}"
        assert torch.equal(cache[node["address"]], by_number[flat])


def test_by_default_it_is_the_pruned_circuit(tmp_path: Path) -> None:
    result = studied_once()
    document = written(result, tmp_path, scan="toy", prompt="two sums")
    nodes = {node["node_id"]: node["component"] for node in document["nodes"]}
    effects = result.data["effect"].sel(score="edge_ig")
    for link in document["links"]:
        ends = {"sender": nodes[link["source"]], "receiver": nodes[link["target"]]}
        assert link["weight"] == pytest.approx(float(effects.sel(ends)))
    graph, kept = UnrolledGraph(result.config, N_LOOPS), set(result.tied_edges())
    chosen = {
        graph.edge_names[k]
        for k, (s, r) in enumerate(graph.edges.nonzero().tolist())
        if graph.tied_edges[int(graph.tied_index[s, r])] in kept
    }
    assert {(nodes[x["source"]], nodes[x["target"]]) for x in document["links"]} == chosen
    about = document["metadata"]
    assert (about["slug"], about["scan"], about["prompt"]) == ("graph", "toy", "two sums")
    assert nodes[document["qParams"]["clickedId"]] == "readout"


def test_a_score_of_tied_edges_alone_has_no_weights(tmp_path: Path) -> None:
    result = studied(n_layers=1, threshold=10.0, methods=["edge_ig", "exact"])
    for score in ("exact", "eap"):
        with pytest.raises(InputError) as caught:
            write_attribution_graph(result, tmp_path / "graph.json", score=score)
        assert caught.value.what == "score"
    assert not result.tied_edges()
    with pytest.raises(InputError) as caught:
        write_attribution_graph(result, tmp_path / "graph.json")
    assert caught.value.what == "result" and not [*tmp_path.iterdir()]
    result.data["effect"][:] = float("nan")  # as where only exact effects of tied edges are known
    with pytest.raises(InputError) as caught:
        write_attribution_graph(result, tmp_path / "graph.json")
    assert caught.value.what == "score"
