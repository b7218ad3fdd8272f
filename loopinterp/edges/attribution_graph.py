"""The circuit of an edge study as a graph file of circuit-tracer and Neuronpedia."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import torch

from loopinterp.core.boundary import checked
from loopinterp.core.errors import check_choice, need
from loopinterp.core.storage import write_json
from loopinterp.edges.edge_study import EdgeStudy
from loopinterp.edges.unrolled_graph import INPUT, READOUT, Component, TiedEdge


@checked
def write_attribution_graph(
    result: EdgeStudy,
    path: str | Path,
    *,
    score: str | None = None,
    count: int | None = None,
    scan: str = "looped-model",
    prompt: str = "",
) -> Path:
    """Write an unrolled circuit as JSON for the viewers of circuit-tracer and Neuronpedia.

    A node is a component in one loop: layer ``l`` of loop ``t`` stands at ``n_prelude + t n_layers
    + l``. Its ``address``, ``component``, ``loop`` and ``head``, which viewers ignore, are further
    keys. A link's weight is the edge's mean effect; effects on queries, keys and values are added
    up. The graph has one column for the input, and one for all positions of all examples.

    Args:
        result: The study, whose score must have effects of unrolled edges.
        path: File to write; its name without the ending is the graph's ``slug``.
        score: Whose effects are the weights; by default "edge_ig", or the first that has them.
        count: Number of tied edges of highest score; by default those that pruning kept.
        scan: Name of the model, as viewers file it.
        prompt: Text above the graph; by default a count of examples and loops.

    Raises:
        InputError: If there is no such score of unrolled edges, or the circuit has no edges.

    Source: the JSON schema of Neuronpedia (``graph-schema.json``), and circuit-tracer 0.5.
    """
    effects = result.data["effect"]
    known = effects["score"].values.tolist()
    usable = [name for name in known if not bool(effects.sel(score=name).isnull().all())]
    if score is None:
        score = "edge_ig" if "edge_ig" in usable else (usable or known)[0]
    check_choice("score", score, known)
    expected, fix = "a score of unrolled edges", "Run edge_study with unrolled_exact=True."
    need(score in usable, "score", expected, f"{score!r}, of tied edges", fix)
    tied = result.tied_edges() if count is None else result.tied_edges(score=score, count=count)
    expected, fix = "a circuit with edges", "Pass count=, a number of tied edges."
    need(tied, "result", expected, "none after pruning", fix)
    nodes, links = _nodes_and_links(result, tied, score)
    readout = next((node["node_id"] for node in nodes if node["feature_type"] == "logit"), "")
    path = Path(path)
    document = {
        "metadata": _metadata(result, score, path.stem, scan, prompt),
        "qParams": {
            "pinnedIds": [],
            "supernodes": [],
            "linkType": "both",
            "clickedId": readout,
            "sg_pos": "",
        },
        "nodes": nodes,
        "links": links,
    }
    write_json(path, document)
    return path


def _nodes_and_links(
    result: EdgeStudy, tied: set[TiedEdge], score: str
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    graph, effects = result.graph, result.data["effect"].sel(score=score)
    numbers = torch.tensor([graph.tied_edges.index(edge) for edge in tied])
    ends: dict[str, Component] = {}
    weights: dict[tuple[str, str], float] = defaultdict(float)
    for s, r in torch.isin(graph.tied_index, numbers).nonzero().tolist():
        sender, receiver = graph.senders[s], graph.readers[graph.receivers[r][0]]
        ends |= {sender.name: sender, receiver.name: receiver}
        effect = float(effects.sel(sender=sender.name, receiver=graph.receiver_names[r]))
        weights[sender.name, receiver.name] += effect
    n_layers = max(part.number for part in graph.senders) + 1
    # The number of each tied component among those of its layer.
    places: dict[str, int] = {}
    in_layer = Counter()
    for part in graph.senders:
        if part.tied not in places:
            places[part.tied] = in_layer[part.section, part.layer]
            in_layer[part.section, part.layer] += 1
    node_of = {
        name: _node(part, places.get(part.tied, 0), n_layers, result.metric)
        for name, part in sorted(ends.items(), key=lambda end: end[1].stage)
    }
    links = [
        {"source": node_of[s]["node_id"], "target": node_of[r]["node_id"], "weight": weight}
        for (s, r), weight in weights.items()
    ]
    return list(node_of.values()), links


def _node(part: Component, place: int, n_layers: int, metric: str) -> dict[str, Any]:
    more: dict[str, Any] = {"component": part.name, "loop": part.loop, "head": part.head}
    if part.tied == INPUT:
        layer, kind, label, column, more["address"] = "E", "embedding", "", 0, "hook_embed"
        numbered, js = 0, "E_0-0"
    elif part.tied == READOUT:
        # Viewers show the text between quotes, and sort by the number after "(p=": there is none.
        layer, kind, label, column = n_layers + 1, "logit", f'readout "{metric}" (p=n/a)', 1
        numbered, js = 0, "L_0-0"
    else:
        kind = "norm" if part.norm else "attention head" if part.head is not None else "mlp"
        layer, column = part.number, 1
        # The format's version 1 numbers features by Cantor's pairing.
        numbered, js = math.comb(layer + place + 1, 2) + place, f"{layer}_{place}-0"
        loop = "" if part.loop is None else f"loop {part.loop}: "
        label = f"{loop}{part.tied}"
        hook = "hook_mlp_out" if part.head is None else "attn.hook_z"
        hook = hook if part.neurons is None else "mlp.hook_post"
        more["address"] = part.place + (f"{part.norm}.hook_normalized" if part.norm else hook)
        if part.neurons is not None:
            more["neurons"] = list(part.neurons)
    return {
        "node_id": f"{layer}_{place}_{column}",
        "feature": numbered,
        "layer": str(layer),
        "ctx_idx": column,
        "feature_type": kind,
        "jsNodeId": js,
        "clerp": label,
        **more,
    }


def _metadata(result: EdgeStudy, score: str, slug: str, scan: str, prompt: str) -> dict[str, Any]:
    import loopinterp

    examples = f"{result.n_examples} pairs of inputs, {result.n_loops} loops"
    return {
        "slug": slug,
        "scan": scan,
        "transcoder_list": [],
        # Viewers drop nodes that fill more than 2/3 of these columns.
        "prompt_tokens": ["input", "all positions"],
        "prompt": prompt or examples,
        "schema_version": 1,
        "info": {
            "description": "Edges between components of a looped model, loop by loop. Weights are "
            f"shares of the change of {result.metric} from base to source.",
            "generator": {"name": "loopinterp", "version": loopinterp.__version__},
        },
        "generation_settings": {
            "score": score,
            "metric": result.metric,
            "n_examples": result.n_examples,
            "n_loops": result.n_loops,
        },
        "pruning_settings": {
            "faithfulness_threshold": result.threshold,
            "faithfulness": result.pruned_faithfulness,
        },
    }
