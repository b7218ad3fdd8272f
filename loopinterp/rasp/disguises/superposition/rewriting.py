"""The weights of a model in the residual stream of a frame."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from loopinterp.rasp.disguises.superposition.frame import Frame
from loopinterp.rasp.disguises.superposition.interference import new_reads
from loopinterp.rasp.disguises.superposition.places import ROUNDING, Places, orthonormal
from loopinterp.rasp.disguises.superposition.program_reads import NeuronReads, ProgramReads
from loopinterp.rasp.disguises.weights import Weights, layers, moved

if TYPE_CHECKING:
    from torch import Tensor

    from loopinterp.models.config import LoopedTransformerConfig
    from loopinterp.rasp.compiler.circuit import Circuit
    from loopinterp.rasp.disguises.superposition.places import Held


def superposed_weights(
    weights: Weights,
    config: LoopedTransformerConfig,
    places: Places,
    reads: ProgramReads,
    frame: Frame,
) -> tuple[Weights, Circuit]:
    """The model's weights in the stream of a frame, and its circuit with the neurons that wipe."""
    new = moved(weights, frame.write, frame.write.mT)

    def read(name: str, held: Held) -> None:
        found = new_reads(weights[f"{name}.weight"], held, frame)
        new[f"{name}.weight"] = found.rows
        new[f"{name}.bias"] = weights[f"{name}.bias"] + found.shift

    for section, layer, prefix in layers(config):
        read(f"{prefix}attn.qkv", places.at(section, 2 * layer))
        read(f"{prefix}mlp.fc_in", places.at(section, 2 * layer + 1))
    read("unembedding", reads.answer)
    new["recall.state.weight"], new["recall.input.weight"] = _recall(places, frame)
    inexact = {layer.prefix: _inexact_wipes(layer, frame) for layer in reads.neurons}
    more = max(len(numbers) for numbers in inexact.values())
    for prefix, numbers in inexact.items():
        _make_units(new, f"{prefix}mlp.", numbers, more)
    return new, _with_pairs(places.circuit, inexact, config.mlp_width)


def _recall(places: Places, frame: Frame) -> tuple[Tensor, Tensor]:
    r"""What each loop starts from: :math:`P h + (1 - P - U) e`.

    P projects on the differences between values of variables, U on what is kept apart for
    distractors. State and input differ in nothing else, so this is the state without what the
    distractors wrote, for every frame.
    """
    variables = [f.id for f in places.circuit.variables.values()]
    apart = [p - p.mean(0) for p in places.of(tuple(variables)).points]
    keeps = orthonormal(torch.cat(apart) @ frame.write.mT)
    listed = torch.cat([d.write.double() for d in places.circuit.directions.values()])
    unlisted = frame.kept - frame.kept @ _projector(orthonormal(listed))
    drops = orthonormal(torch.cat([keeps, unlisted @ frame.write.mT]), largest=1.0)
    one = torch.eye(len(frame.write), dtype=torch.float64)
    return _projector(keeps), one - _projector(drops)


def _projector(basis: Tensor) -> Tensor:
    return basis.mT @ basis


def _inexact_wipes(layer: NeuronReads, frame: Frame) -> list[int]:
    """The neurons that wipe what they cannot read exactly, by number."""
    error = new_reads(layer.rows, layer.held, frame).error
    return layer.numbers[layer.wipes & (error > ROUNDING)].tolist()


def _make_units(weights: Weights, prefix: str, numbers: list[int], more: int) -> None:
    """Make units of neurons that wipe x = 0 or 1: relu(x + 1) - 1 becomes clip(2 x - 1/2, 0, 1).

    Args:
        weights: The weights, which are changed.
        prefix: Prefix of those of the layer's MLP.
        numbers: The neurons; each gets a second one, behind all others.
        more: Neurons that the layer gets.
    """
    w_in, b_in = weights[f"{prefix}fc_in.weight"], weights[f"{prefix}fc_in.bias"]
    w_out, b_out = weights[f"{prefix}fc_out.weight"], weights[f"{prefix}fc_out.bias"]
    d_mlp, d_model = w_in.shape
    second = slice(d_mlp, d_mlp + len(numbers))
    w_in = torch.cat([w_in, w_in.new_zeros(more, d_model)])
    b_in = torch.cat([b_in, b_in.new_zeros(more)])
    w_out = torch.cat([w_out, w_out.new_zeros(d_model, more)], 1)
    b_out = b_out + w_out[:, numbers].sum(1)
    w_in[numbers] *= 2
    b_in[numbers] = 2 * b_in[numbers] - 2.5
    w_in[second], b_in[second] = w_in[numbers], b_in[numbers] - 1
    w_out[:, second] = -w_out[:, numbers]
    new = {"fc_in.weight": w_in, "fc_in.bias": b_in, "fc_out.weight": w_out, "fc_out.bias": b_out}
    weights.update({prefix + name: w for name, w in new.items()})


def _with_pairs(circuit: Circuit, inexact: dict[str, list[int]], d_mlp: int) -> Circuit:
    """The circuit with the second neurons of wipes that became units."""
    groups = []
    for group in circuit.neurons:
        numbers = inexact[f"{group.section}.{group.layer}."]
        second = [d_mlp + k for k, n in enumerate(numbers) if n in group.neurons]
        groups.append(dataclasses.replace(group, neurons=(*group.neurons, *second)))
    return dataclasses.replace(circuit, neurons=tuple(groups))
