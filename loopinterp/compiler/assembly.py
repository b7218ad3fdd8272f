"""Stages 4 and 5: lay out the stream, and assemble the weights of a looped transformer.

The layout has the layers, the coordinates of every feature, and the circuit. The MLP of the last
layer that reads a scratch feature erases it; others then use its coordinates.

The injected input e holds tokens, positions, the prelude's features, and the variables' first
values, so h_0 = e. Each loop starts from W_h h + W_e e (external recall): W_h keeps the variables,
W_e everything else.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain, count
from typing import Any

import numpy as np
import torch

from loopinterp.compiler.circuit import Circuit, Directions, FeatureNode, HeadNode, NeuronGroup
from loopinterp.compiler.features import Codes, Feature, LoweredHead, Writes
from loopinterp.compiler.lowering import LoweredProgram, LoweredSection
from loopinterp.core.errors import need
from loopinterp.models.config import LoopedTransformerConfig
from loopinterp.models.transformer import LoopedTransformer


@dataclass(eq=False)
class LayerLayout:
    heads: list[LoweredHead] = field(default_factory=list)
    writes: list[tuple[Feature, Writes]] = field(default_factory=list)
    wiped: list[Feature] = field(default_factory=list)

    @property
    def n_neurons(self) -> int:
        """Two for each unit and each erased coordinate, one for that of a variable."""
        units = sum(len(writes.units) for _, writes in self.writes)
        wiped = sum(f.width * (1 if f.role == "variable" else 2) for f in self.wiped)
        return 2 * units + wiped


@dataclass(frozen=True, eq=False)
class StreamLayout:
    lowered: LoweredProgram
    sections: dict[str, list[LayerLayout]]
    d_model: int


def lay_out(lowered: LoweredProgram) -> StreamLayout:
    sections: dict[str, list[LayerLayout]] = {}
    for section in lowered.sections:
        layers = sections[section.name] = [LayerLayout() for _ in range(section.n_layers)]
        for feature in section.live:
            if feature.head is not None and feature.head not in layers[feature.layer].heads:
                layers[feature.layer].heads.append(feature.head)
            if feature.writes is not None:
                layers[feature.layer].writes.append((feature, feature.writes))
            for read in feature.inputs:
                read.last_use = max(read.last_use, feature.layer)
        if section.name == "block":
            layers[-1].wiped += section.targets.values()
        for feature in section.live:
            # The answer is read by none of them: it is left for the unembedding.
            if feature.role == "scratch" and feature.last_use >= 0:
                layers[feature.last_use].wiped.append(feature)
    start = 0
    for feature in lowered.persistent:
        feature.start, start = start, start + feature.width
    for section in lowered.sections:
        for written, target in section.targets.items():
            written.start = target.start
    widest = max(_place_scratch(section, start) for section in lowered.sections)
    return StreamLayout(lowered, sections, max(widest, start))


def _place_scratch(section: LoweredSection, start: int) -> int:
    """Give scratch features the first coordinates that are free; return the end of those used."""

    def birth(feature: Feature) -> int:
        """When it is written: 2 l by attention of layer l, 2 l + 1 by its MLP."""
        return 2 * feature.layer + (0 if feature.head is not None else 1)

    busy: list[tuple[int, int, int]] = []  # from, to, free again at
    end = start
    for feature in sorted((f for f in section.live if f.role == "scratch"), key=birth):
        busy = [taken for taken in busy if taken[2] > birth(feature)]
        start_at = start
        for first, last, _ in sorted(busy):
            if start_at + feature.width <= first:
                break
            start_at = max(start_at, last)
        feature.start = start_at
        end_of_life = 2 * feature.last_use + 1 if feature.last_use >= 0 else 2 * section.n_layers
        busy.append((start_at, start_at + feature.width, end_of_life))
        end = max(end, start_at + feature.width)
    return end


def describe(layout: StreamLayout) -> Circuit:
    lowered, source = layout.lowered, layout.lowered.source
    names = _names(lowered)
    # What the prelude writes into a persistent feature is that one.
    by_section = {"embedding": lowered.persistent}
    by_section |= {s.name: [f for f in s.live if f not in s.targets] for s in lowered.sections}
    features = [(f, section) for section, fs in by_section.items() for f in fs]
    heads: list[HeadNode] = []
    groups: list[NeuronGroup] = []
    edges: dict[tuple[str, str], None] = {}
    stacks = layout.sections
    layers = [(name, k, layer) for name in stacks for k, layer in enumerate(stacks[name])]
    for section, number, layer in layers:
        place: dict[str, Any] = {"section": section, "layer": number}
        for k, head in enumerate(layer.heads):
            name, select = f"{section}.{number}.head.{k}", source.selects[head.select]
            selector, attends_to = select.name or repr(select), repr(select)
            node = HeadNode(id=name, head=k, selector=selector, attends_to=attends_to, **place)
            heads.append(node)
            carried = (codes.feature for codes in head.carried.values() if codes.feature)
            edges.update({(names[feature], name): None for feature in (*head.inputs, *carried)})
            edges.update({(name, names[feature]): None for feature in head.carried})
        first = 0  # each group's neurons follow those of the group before it; what wipes is last
        for k, (feature, writes) in enumerate(layer.writes):
            name, end = f"{section}.{number}.neurons.{k}", first + 2 * len(writes.units)
            edges.update({(names[read], name): None for read in writes.inputs})
            edges[name, names[feature]] = None
            neurons = tuple(range(first, end))
            groups.append(
                NeuronGroup(name, neurons=neurons, writes=names[feature], how=writes.how, **place)
            )
            first = end
        if first < layer.n_neurons:
            name = f"{section}.{number}.neurons.{len(layer.writes)}"
            neurons = tuple(range(first, layer.n_neurons))
            groups.append(NeuronGroup(name, neurons=neurons, writes="", how="wipe", **place))
    basis = torch.eye(layout.d_model)
    return Circuit(
        program=source.program.name,
        inputs=source.program.inputs,
        max_length=source.max_length,
        n_layers={name: len(stack) for name, stack in stacks.items()},
        features=tuple(
            FeatureNode(names[f], f.name, f.role, section, f.layer, last_use, f.values)
            for f, section in features
            for last_use in [f.last_use if f.role == "scratch" else -1]
        ),
        heads=tuple(heads),
        neurons=tuple(groups),
        edges=tuple(edges),
        directions={
            names[f]: Directions(write=basis[f.slots].clone(), read=basis[f.slots].clone())
            for f, _ in features
        },
    )


def _names(lowered: LoweredProgram) -> dict[Feature, str]:
    """A name for every feature; a feature that replaces another has its name."""
    names: dict[Feature, str] = {}

    def add(feature: Feature, name: str) -> None:
        numbered = (f"{name} ({k})" for k in count(2))
        names[feature] = next(n for n in chain([name], numbered) if n not in names.values())

    # Variables come first, so that they have their own names.
    for feature in sorted(lowered.persistent, key=lambda f: f.role != "variable"):
        add(feature, feature.name)
    for section in lowered.sections:
        for feature in section.live:
            if feature in section.targets:
                names[feature] = names[section.targets[feature]]
            else:
                add(feature, f"{section.name}: {feature.name}")
    return names


SHARPNESS = 120.0
"""Score difference between selected and other keys: exp(-120) is 0 in 32 bits.

