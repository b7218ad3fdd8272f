"""What a compiled model's program reads from the residual stream, place by place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from loopinterp.rasp.disguises.places import STATE, Held, Places, orthonormal
from loopinterp.rasp.disguises.weights import Weights, layers

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from loopinterp.models.model_config import LoopedTransformerConfig

UNEVEN = frozenset(("mean", "max", "min", "count"))
"""Neurons that read how much of a head's attention is where. All others read what is the same at
every key that the head looks at."""


@dataclass(frozen=True, eq=False)
class HeadReads:
    """A head that computes a selector.

    Attributes:
        id: Its name in edges.
        held: What it reads from.
        rows: Its queries, keys and values.
        bias: Their biases.
        out: What it writes.
        counts: Whether it matters how evenly it looks at what it selects.
    """

    id: str
    held: Held
    rows: Float[Tensor, "qkv d_head d_model"]
    bias: Float[Tensor, "qkv d_head"]
    out: Float[Tensor, "d_model d_head"]
    counts: bool


@dataclass(frozen=True, eq=False)
class NeuronReads:
    """The neurons of one layer that belong to the program.

    Attributes:
        prefix: Prefix of the layer's weights.
        held: What they read from.
        rows: What each reads.
        bias: Their biases.
        numbers: Their numbers in the layer.
        wipes: Those that wipe.
        heads: Heads whose output they may read.
    """

    prefix: str
    held: Held
    rows: Float[Tensor, "neuron d_model"]
    bias: Float[Tensor, " neuron"]
    numbers: Int[Tensor, " neuron"]
    wipes: Bool[Tensor, " neuron"]
    heads: tuple[HeadReads, ...]


@dataclass(frozen=True, eq=False)
class ProgramReads:
    """All that the program reads.

    Attributes:
        neurons: Those of each layer.
        logits: The unembedding.
        answer: What the unembedding reads from.
        variables: Reads of the variables' values.
        state: What those read from.
        exactly: An orthonormal basis of what has to be read exactly. What heads write, and what
            is not 0 or 1, is wiped as it is, with its errors, so its directions are kept apart.
            So is all that a head reads whose attention is counted, as softmax and thresholds
            enlarge its errors.
    """

    neurons: tuple[NeuronReads, ...]
    logits: Float[Tensor, "d_vocab_out d_model"]
    answer: Held
    variables: Float[Tensor, "value d_model"]
    state: Held
    exactly: Float[Tensor, "rank d_model"]


def program_reads(
    weights: Weights, config: LoopedTransformerConfig, places: Places
) -> ProgramReads:
    """Find all that the program reads."""
    circuit = places.circuit
    heads = {head.id: head for head in _heads(weights, config, places)}
    neurons = []
    for section, layer, prefix in layers(config):
        groups = [g for g in circuit.neurons if (g.section, g.layer) == (section, layer)]
        numbers = [n for g in groups for n in g.neurons]
        wipes = [g.how == "wipe" for g in groups for _ in g.neurons]
        live = places.live(section, 2 * layer + 1)
        read = dict.fromkeys(places.by_head[name] for name in live if name in places.by_head)
        neurons.append(
            NeuronReads(
                prefix=prefix,
                held=places.at(section, 2 * layer + 1),
                rows=weights[f"{prefix}mlp.fc_in.weight"][numbers],
                bias=weights[f"{prefix}mlp.fc_in.bias"][numbers],
                numbers=torch.tensor(numbers, dtype=torch.int64),
                wipes=torch.tensor(wipes, dtype=torch.bool),
                heads=tuple(heads[name] for name in read),
            )
        )
    values = [circuit.of(name).read.double() for name in circuit.variables]
    exactly = [head.out.mT for head in heads.values()] + places.single
    exactly += [head.rows.flatten(0, 1) for head in heads.values() if head.counts]
    return ProgramReads(
        neurons=tuple(neurons),
        logits=weights["unembedding.weight"],
        answer=places.at("coda", 2 * config.n_coda),
        variables=torch.cat(values),
        state=places.at(*STATE),
        exactly=orthonormal(torch.cat([*exactly, weights["recall.state.weight"][:0]])),
    )


def _heads(
    weights: Weights, config: LoopedTransformerConfig, places: Places
) -> Iterator[HeadReads]:
    circuit = places.circuit
    readers: dict[str, set[str]] = {}
    how = {group.id: group.how for group in circuit.neurons}
    for source, target in circuit.edges:
        readers.setdefault(source, set()).add(how.get(target, ""))
    n_heads, d_head, d_model = config.n_heads, config.head_width, config.d_model
    for node in circuit.heads:
        prefix = f"{node.section}.{node.layer}.attn."
        written = [name for name, head in places.by_head.items() if head == node.id]
        yield HeadReads(
            id=node.id,
            held=places.at(node.section, 2 * node.layer),
            rows=weights[f"{prefix}qkv.weight"].view(3, n_heads, d_head, d_model)[:, node.head],
            bias=weights[f"{prefix}qkv.bias"].view(3, n_heads, d_head)[:, node.head],
            out=weights[f"{prefix}out.weight"].view(d_model, n_heads, d_head)[:, node.head],
            counts=any(readers.get(name, set()) & UNEVEN for name in written),
        )
