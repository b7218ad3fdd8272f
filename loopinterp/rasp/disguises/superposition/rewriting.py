"""The weights of a model in the residual stream of a frame."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from loopinterp.rasp.disguises.places import ROUNDING, Places, orthonormal
from loopinterp.rasp.disguises.superposition.frame import Frame
from loopinterp.rasp.disguises.superposition.interference import new_reads
from loopinterp.rasp.disguises.superposition.program_reads import NeuronReads, ProgramReads
from loopinterp.rasp.disguises.weights import Weights, layers, moved

if TYPE_CHECKING:
    from torch import Tensor

    from loopinterp.models.model_config import LoopedTransformerConfig
    from loopinterp.rasp.compiler.circuit import Circuit
    from loopinterp.rasp.disguises.places import Held


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
    wipes = {layer.prefix: _inexact_wipes(layer, frame) for layer in reads.neurons}
    more = max(w.more for w in wipes.values())
    for prefix, inexact in wipes.items():
        _make_units(new, f"{prefix}mlp.", inexact, more)
    return new, _with_pairs(places.circuit, wipes, config.mlp_width)


@dataclass(frozen=True)
class _Wipes:
    """Neurons of one layer that wipe what they cannot read exactly, by number.

    Attributes:
        pairs: A neuron that is not the same for 0 and 1 -> its inputs for those.
        spare: Neurons that are.
    """

    pairs: dict[int, tuple[float, float]]
    spare: tuple[int, ...]

    @property
    def more(self) -> int:
        """Neurons that are needed beyond those that there are."""
        return max(len(self.pairs) - len(self.spare), 0)

    def seconds(self, d_mlp: int) -> list[int]:
        """The second neuron of each pair, if there are ``d_mlp`` neurons already."""
        return [*self.spare, *range(d_mlp, d_mlp + self.more)][: len(self.pairs)]


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


def _inexact_wipes(layer: NeuronReads, frame: Frame) -> _Wipes:
    inexact = layer.wipes & (new_reads(layer.rows, layer.held, frame).error > ROUNDING)
    low, high = (x + layer.bias for x in layer.held.extremes(layer.rows))
    differ = inexact & (high.relu() - low.relu() > ROUNDING)
    return _Wipes(
        {
            int(number): (float(least), float(greatest))
            for number, least, greatest in zip(
                layer.numbers[differ], low[differ], high[differ], strict=True
            )
        },
        tuple(layer.numbers[inexact & ~differ].tolist()),
    )


def _make_units(weights: Weights, prefix: str, wipes: _Wipes, more: int) -> None:
    r"""Make units of neurons that wipe.

    Where the input y is :math:`y_0` or :math:`y_1`, relu(y) is the same as
    :math:`\mathrm{relu}(y_0) + (\mathrm{relu}(y_1) - \mathrm{relu}(y_0))
    \, \mathrm{clip}(2 (y - y_0) / (y_1 - y_0) - 1/2)`, but that is flat around both.

    Args:
        weights: The weights, which are changed.
        prefix: Prefix of those of the layer's MLP.
        wipes: The neurons.
        more: Neurons that the layer gets.
    """
    w_in, b_in = weights[f"{prefix}fc_in.weight"], weights[f"{prefix}fc_in.bias"]
    w_out, b_out = weights[f"{prefix}fc_out.weight"], weights[f"{prefix}fc_out.bias"].clone()
    d_mlp, d_model = w_in.shape
    w_in = torch.cat([w_in, w_in.new_zeros(more, d_model)])
    b_in = torch.cat([b_in, b_in.new_zeros(more)])
    w_out = torch.cat([w_out, w_out.new_zeros(d_model, more)], 1)
    for idle in wipes.spare:
        w_in[idle], b_in[idle], w_out[:, idle] = 0, 0, 0
    for (first, (low, high)), second in zip(wipes.pairs.items(), wipes.seconds(d_mlp), strict=True):
        at_low, at_high = max(low, 0.0), max(high, 0.0)
        scale = 2 / (high - low)
        b_out += at_low * w_out[:, first]
        w_out[:, first] *= at_high - at_low
        w_out[:, second] = -w_out[:, first]
        w_in[first] *= scale
        b_in[first] = scale * (b_in[first] - low) - 0.5
        w_in[second], b_in[second] = w_in[first], b_in[first] - 1
    new = {"fc_in.weight": w_in, "fc_in.bias": b_in, "fc_out.weight": w_out, "fc_out.bias": b_out}
    weights.update({prefix + name: w for name, w in new.items()})


def _with_pairs(circuit: Circuit, wipes: dict[str, _Wipes], d_mlp: int) -> Circuit:
    """The circuit with the second neurons of wipes that became units."""
    groups = []
    for group in circuit.neurons:
        inexact = wipes[f"{group.section}.{group.layer}."]
        second = zip(inexact.pairs, inexact.seconds(d_mlp), strict=True)
        new = [n for first, n in second if first in group.neurons and n not in group.neurons]
        groups.append(dataclasses.replace(group, neurons=(*group.neurons, *new)))
    return dataclasses.replace(circuit, neurons=tuple(groups))
