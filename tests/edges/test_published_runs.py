"""Edges of adapted models against runs by hand, finite differences, and what must add up."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loopinterp.adapters import OuroAdapter, adapt
from loopinterp.edges import edge_graph, edge_study, path_patching, write_attribution_graph
from loopinterp.edges.edge_effects import EdgeEffects
from loopinterp.edges.edge_runs import graph_of_pairs
from loopinterp.edges.published_runs import PublishedRuns
from loopinterp.edges.unrolled_graph import UnrolledGraph, layout_of
from loopinterp.models.taps import SILENT, Tap
from tests.adapters.kinds import KINDS
from tests.adapters.published import ouro, trm
from tests.edges.published_by_hand import embedding_of, run_by_hand
from tests.refusals import naming

LOOPS = 3
BY_HAND = ["ouro", "ouro-grouped", "nanbeige", "huginn", "albert"]
BOTH = pytest.mark.parametrize("stream_norms", ["edges", "nodes"])


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms and angles in float64, where the models go back to float32."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


@cache
def model_of(name: str) -> Any:
    model = KINDS[name].build()
    return adapt(model if name == "hrm" else model.double())  # HRM casts its weights to float32


def pairs(name: str, n: int = 3, n_pos: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    base, source = torch.randint(64, (2, n, n_pos), generator=generator).clamp(max=60)
    if "hrm" in name or "trm" in name:
        source = (base + 1) % 10
        return base % 10, source
    return base, source


def hand(name: str, tokens: Tensor, *more: Any, nodes: bool = False) -> Any:
    model = model_of(name)
    with torch.no_grad():
        start = model.initial_state(model.embed(tokens)) if name == "huginn" else None
        embedded = embedding_of(model.published, tokens)
    return run_by_hand(model.published, embedded, start, LOOPS, *more, nodes=nodes)


def some_paths(name: str, stream_norms: str) -> list[tuple[str, str, tuple[str, ...]]]:
    """Within a loop, to the next one, over several, from the input, to the readout."""
    last = model_of(name).site_map.n_layers - 1
    if stream_norms == "nodes":
        if name.startswith(("ouro", "nanbeige")):
            norm = f"block.{last}.ln_loop"
            return [
                ("0:block.0.head.0", "0:block.1.head.1.k", ()),
                ("0:block.0.mlp", f"0:{norm}", ()),
                (f"0:{norm}", "1:block.0.head.0.v", ()),
                (f"1:{norm}", "2:block.1.mlp", ()),
                ("0:block.0.mlp", "2:block.0.mlp", (f"0:{norm}", f"1:{norm}")),
                ("input", "0:block.0.mlp", ()),
            ]
        paths: list[tuple[str, str, tuple[str, ...]]] = [
            ("0:block.0.head.0", "0:block.0.ln1_post", ()),
            ("0:block.0.ln1_post", "0:block.0.mlp", ()),
            ("0:block.0.ln1_post", "0:block.0.ln2_post", ()),
            (f"0:block.{last}.ln2_post", "1:block.0.head.1.k", ()),
            (
                "0:block.0.head.0",
                "1:block.0.head.0.q",
                ("0:block.0.ln1_post", "0:block.0.ln2_post"),
            ),
        ]
        if name == "huginn":
            del paths[-1]
            paths += [
                ("prelude.1.ln2_post", "2:block.0.head.0.q", ()),
                ("prelude.1.ln2_post", "1:block.0.ln1_post", ()),
                (f"2:block.{last}.ln2_post", "coda.0.ln_coda", ()),
                ("coda.0.ln_coda", "coda.0.head.1.v", ()),
            ]
        return paths
    paths = [
        ("0:block.0.head.0", "0:block.0.mlp", ()),
        ("0:block.0.mlp", "1:block.0.head.1.q", ()),
        (f"0:block.{last}.mlp", "2:block.0.head.0.k", ()),
        ("1:block.0.head.0", f"2:block.{last}.mlp", ()),
        ("input", "1:block.0.head.0.v", ()),
        ("input", "2:block.0.mlp", ()),
        ("0:block.0.mlp", "readout", ("1:block.0.head.0", f"1:block.{last}.mlp")),
        ("input", "2:block.0.head.0.k", ("0:block.0.mlp",)),
    ]
    if name == "huginn":
        paths += [("prelude.0.head.1", "1:block.0.mlp", ()), ("coda.0.head.0", "readout", ())]
        paths += [("1:block.0.mlp", "coda.0.head.1.v", ())]
    return paths


@BOTH
@pytest.mark.parametrize("name", BY_HAND[1:])  # grouped keys are the more general
def test_path_patching_is_that_of_a_run_by_hand(name: str, stream_norms: Any) -> None:
    model, (base, source), nodes = model_of(name), pairs(name), stream_norms == "nodes"
    plain, updates = hand(name, base, nodes=nodes)
    _, donated = hand(name, source, nodes=nodes)
    torch.testing.assert_close(plain, model(base, n_loops=LOOPS), atol=1e-7, rtol=0)
    paths = some_paths(name, stream_norms)
    if name != "ouro-grouped":  # every other one, and those around the loop
        around = [p for p in paths[1::2] if p[0][0] in "pc" or p[1][0] in "pc"]
        paths = [*paths[::2], *around]
    for sender, receiver, through in paths:
        into = [receiver, *through, *(f"{m}.{slot}" for m in through for slot in "qkv")]

        def sees(a, b, output, sender=sender, into=into, through=through):
            if a == sender:
                return donated[a] if b in into else output
            return updates[a] if a in through and b not in into else output

        expected, _ = hand(name, base, sees, nodes=nodes)
        got = path_patching(
            model, base, source, senders=sender, receivers=receiver, through=through,
            n_loops=LOOPS, stream_norms=stream_norms,
        )  # fmt: skip
        torch.testing.assert_close(got, expected, atol=1e-7, rtol=0)
        assert (got - plain).abs().max() > 1e-5, (sender, receiver)


@BOTH
@pytest.mark.parametrize("name", [*BY_HAND, "albert-groups", "albert-states", "hrm_text", "hrm"])
def test_runs_are_the_model_s_own_and_with_all_edges_the_source_s(
    name: str, stream_norms: Any
) -> None:
    model, (base, source) = model_of(name), pairs(name)
    graph, *_ = graph_of_pairs(
        model, base, source, n_loops=2, neurons=None, split=True, stream_norms=stream_norms
    )
    runs, donors = PublishedRuns(model, graph, base), PublishedRuns(model, graph, source)
    with torch.no_grad():
        torch.testing.assert_close(runs()[0], model(base, n_loops=2))
        own, values = donors()
        ones = graph.edges.to(values)
        torch.testing.assert_close(runs(ones, values)[0], own)
        # Weights that all differ, so that no stream is shared, and by example.
        drawn = torch.rand(graph.edges.shape, generator=torch.Generator().manual_seed(0))
        drawn = drawn.to(values)
        separate = runs(drawn, values)[0]
        one_by_one = runs(drawn[..., None].expand(*drawn.shape, len(base)), values)[0]
    torch.testing.assert_close(separate, one_by_one)
    torch.testing.assert_close(separate, runs(drawn.requires_grad_(), values)[0])


def effects_of(
    name: str, stream_norms: Any, *, split: bool = False, n_loops: int = LOOPS
) -> EdgeEffects:
    model, (base, source) = model_of(name), pairs(name)
    graph, *_ = graph_of_pairs(
        model, base, source, n_loops=n_loops, neurons=None, split=split, stream_norms=stream_norms
    )
    direction = torch.randn(model.config.d_vocab_out, generator=torch.Generator().manual_seed(2))

    def smooth(logits: Tensor) -> Tensor:
        return logits[:, -1] @ direction.double()

    return EdgeEffects(model, graph, base, source, metric=smooth)


@pytest.mark.parametrize(
    ("name", "stream_norms"),
    [
        ("ouro-grouped", "edges"),
        ("ouro-grouped", "nodes"),
        ("huginn", "nodes"),
        ("albert", "edges"),
    ],
)
def test_eap_is_the_slope_of_the_metric_along_each_edge(name: str, stream_norms: Any) -> None:
    effects, small = effects_of(name, stream_norms, split=True), 1e-4
    with torch.no_grad():
        scores = effects.scores("eap").mean(-1)
        graph, change = effects.graph, effects.source - effects.base
        edges = graph.edges.nonzero().tolist()
        for s, r in edges[:: len(edges) // 8]:
            ends = []
            for step in (small, -small):
                weights = torch.zeros(graph.edges.shape, dtype=torch.float64)
                weights[s, r] = step
                ends.append(effects._runs(weights, change, added=True)[0])
            metrics = [effects.compared.by_example(logits) for logits in ends]
            slope = ((metrics[0] - metrics[1]) / (2 * small) / effects._change).mean()
            assert scores[s, r].item() == pytest.approx(slope.item(), abs=1e-6)


@pytest.mark.parametrize(
    ("name", "n_steps", "stream_norms"),
    [
        ("ouro", 20, "edges"),
        ("ouro", 20, "nodes"),
        ("huginn", 16, "edges"),
        ("albert", 16, "nodes"),
    ],
)
def test_integrated_gradients_add_up_to_the_whole_effect(
    name: str, n_steps: int, stream_norms: Any
) -> None:
    effects = effects_of(name, stream_norms, n_loops=1 if name == "huginn" else 2)
    changes = effects.replaced(effects.graph.edges)  # by example
    limit = 0.01 * changes.abs().max().item()
    # The edges out of the input, and all edges.
    along_input = effects.scores("eap_ig", n_steps=n_steps)[0].sum(0)
    torch.testing.assert_close(along_input, changes, atol=limit, rtol=0)
    # Through many norms as nodes, the path bends more.
    if stream_norms == "nodes":
        n_steps = 30 if name == "ouro" else 48
    along_edges = effects.scores("edge_ig", n_steps=n_steps).sum((0, 1))
    torch.testing.assert_close(along_edges, changes, atol=limit, rtol=0)


def test_norms_as_components_cut_the_stream() -> None:
    base, source = pairs("huginn")
    graph, *_ = graph_of_pairs(
        model_of("huginn"), base, source, n_loops=2, neurons=None, split=False, stream_norms="nodes"
    )
    edges = set(graph.edge_names)
    assert {s for s, r in edges if r == "1:block.0.head.0"} == {
        "prelude.1.ln2_post", "0:block.2.ln2_post",
    }  # fmt: skip
    assert {s for s, r in edges if r == "1:block.2.ln1_post"} == {
        "1:block.1.ln2_post", "1:block.2.head.0", "1:block.2.head.1",
    }  # fmt: skip
    assert {s for s, r in edges if r == "readout"} == {"coda.1.ln2_post"}
    # Receivers that no sender has in common share a stream, in the order of their last reading.
    assert graph.groups is not None and int(graph.groups.max()) < len(graph.receivers) / 2
    last = [int(graph.read_stages[graph.groups == k].max()) for k in graph.groups.unique()]
    assert last == sorted(last)
    shared = graph.edges.long() @ torch.nn.functional.one_hot(graph.groups)  # [sender, group]
    assert int(shared.max()) == 1
    assert graph.senders_named("loops.1.blocks.2.ln1_post.hook_normalized") == [
        graph.sender_names.index("1:block.2.ln1_post")
    ]


def test_in_nested_loops_each_part_of_the_state_is_read_where_it_enters() -> None:
    base, source = pairs("hrm")
    graph, *_ = graph_of_pairs(
        model_of("hrm"), base, source, n_loops=2, neurons=None, split=False, stream_norms="nodes"
    )
    n_layers = model_of("hrm").site_map.n_layers
    slow = f"0:block.{n_layers - 1}.ln2_post"
    fast, _, n_fast = model_of("hrm").stacks
    last_fast = f"0:block.{n_fast * len(fast.layers) - 1}.ln2_post"
    # z_L + (z_H + e): the fast stack, the slow one and the input.
    of_first = {s for s, r in graph.edge_names if r == "1:block.0.head.0"}
    assert of_first == {"input", slow, last_fast}


def test_a_study_of_an_adapted_model_is_saved_drawn_and_controlled(tmp_path: Any) -> None:
    base, source = pairs("ouro")
    for stream_norms in ("edges", "nodes"):
        result = edge_study(
            model_of("ouro"), base, source, n_loops=2, methods=["eap", "edge_ig"], n_steps=2,
            curve_points=2, split=stream_norms == "nodes", stream_norms=stream_norms, threshold=0.2,
        )  # fmt: skip
        assert result.data["score"].values.tolist() == ["eap", "edge_ig", "random"]
        back = type(result).load(result.save(tmp_path))
        assert back.config == result.config and back.data.identical(result.data)
        edges = result.tied_edges(score="edge_ig", count=5)
        assert len(edge_graph(result, edges).edges) == 5
        assert result.circuit(score="edge_ig", count=5).edges
        assert result.figures() and result.findings()
        full = result.data["faithfulness"].sel(share=1.0, score="edge_ig")
        torch.testing.assert_close(torch.tensor(full.values), torch.ones(2, dtype=torch.float64))


# What cannot be read as nodes and edges


class _Between(Tap):
    """A tap that some code stands before."""

    def __init__(self, tap: Tap) -> None:
        self.tap, self.stream = tap, torch.zeros(())
        self.listens, self.edits = tap.listens, tap.edits


class _Deaf(_Between):
    def __call__(self, component: str, x: Tensor) -> Tensor:
        return x if component.endswith("_in") else self.tap(component, x)


class _Gated(_Between):
    def __call__(self, component: str, x: Tensor) -> Tensor:
        if component == "hook_mlp_out":
            x = x * self.stream.sigmoid()
        x = self.tap(component, x)
        if component == "hook_resid_mid":
            self.stream = x
        return x


class _WithoutTaps(OuroAdapter):
    """Its layer does not say where it reads."""

    def layer(self, layer: Any, h: Tensor, context: Any, tap: Any = SILENT) -> Tensor:
        return super().layer(layer, h, context, _Deaf(tap))


class _ReadsElsewhere(OuroAdapter):
    """The stream itself is the gate of its MLP."""

    def layer(self, layer: Any, h: Tensor, context: Any, tap: Any = SILENT) -> Tensor:
        return super().layer(layer, h, context, _Gated(tap))


class _FourMethods(nn.Module):
    loop_rule, d_vocab = 2, 10

    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner = nn.Embedding(10, 8), nn.Linear(8, 8)

    def embed(self, inputs: Tensor) -> Tensor:
        return self.table(inputs)

    def initial_state(self, e: Tensor) -> Tensor:
        return e

    def step(self, h: Tensor, e: Tensor) -> Tensor:
        return h + self.inner(h).tanh() + e

    def readout(self, h: Tensor) -> Tensor:
        return h @ self.table.weight.T


def hostile() -> dict[str, Any]:
    tokens = torch.randint(10, (2, 4))
    return {
        "mixed positions": adapt(trm.tiny(mlp_t=True)),
        "four methods": adapt(_FourMethods().eval(), inputs=tokens, n_loops=2),
        "repeated": adapt(ouro.tiny(), repeat="model.layers", inputs=tokens),
        "no taps": _WithoutTaps(ouro.tiny()),
        "reads elsewhere": _ReadsElsewhere(ouro.tiny()),
    }


@pytest.mark.parametrize(
    "name", ["mixed positions", "four methods", "repeated", "no taps", "reads elsewhere"]
)
def test_a_model_without_separate_components_is_refused(name: str) -> None:
    model: Any = hostile()[name]
    n_pos = model.config.n_ctx or 4
    base = torch.randint(10, (2, n_pos), generator=torch.Generator().manual_seed(0))
    source = (base + 1) % 10
    with naming("model"):
        edge_study(model, base, source, n_loops=2, methods=["eap"])
    with naming("model"):
        path_patching(model, base, source, n_loops=2, senders="input", receivers="readout")


def test_every_link_between_norms_of_the_stream_has_a_weight(tmp_path: Path) -> None:
    base, source = pairs("ouro", 2, 3)
    result = edge_study(
        model_of("ouro"), base, source, n_loops=2, methods=["eap"], stream_norms="nodes",
        curve_points=2,
    )  # fmt: skip
    assert int(result.graph.edges.sum()) == int(result.data["effect"].sel(score="eap").count())
    every = int(result.data["pruned"].count())
    path = write_attribution_graph(result, tmp_path / "graph.json", score="eap", count=every)
    links = json.loads(path.read_text())["links"]
    assert all(math.isfinite(link["weight"]) for link in links)


def test_what_an_adapted_model_lacks_is_refused() -> None:
    (base, source), model = pairs("ouro"), model_of("ouro")
    with naming("neurons"):
        edge_study(model, base, source, n_loops=2, neurons={"block.0.some": [0]})
    with naming("receivers"):
        path_patching(
            model, base, source, n_loops=2, senders="1:block.0.mlp", receivers="0:block.0.mlp"
        )
    assert effects_of("ouro", "edges").controls == ("random",)
    graph = UnrolledGraph(layout_of(model.site_map, "nodes"), 2)
    assert "1:block.1.ln_loop" in graph.sender_names
    with naming("senders"):
        graph.senders_named("1:block.0.ln_loop")
