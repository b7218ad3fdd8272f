"""Figures and findings of an edge study, and its circuit as a graph."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from loopinterp.core.errors import need
from loopinterp.core.results import Figure, Finding, figures_of, findings_of
from loopinterp.core.text import percent
from loopinterp.edges.edge_effects import CONTROLS
from loopinterp.edges.edge_study import EdgeStudy
from loopinterp.edges.unrolled_graph import INPUT, READOUT, TIED, TiedEdge, without_slot
from loopinterp.figures import (
    CircuitGraph,
    GraphEdge,
    GraphNode,
    Series,
    heatmap_panels,
    line_figure,
)


@findings_of.register
def _(result: EdgeStudy) -> list[Finding]:
    n, n_kept = int(result.data["pruned"].count()), int(result.data["pruned"].sum())
    f = result.pruned_faithfulness
    text = (
        f"{n_kept} of {n} edges keep {percent(f)} of the {result.metric} with another input's "
        f"values on all others. As many edges at random keep {percent(result.random_faithfulness)};"
        f" all edges but the {n_kept} keep {percent(result.completeness.without)}."
    )
    return [Finding(text, value=f"{n_kept} of {n}", label="edges after pruning")]


@figures_of.register
def _(result: EdgeStudy) -> list[Figure]:
    best = _best(result)
    lags = {"within a loop": 0, "to the next loop": 1, "over two loops or more": 2}
    sizes = result.data["tied_size"].sel(score=best)
    panels = {words: sizes.sel(lag=lag, drop=True) for words, lag in lags.items()}
    largest = float(sizes.max())
    scores = Figure(
        title=f"Edges between components, scored by {best}",
        plot=heatmap_panels(
            # Lags without a visible effect are left out.
            {name: x for name, x in panels.items() if float(x.max()) >= 0.01 * largest},
            value_title="share of the change",
            scale="mass",
            value_range=(0, largest or 1),
            x_title="receiver",
            y_title="sender",
        ),
        caption=(
            "Change of the metric when the receiver sees the sender's output on another input, as "
            "a share of the change between the two inputs. Mean absolute value over examples, "
            f"{'at all loops at once' if best == 'exact' else 'summed over loops'}; lags with less "
            "than 1% of the largest are left out."
        ),
        control="The data has the scores of the controls.",
        data=result.to_dataframe(),
    )
    f = result.data["faithfulness"].sel(graph=TIED)
    names = f["score"].values.tolist()
    lines = [Series.of(name, f.sel(score=name), control=name in CONTROLS) for name in names]
    faithfulness = Figure(
        title="Faithfulness of the edges of highest score",
        plot=line_figure(lines, x_title="share of edges", y_title="faithfulness", x_log=True),
        caption=(
            "The base's run with another input's values on all edges but those of highest score: "
            "1 is the model's own metric, 0 that of the other input."
        ),
        control=f"Edges at random{' and by norms' if 'magnitude' in names else ''}.",
        data=result.areas(),
    )
    if not result.tied_edges():
        return [scores, faithfulness]
    circuit = Figure(
        title="The pruned circuit",
        plot=edge_graph(result),
        caption=(
            "Edges between components, within a loop and to the next one (around the block). "
            "Width: effect of the edge; dashed: against the answer. Faithfulness of the circuit: "
            f"{result.pruned_faithfulness:.2f}."
        ),
        control=f"As many edges at random: faithfulness {result.random_faithfulness:.2f}.",
    )
    return [scores, faithfulness, circuit]


_ROLES = {"q": "query", "k": "key", "v": "value", "gate": "gate"}


def _best(result: EdgeStudy) -> str:
    scores = result.data["score"].values.tolist()
    return "edge_ig" if "edge_ig" in scores else scores[0]


def edge_graph(result: EdgeStudy, edges: Iterable[TiedEdge] | None = None) -> CircuitGraph:
    """The graph of some tied edges, each as wide as its score (of ``edge_ig`` if available).

    Args:
        edges: Sender, receiver and lag of each; by default those that pruning kept.
    """
    best = _best(result)
    table = result.to_dataframe()
    table = table[table["score"] == best].set_index(["sender", "receiver", "lag"])
    chosen = sorted(result.tied_edges() if edges is None else edges)
    nodes: dict[str, GraphNode] = {}
    links = []
    for sender, receiver, lag in chosen:
        edge = (sender, receiver, lag)
        expected = "tied edges of this study, (sender, receiver, lag) each"
        fix = "result.to_dataframe() lists them."
        need(edge in table.index, "edges", expected, repr(edge), fix)
        reader = without_slot(receiver)  # a slot becomes the role of the link
        role = _ROLES[receiver.rpartition(".")[2]] if reader != receiver else ""
        effect, size = table.loc[edge, ["effect", "size"]]
        minimal = result.data["minimality"].sel(tied_sender=sender, tied_receiver=receiver, lag=lag)
        for end in (sender, reader):
            nodes.setdefault(end, _node(end))
        links.append(GraphEdge(sender, reader, lag, role, float(size) * (-1 if effect < 0 else 1)))
        if not bool(minimal.isnull()):
            words = f"without the edge to {reader}, faithfulness loses {float(minimal):.3f}"
            facts = (*nodes[sender].facts, ("Ablation", words))
            nodes[sender] = replace(nodes[sender], facts=facts)
    title = f"{'pruned circuit' if edges is None else 'edges'}, scored by {best}"
    return CircuitGraph(title, tuple(nodes.values()), tuple(links))


def _node(name: str) -> GraphNode:
    if name == INPUT:
        return GraphNode(name, "input", "injected input", "input")
    if name == READOUT:
        return GraphNode(name, "readout", "readout", "readout", 10_000)  # behind all layers
    section, layer, rest = name.split(".", 2)
    head = re.fullmatch(r"head\.(\d+)", rest)
    kind = "head" if head else "neurons"
    label = f"head {layer}.{head[1]}" if head else f"MLP {layer}" if rest == "mlp" else rest
    label = label if section == "block" else f"{section} {label}"
    stage = 2 * int(layer) + (not head)
    note = "" if head or rest == "mlp" else f"neurons of MLP {layer}"
    note = f"norm of the stream, layer {layer}" if rest.startswith("ln") else note
    part = {"prelude": "prelude", "block": "loop", "coda": "readout"}[section]
    return GraphNode(name, kind, label, part, stage, note)
