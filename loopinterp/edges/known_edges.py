"""True edges of compiled models, scores of edges against them, and edges as a `Circuit`.

A compiled model's `Circuit` leads from features to what reads them and on to what that writes.
Here each pair of a writer and a reader of one feature becomes an edge between two components, with
the lag of its tied edge: 1 through a variable, which the next loop reads, 0 through all else.

There are other edges in the stream than the program has. A component's output is there for every
later reader of the same direction, also after another component has wiped it: a direct path sees
the first write without the second. These are the edges of *wiping*: real, in pairs that cancel, and
no part of what the program computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    without_slot,
)

if TYPE_CHECKING:
    from loopinterp.models.config import LoopedTransformerConfig

_OVERLAP = 0.1
"""Components that read less than this of a direction, where 1 is all of it, do not read it."""

_SECTIONS = {"prelude": 0, "block": 1, "coda": 2}


def program_edges(known: Compiled | Circuit, *, neurons: bool = False) -> set[TiedEdge]:
    """The edges by which a program's values go from component to component.

    Readers of positions alone, or of a variable's first value where that is a constant, are left
    out: no interchange of inputs of one length shows such an edge.

    Args:
        known: A compiled model with its circuit; or a circuit that :func:`as_circuit` made.
        neurons: Whether groups of neurons are components, under their names; else each MLP is one.

    Example:
        >>> from loopinterp.compiler import compile_program
        >>> edges = program_edges(compile_program("carry_save", max_length=5))
        >>> sorted(edges)[:2]
        [('block.0.head.0', 'block.0.mlp', 0), ('block.0.mlp', 'block.0.head.0', 1)]
    """
    wires = _Wires(known, neurons=neurons)
    # Variables that the block writes again at every loop.
    rewritten = {f.id for sender, f in wires.writes if sender.startswith("block")}
    return {
        (sender, reader, lags[0])
        for (sender, f), (g, reader) in product(wires.writes, wires.reads)
        if f.id == g.id
        and (lags := _lags(f, sender, reader))
        # A variable that a loop has rewritten is no longer the first value after the loop.
        and not (
            f.id in rewritten
            and sender.startswith((INPUT, "prelude"))
            and reader.startswith((READOUT, "coda"))
        )
    }


def wiping_edges(known: Compiled | Circuit, *, neurons: bool = False) -> set[TiedEdge]:
    """The edges of the stream that carry what has been wiped, what wipes it, or is to be wiped.

    Scratch is wiped by the layer that reads it last, variables by the block's last layer. Its
    writer and the neurons that wipe are seen by all later readers of the direction, of the same
    feature or of another that stands there later. No edge is of the program too. Arguments are
    those of :func:`program_edges`.
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
    edges: Iterable[TiedEdge], config: LoopedTransformerConfig, *, name: str = "found"
) -> Circuit:
    """Edges between components as a `Circuit`, to be drawn, saved, unrolled and compared.

    An edge within a loop carries a scratch feature of its sender; an edge to a later loop, or out
    of the loop, carries a variable: the sender's state. Edges over two loops or more become those
    to the next one, and those out of the loop those of the last one. The circuit has no directions,
    and its selectors no meaning.

    Raises:
        InputError: An edge with an end that is no component, or a lag other than 0, 1 or 2.

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
    for sender, slotted, lag in edges:
        receiver = without_slot(slotted)
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


def known_truths(
    edges: Sequence[TiedEdge],
    known: Compiled | Circuit,
    *,
    among: Iterable[TiedEdge],
    neurons: bool = False,
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Truth -> which of some edges count, and which of all are true.

    ``program`` leaves edges of wiping out, ``program, wiping wrong`` counts them as wrong, and
    ``program or wiping`` as true. ``among`` are all tied edges of the model.

    Raises:
        InputError: The circuit has edges that are not among them: it is another model's.
    """
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
    every = np.ones_like(true)
    return {
        "program": (~wipes | true, true),
        "program, wiping wrong": (every, true),
        "program or wiping": (every, true | wipes),
    }


def ranking(
    sizes: np.ndarray, truths: Mapping[str, tuple[np.ndarray, np.ndarray]]
) -> Iterator[dict[str, Any]]:
    """AUROC and average precision of scores, one row for each truth."""
    from sklearn.metrics import average_precision_score, roc_auc_score

    for truth, (counted, true) in truths.items():
        ranked, right = sizes[counted], true[counted]
        # Scores smaller than rounding count as 0: rounding has an order too.
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
    """Who writes, reads and wipes which feature, by the names of components.

    ``writes`` and ``wipes`` are pairs (component, feature), ``reads`` (feature, component).
    """

    def __init__(self, known: Compiled | Circuit, *, neurons: bool) -> None:
        if not isinstance(known, (Compiled, Circuit)):
            raise InputError(
                "known",
                expected="a compiled model with its circuit, or a circuit",
                given=type(known).__name__,
                fix="Pass what compile_program gives, or what as_circuit does.",
            )
        self._circuit = circuit = known.circuit if isinstance(known, Compiled) else known
        features = {f.id: f for f in circuit.features}
        # A group of a circuit that as_circuit made is a component as it is.
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
        """Whether readers of g see what has been written as f."""
        if f.id == g.id:
            return True
        # [direction of g, direction of f]: how much of f each reading direction of g sees.
        read = self._circuit.directions[g.id].read @ self._circuit.directions[f.id].write.mT
        return bool((read.abs() > _OVERLAP).any())


def _parsed(component: str) -> tuple[str, int, list[str]]:
    """Section, layer and the rest of a component's name."""
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
    """The lags at which a reader sees what a sender has written as a feature, the first one first.

    The recall keeps variables, and nothing else, from one loop to the next.
    """
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
