"""circuit-tracer reads and serves the graph that ``write_attribution_graph`` wrote."""

from __future__ import annotations

import json
import socket
import urllib.request
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.peers.asking import ask

pytestmark = [pytest.mark.peers, pytest.mark.slow]


def answer(folder: Path) -> dict[str, Any]:
    from circuit_tracer.frontend.graph_models import Model  # type: ignore[import-not-found]
    from circuit_tracer.frontend.local_server import serve  # type: ignore[import-not-found]
    from circuit_tracer.frontend.utils import add_graph_metadata  # type: ignore

    document = json.loads((folder / "graph.json").read_text())
    add_graph_metadata(document["metadata"], str(folder))
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    server = serve(str(folder), port=port)
    try:
        served = [
            json.load(urllib.request.urlopen(f"http://localhost:{port}/{name}", timeout=60))
            for name in ("data/graph-metadata.json", "graph_data/graph.json")
        ]
    finally:
        server.stop()
    graph = Model.model_validate(served[1])
    return {
        "listed": [listed["slug"] for listed in served[0]["graphs"]],
        "nodes": {node.node_id: (node.feature_type, node.clerp) for node in graph.nodes},
        "links": [(link["source"], link["target"], link["weight"]) for link in graph.links],
    }


def test_the_weights_that_it_serves_are_the_studys_effects(tmp_path: Path) -> None:
    from loopinterp.edges import write_attribution_graph
    from tests.edges.test_attribution_graph import studied

    result = studied()
    every = int(result.data["pruned"].count())
    write_attribution_graph(result, tmp_path / "graph.json", score="edge_ig", count=every)
    read = ask("older", __name__, tmp_path)
    assert read["listed"] == ["graph"]
    names: dict[str, Any] = {"embedding": "input", "logit": "readout"}
    named: dict[str, Any] = {
        node: names.get(kind, label.rpartition(": ")[2])
        for node, (kind, label) in read["nodes"].items()
    }
    sums: dict[tuple[str, str], float] = defaultdict(float)
    for source, target, weight in read["links"]:
        sums[named[source], named[target]] += weight
    table: Any = result.to_dataframe().query("score == 'edge_ig'")
    table["receiver"] = table["receiver"].str.replace(r"\.[qkv]$", "", regex=True)
    effects: Any = table.groupby(["sender", "receiver"])["effect"].sum()
    assert sums.keys() == set(effects.index) and max(map(abs, sums.values())) > 0.01
    for ends, total in sums.items():
        assert total == pytest.approx(effects[ends], abs=1e-9)
