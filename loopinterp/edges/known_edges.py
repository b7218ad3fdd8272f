"""True edges of compiled models, scores of edges against them, and edges as a `Circuit`.

A compiled model's `Circuit` has edges between components and features. Here each writer and reader
of a feature make an edge, with the lag of its tied edge: 1 through a variable, else 0.

Later readers of a direction see its writer's output and another component's wiping of it. These
edges of *wiping* have effects, which cancel in pairs, and no part in the program.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from loopinterp.compiler.circuit import (
    ROUNDING,
    Circuit,
    Directions,
    FeatureNode,
    HeadNode,
    NeuronGroup,
)
from loopinterp.compiler.compiled import Compiled
from loopinterp.core.errors import InputError
from loopinterp.edges.unrolled_graph import (
    INPUT,
    LAGS,
    LATER,
    READOUT,
    TiedEdge,
    UnrolledGraph,
    without_slot,
)

if TYPE_CHECKING:
    from loopinterp.edges.unrolled_graph import GraphLayout
    from loopinterp.models.config import LoopedTransformerConfig

_OVERLAP = 0.1  # least share of a direction that a component reads

_SECTIONS = {"prelude": 0, "block": 1, "coda": 2}


def program_edges(known: Compiled | Circuit, *, neurons: bool = False) -> set[TiedEdge]:
    """The edges that carry a program's values between components.

    Readers of positions alone, or of a constant initial value of a variable, are left out, as no
    interchange of inputs of one length has an effect there.

    Args:
        known: A compiled model; or a circuit from :func:`as_circuit`.
        neurons: Whether groups of neurons are components, under their names, instead of MLPs.

    Example:
        >>> from loopinterp.compiler import compile_program
        >>> edges = program_edges(compile_program("carry_save", max_length=5))
        >>> sorted(edges)[:2]
        [('block.0.head.0', 'block.0.mlp', 0), ('block.0.mlp', 'block.0.head.0', 1)]
    """
    wires = _Wires(known, neurons=neurons)
    rewritten = {f.id for sender, f in wires.writes if sender.startswith("block")}
    return {
        (sender, reader, lags[0])
        for (sender, f), (g, reader) in product(wires.writes, wires.reads)
        if f.id == g.id
        and (lags := _lags(f, sender, reader))
        # A rewritten variable no longer has its initial value after the loop.
        and not (
            f.id in rewritten
            and sender.startswith((INPUT, "prelude"))
            and reader.startswith((READOUT, "coda"))
        )
    }


def wiping_edges(known: Compiled | Circuit, *, neurons: bool = False) -> set[TiedEdge]:
    """The edges of wiping: from a wiped feature's writer, and from the neurons that wipe it.

    Scratch is wiped by the layer that reads it last, variables by the block's last layer. Arguments
    are those of :func:`program_edges`, whose edges are left out.
    """
    wires = _Wires(known, neurons=neurons)
    writes, reads = [*wires.writes, *wires.wipes], [*wires.reads, *((f, w) for w, f in wires.wipes)]
    edges = {
        (sender, reader, lag)
        for (sender, f), (g, reader) in product(writes, reads)
        if wires.overlap(f, g)
        for lag in _lags(f, sender, reader)
    }
    return edges - program_edges(known, neurons=neurons)


def as_circuit(
    edges: Iterable[TiedEdge],
    config: LoopedTransformerConfig | GraphLayout,
    *,
    name: str = "found",
) -> Circuit:
    """Edges between components as a `Circuit`, to be drawn, saved, unrolled and compared.

    An edge within a loop carries a scratch feature of its sender, others a variable; edges over two
    loops or more become edges to the next one. The circuit has no directions, and its selectors
    mean nothing. An end may be the name of a hook: ``blocks.0.attn.hook_z`` is each head of that
    layer.

    Raises:
        InputError: If an end is no component, or a lag is not 0, 1 or 2.

    Example:
        >>> from loopinterp.models import LoopedTransformerConfig
        >>> config = LoopedTransformerConfig(d_model=8, n_heads=2, d_vocab=5, d_vocab_out=2)
        >>> edges = {("input", "block.0.mlp", 0), ("block.0.mlp", "readout", 0)}
        >>> program_edges(as_circuit(edges, config)) == edges
        True
    """
    # (sender, whether it is a variable) -> the feature that an edge carries.
    carried: dict[tuple[str, bool], FeatureNode] = {}
    links: dict[tuple[str, str], None] = {}
    nodes: dict[str, tuple[str, int, list[str]]] = {}
    for sender, receiver, lag in _between_components(edges, config):
        for end in {sender, receiver} - {INPUT, READOUT}:
            nodes[end] = _parsed(end)
        if lag not in LAGS:
            raise InputError("lag", expected="0, 1 or 2", given=repr(lag), fix="Pass tied edges.")
        if sender == INPUT:
            feature = FeatureNode(INPUT, INPUT, "tokens", "embedding", -1, -1, ())
        else:
            section, layer, _ = nodes[sender]
            leaves = section != "coda" and (lag > 0 or not receiver.startswith(section))
            word, role = ("state", "variable") if leaves else ("output", "scratch")
            name_of_feature = f"{word} of {sender}"
            feature = FeatureNode(name_of_feature, name_of_feature, role, section, layer, -1, ())
            links[sender, feature.id] = None
        carried[sender, feature.role == "variable"] = feature
        links[feature.id, receiver] = None
    features = tuple(carried.values())
    none = Directions(torch.zeros(0, config.d_model), torch.zeros(0, config.d_model))
    heads, groups = [], []
    for node, (section, layer, rest) in sorted(nodes.items()):
        place: dict[str, Any] = {"id": node, "section": section, "layer": layer}
        if rest[0] == "head":
            heads.append(HeadNode(**place, head=int(rest[1]), selector=node, attends_to=""))
        else:
            writes = next((f.id for (sender, _), f in carried.items() if sender == node), "")
            groups.append(NeuronGroup(**place, neurons=(), writes=writes, how="found"))
    return Circuit(
        program=name,
        inputs=(),
        max_length=config.n_ctx or 0,
        n_layers={"prelude": config.n_prelude, "block": config.n_layers, "coda": config.n_coda},
        features=features,
        heads=tuple(heads),
        neurons=tuple(groups),
        edges=tuple(links),
        directions={f.id: none for f in features},
    )


def _between_components(
    edges: Iterable[TiedEdge], config: LoopedTransformerConfig | GraphLayout
) -> Iterator[TiedEdge]:
    """The edges without slots, those between hooks as one between each of their components."""
    graph = UnrolledGraph(config, 1)
    for sender, receiver, lag in edges:
        senders, receivers = [sender], [without_slot(receiver)]
        if "hook_" in sender:
            senders = [graph.senders[k].tied for k in graph.senders_named(sender, "edges")]
        if "hook_" in receiver:
            numbers = graph.receivers_named(receiver, "edges")
            receivers = [graph.readers[graph.receivers[k][0]].tied for k in numbers]
        yield from product(senders, receivers, [lag])


def recovery(
    sizes: np.ndarray,
    edges: Sequence[TiedEdge],
    known: Compiled | Circuit,
    *,
    among: Iterable[TiedEdge],
    neurons: bool = False,
) -> Iterator[dict[str, Any]]:
    """AUROC and average precision of scores, a row for each truth of :func:`.edges_recovered`.

    ``among`` are all tied edges of the model.
    """
    from sklearn.metrics import average_precision_score, roc_auc_score

    program = program_edges(known, neurons=neurons)
    wiping = wiping_edges(known, neurons=neurons)
    if not program or not program < {_of_component(edge) for edge in among}:
        raise InputError(
            "known",
            expected="the compiled model that was studied",
            given="one with edges that are not in its graph" if program else "one without edges",
            fix="Pass the compiled model whose .model was studied.",
        )
    tied = [_of_component(edge) for edge in edges]
    true = np.array([edge in program for edge in tied], dtype=bool)
    wipes = np.array([edge in wiping for edge in tied], dtype=bool)
    # Edges that count, and those that are true.
    truths = {
        "program": (~wipes | true, true),
        "program, wiping wrong": (slice(None), true),
        "program or wiping": (slice(None), true | wipes),
    }
    for truth, (counted, right) in truths.items():
        ranked, right = sizes[counted], right[counted]
        # Rounding has an order too: smaller scores count as 0.
        ranked = np.where(ranked > ROUNDING * ranked.max(), ranked, 0.0)
        yield {
            "truth": truth,
            "auroc": float(roc_auc_score(right, ranked)),
            "average_precision": float(average_precision_score(right, ranked)),
            "n_true": int(right.sum()),
            "n_edges": len(right),
        }


def _of_component(edge: TiedEdge) -> TiedEdge:
    sender, receiver, lag = edge
    return sender, without_slot(receiver), int(lag)


class _Wires:
    """Pairs (component, feature) of ``writes`` and ``wipes``; ``reads`` the other way round."""

    def __init__(self, known: Compiled | Circuit, *, neurons: bool) -> None:
        if not isinstance(known, (Compiled, Circuit)):
            raise InputError(
                "known",
                expected="a compiled model, or a circuit",
                given=type(known).__name__,
                fix="Pass the result of compile_program, or of as_circuit.",
            )
        self._circuit = circuit = known.circuit if isinstance(known, Compiled) else known
        features = {f.id: f for f in circuit.features}
        # Groups of circuits from as_circuit are components.
        mlp = {
            g.id: g.id if neurons or g.how == "found" else f"{g.section}.{g.layer}.mlp"
            for g in circuit.neurons
        }
        component = {h.id: f"{h.section}.{h.layer}.head.{h.head}" for h in circuit.heads} | mlp
        component[READOUT] = READOUT
        self.writes = [(component[a], features[b]) for a, b in circuit.edges if b in features]
        self.reads = [(features[a], component[b]) for a, b in circuit.edges if a in features]
        embedded = [f for f in circuit.features if f.section == "embedding"]
        if isinstance(known, Compiled):
            embedding = known.model.get_parameter("embedding.weight").detach()
            unembedding = known.model.get_parameter("unembedding.weight").detach()
            in_coda = circuit.n_layers["coda"] > 0
            for f in circuit.features:
                both = circuit.directions[f.id]
                values = embedding @ both.read.to(embedding).mT  # [token, direction]
                if f in embedded and (values - values[0]).abs().max() <= _OVERLAP:
                    embedded.remove(f)  # the same for all tokens
                logits = both.write.to(unembedding) @ unembedding.mT  # [direction, answer]
                depend = bool(logits.abs().max() > _OVERLAP * unembedding.abs().max())
                if depend and (f.section == "coda" if in_coda else f.role == "variable"):
                    self.reads.append((f, READOUT))
        self.writes += [(INPUT, f) for f in embedded]
        last = circuit.n_layers["block"] - 1
        self.wipes = [
            (mlp[g.id], f)
            for g in circuit.neurons
            if g.how == "wipe" and g.neurons
            for f in circuit.features
            if (f.role == "variable" and (g.section, g.layer) == ("block", last))
            or (f.role == "scratch" and (g.section, g.layer) == (f.section, f.last_use))
        ]

    def overlap(self, f: FeatureNode, g: FeatureNode) -> bool:
        if f.id == g.id:
            return True
        # Share of each direction of f that each direction of g reads, [of g, of f].
        read = self._circuit.directions[g.id].read @ self._circuit.directions[f.id].write.mT
        return bool((read.abs() > _OVERLAP).any())


def _parsed(component: str) -> tuple[str, int, list[str]]:
    section, layer, *rest = [*component.split("."), "", ""]
    if section not in _SECTIONS or not layer.isdigit() or not rest[0]:
        raise InputError(
            "edges",
            expected="components like 'block.0.mlp', 'coda.0.head.1', 'input', 'readout'",
            given=repr(component),
            fix="Pass edges of the tied graph, without loops.",
        )
    return section, int(layer), rest


def _lags(feature: FeatureNode, sender: str, reader: str) -> tuple[int, ...]:
    """The lags at which a reader sees a sender's feature; only variables outlast a loop."""
    if sender == INPUT:
        return (0,)
    section, layer, part = _parsed(sender)
    to_section, to_layer, to_part = (READOUT, 0, [""]) if reader == READOUT else _parsed(reader)
    if section == to_section:
        if feature.role == "variable" and section == "block":
            return (1, LATER)
        # Within a layer, heads write before neurons read.
        before = (layer, part[0] != "head") < (to_layer, to_part[0] != "head")
        return (0,) if before else ()
    if section == "block" and feature.role == "variable":
        return LAGS if to_section in ("coda", READOUT) else ()
    if section == "prelude" and feature.role == "scratch":
        return ()
    later = to_section == READOUT or _SECTIONS[section] < _SECTIONS[to_section]
    return (0,) if later else ()
