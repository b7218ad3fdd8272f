"""Heads and neurons in another order, and the inside of every head in another basis."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from loopinterp.rasp.compiler.compiled import Compiled
from loopinterp.rasp.disguises.compiled_weights import (
    Weights,
    by_head,
    generator,
    layers,
    random_rotation,
    rebuilt,
    weights_of,
)

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor

WITH_HEADS = ("qkv.weight", "qkv.bias", "out.weight")


def permute(compiled: Compiled, *, seed: int) -> Compiled:
    r"""Shuffle the heads and the neurons of every layer, and turn every head inside.

    The queries and keys of a head are turned by one random orthogonal matrix A,
    :math:`(A q)^\top (A k) = q^\top k`, and its values by another, which the output weights turn
    back. Exact up to rounding.

    Args:
        compiled: The model and its circuit; it is not changed.
        seed: Seed of the orders and the bases.

    Raises:
        InputError: the seed is no integer from 0 to 2**63 - 1.

    Example:
        >>> from loopinterp.rasp import compile_program, permute
        >>> shuffled = permute(compile_program("unique_set", max_length=12), seed=1)
        >>> [node.id for node in shuffled.circuit.heads if node.section == "block"]
        ['block.0.head.0']
    """
    g, weights, config = generator(seed), weights_of(compiled), compiled.model.config
    heads, neurons = {}, {}
    for section, layer, prefix in layers(config):
        by_head = torch.randperm(config.n_heads, generator=g)
        by_neuron = torch.randperm(config.mlp_width, generator=g)
        _turn_heads(weights, f"{prefix}attn.", config.n_heads, g)
        _order_heads(weights, f"{prefix}attn.", by_head)
        _order_neurons(weights, f"{prefix}mlp.", by_neuron)
        # What stood at order[k] stands at k now.
        heads[section, layer] = by_head.argsort().tolist()
        neurons[section, layer] = by_neuron.argsort().tolist()
    circuit = compiled.circuit.renumbered(heads, neurons)
    return rebuilt(compiled, weights, circuit, f"permuted (seed {seed})")


def _turn_heads(weights: Weights, prefix: str, n_heads: int, g: torch.Generator) -> None:
    split, bias, back = (by_head(weights, prefix + name, n_heads) for name in WITH_HEADS)
    d_head = back.shape[2]
    for head in range(n_heads):
        scores, values = random_rotation(d_head, g), random_rotation(d_head, g)
        for which, turn in enumerate((scores, scores, values)):
            split[which, head] = turn @ split[which, head]
            bias[which, head] = turn @ bias[which, head]
        back[:, head] = back[:, head] @ values.mT


def _order_heads(weights: Weights, prefix: str, order: Int[Tensor, " head"]) -> None:
    for name in (prefix + name for name in WITH_HEADS):
        ordered = by_head(weights, name, len(order))[:, order]
        weights[name] = ordered.reshape(weights[name].shape)


def _order_neurons(weights: Weights, prefix: str, order: Int[Tensor, " neuron"]) -> None:
    for name, axis in (("fc_in.weight", 0), ("fc_in.bias", 0), ("fc_out.weight", 1)):
        weights[prefix + name] = weights[prefix + name].index_select(axis, order)