Any attention to other keys would leak later positions, which a probe would find.
"""

# Logit of the answer; those of all other classes are 0, and all are where it is undecided
LOGIT = 10.0
Weights = dict[str, np.ndarray]


def assemble(layout: StreamLayout, n_outputs: int) -> LoopedTransformer:
    """The model of a layout.

    Raises:
        InputError: If it would have more than 2**28 weights.
    """
    config, lowered = _configure(layout, n_outputs), layout.lowered
    weights = {
        "embedding.weight": _zeros(len(lowered.source.program.inputs), config.d_model),
        "position_embedding.weight": _zeros(lowered.source.max_length, config.d_model),
    }
    # By the role of a feature.
    tables: dict[str, np.ndarray] = dict(zip(("tokens", "indices"), weights.values()))
    keeps, injects = _zeros(2, layout.d_model)
    for feature in lowered.persistent:
        (keeps if feature.role == "variable" else injects)[feature.slots] = 1.0
        if feature.role in tables:
            tables[feature.role][:, feature.slots] = np.eye(feature.width)
    weights["recall.state.weight"] = np.diag(keeps)
    weights["recall.input.weight"] = np.diag(injects)
    for variable, function in lowered.embedded.items():
        table = tables[function.features[0].role if function.features else "tokens"]
        values = np.broadcast_to(function.table, len(table))  # of each token or position
        # [token or position, value]: one-hot, the variable's first value.
        table[:, variable.slots] = values[:, None] == np.array(variable.values)
    for section, layers in layout.sections.items():
        for number, layer in enumerate(layers):
            parts = {**_attention(layer, config), **_mlp(layer, config)}
            weights.update({f"{section}.{number}.{name}": value for name, value in parts.items()})
    # The answer is a function of at most one feature: one_hot is [value of it, class].
    answer, bias = lowered.answer, _zeros(n_outputs)
    one_hot = answer.table[..., None] == np.arange(n_outputs)
    weights["unembedding.weight"] = _zeros(n_outputs, config.d_model)
    weights["unembedding.bias"] = bias
    if answer.features:
        weights["unembedding.weight"][:, answer.features[0].slots] = LOGIT * one_hot.T
    else:
        bias += LOGIT * one_hot
    model = LoopedTransformer(config)
    model.load_state_dict({k: torch.from_numpy(v) for k, v in weights.items()})
    return model


def _configure(layout: StreamLayout, n_outputs: int) -> LoopedTransformerConfig:
    source = layout.lowered.source
    layers = [layer for stack in layout.sections.values() for layer in stack]
    n_heads = max([1, *(len(layer.heads) for layer in layers)])
    d_head = 1
    for head in chain.from_iterable(layer.heads for layer in layers):
        scores = sum(key.matrix.shape[1] for key, _ in head.pairs)
        values = sum(codes.matrix.shape[1] for codes in head.carried.values())
        d_head = max(d_head, scores, values)
    d_mlp, d_model = max([1, *(layer.n_neurons for layer in layers)]), layout.d_model
    n_inputs = len(source.program.inputs)
    total = len(layers) * d_model * (4 * n_heads * d_head + 2 * d_mlp)
    total += 2 * d_model**2 + d_model * (n_inputs + n_outputs + source.max_length)
    what = f"program {source.program.name} at max_length={source.max_length}"
    got = f"one of {total:,} (d_model {d_model:,}, d_mlp {d_mlp:,}, {len(layers)} layers)"
    fix = "Compile for a smaller max_length, or let its variables take fewer values."
    need(total <= 2**28, what, "a model of at most 2**28 weights", got, fix)
    return LoopedTransformerConfig(
        d_model=d_model,
        d_vocab=n_inputs,
        d_vocab_out=n_outputs,
        n_layers=len(layout.sections["block"]),
        n_prelude=len(layout.sections["prelude"]),
        n_coda=len(layout.sections["coda"]),
        n_heads=n_heads,
        d_head=d_head,
        d_mlp=d_mlp,
        act_fn="relu",
        norm="none",
        final_norm=False,
        injection="concat",
        initial_state="embedding",
        causal=source.causal,
        # Positions that nothing reads still bound the length, which all thresholds rely on.
        positions="absolute",
        n_ctx=source.max_length,
    )


def _zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, dtype=np.float32)


def _attention(layer: LayerLayout, config: LoopedTransformerConfig) -> Weights:
    d_model, d_head, n_heads = config.d_model, config.head_width, config.n_heads
    # Query, key and value weights of each head; a head's unused rows stay 0.
    qkv, bias = _zeros(3, n_heads, d_head, d_model), _zeros(3, n_heads, d_head)
    out = _zeros(d_model, n_heads, d_head)
    # The model divides scores by the root of d_head.
    scale = float(np.sqrt(SHARPNESS * np.sqrt(d_head)))
    for number, head in enumerate(layer.heads):
        # The score is the sum over pairs of key and query codes: each pair takes rows of its own.
        start = 0
        for key, query in head.pairs:
            rows = slice(start, start + key.matrix.shape[1])
            for which, codes in ((0, query), (1, key)):
                _add_codes(qkv[which, number, rows], bias[which, number, rows], codes, scale)
            start = rows.stop
        start = 0
        for feature, codes in head.carried.items():
            rows = slice(start, start + codes.matrix.shape[1])
            _add_codes(qkv[2, number, rows], bias[2, number, rows], codes, 1.0)
            out[feature.slots, number, rows] = np.eye(feature.width)
            start = rows.stop
    return {
        "attn.qkv.weight": qkv.reshape(-1, d_model),
        "attn.qkv.bias": bias.reshape(-1),
        "attn.out.weight": out.reshape(d_model, -1),
        "attn.out.bias": _zeros(d_model),
    }


def _add_codes(weight: np.ndarray, bias: np.ndarray, codes: Codes, scale: float) -> None:
    if codes.feature is None:
        bias += scale * codes.matrix[0]
    else:
        weight[:, codes.feature.slots] += scale * codes.matrix.T


def _mlp(layer: LayerLayout, config: LoopedTransformerConfig) -> Weights:
    d_model, d_mlp = config.d_model, config.mlp_width
    w_in, w_out = _zeros(d_mlp, d_model), _zeros(d_model, d_mlp)
    b_in, b_out = np.zeros(d_mlp), np.zeros(d_model)  # added up in 64 bits
    neuron = 0
    for feature, writes in layer.writes:
        for value, weight in writes.constants:
            b_out[feature.start + value] += weight
        for unit in writes.units:
            for read in unit.reads:
                w_in[neuron, read.feature.slots] += read.weights
                b_in[neuron] += read.constant
            b_in[neuron] += unit.bias
            # relu(x) - relu(x - 1) is x clipped to 0 .. 1
            w_in[neuron + 1], b_in[neuron + 1] = w_in[neuron], b_in[neuron] - 1
            for value, weight in unit.out:
                w_out[feature.start + value, neuron] += weight
                w_out[feature.start + value, neuron + 1] -= weight
            neuron += 2
    for feature in layer.wiped:
        for slot in range(feature.slots.start, feature.slots.stop):
            if feature.role == "variable":
                # relu(x + 1) - 1 is x, smoothly around 0; of 0 and 1, to the last bit
                w_in[neuron, slot], b_in[neuron] = 1.0, 1.0
                w_out[slot, neuron], b_out[slot] = -1.0, b_out[slot] + 1.0
                neuron += 1
            else:
                # relu(x) - relu(-x) is x, to the last bit whatever it is
                w_in[neuron, slot], w_in[neuron + 1, slot] = 1.0, -1.0
                w_out[slot, neuron], w_out[slot, neuron + 1] = -1.0, 1.0
                neuron += 2
    return {
        "mlp.fc_in.weight": w_in,
        "mlp.fc_in.bias": b_in.astype(np.float32),
        "mlp.fc_out.weight": w_out,
        "mlp.fc_out.bias": b_out.astype(np.float32),
    }
