"""Disguises: the same behaviour, or nearly, with the circuit hidden.

Each takes a compiled model and returns another, whose circuit gives the new places and lists what
was done. They can be combined in any order; :func:`add_noise`, which is not exact, comes last.
Weights are changed in float64, so that disguises add no rounding errors.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from loopinterp.compiler.compiled import Compiled, need_compiled
from loopinterp.compiler.stream_features import FeaturePoints, StreamFeatures
from loopinterp.core.errors import InputError, check_integer, check_number, check_seed
from loopinterp.models.transformer import LoopedTransformer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jaxtyping import Float
    from torch import Tensor

    from loopinterp.compiler.circuit import Circuit
    from loopinterp.models.config import LoopedTransformerConfig

NOISE = "noise"
"""What the record of :func:`add_noise` begins with."""

_BY_HEAD = ("qkv.weight", "qkv.bias", "out.weight")

Weights = dict[str, "Tensor"]


def rotate(compiled: Compiled, *, seed: int) -> Compiled:
    r"""Rotate the residual stream by a random orthogonal matrix Q: h' = Q h.

    Every weight that reads the stream is multiplied by :math:`Q^\top` from the right, every weight
    that writes it by Q from the left, those of the recall by both. Exact up to the rounding of the
    stored weights.

    Args:
        compiled: The model and its circuit; it is not changed.
        seed: Seed of Q.

    Raises:
        InputError: the seed is no integer from 0 to 2**63 - 1.

    Example:
        >>> import torch
        >>> from loopinterp.compiler import compile_program, rotate
        >>> plain = compile_program("ripple", max_length=6)
        >>> turned = rotate(plain, seed=0)
        >>> tokens = torch.tensor([[4, 3, 1, 2, 0]])
        >>> plain_logits, logits = (c.model(tokens, n_loops=4) for c in (plain, turned))
        >>> torch.allclose(logits, plain_logits, atol=1e-4)
        True
        >>> turned.circuit.disguises
        ('rotated (seed 0)',)
    """
    plain = weights_of(compiled)
    q = random_rotation(compiled.model.config.d_model, generator(seed))
    weights = moved(plain, q, q.mT)
    return rebuilt(compiled, weights, compiled.circuit.moved(q, q.mT), f"rotated (seed {seed})")


def permute(compiled: Compiled, *, seed: int) -> Compiled:
    r"""Shuffle the heads and the neurons of every layer, and rotate every head inside.

    The queries and keys of a head are multiplied by one random orthogonal matrix A,
    :math:`(A q)^\top (A k) = q^\top k`, and its values by another, which the output weights undo.
    Exact up to rounding.

    Args:
        compiled: The model and its circuit; it is not changed.
        seed: Seed of the orders and the bases.

    Raises:
        InputError: the seed is no integer from 0 to 2**63 - 1.

    Example:
        >>> from loopinterp.compiler import compile_program, permute
        >>> shuffled = permute(compile_program("unique_set", max_length=12), seed=1)
        >>> [node.id for node in shuffled.circuit.heads if node.section == "block"]
        ['block.0.head.0']
    """
    g, weights, config = generator(seed), weights_of(compiled), compiled.model.config
    heads, neurons = {}, {}
    for section, layer, prefix in layers(config):
        head_order = torch.randperm(config.n_heads, generator=g)
        neuron_order = torch.randperm(config.mlp_width, generator=g)
        _rotate_heads(weights, f"{prefix}attn.", config.n_heads, g)
        for name in (f"{prefix}attn.{name}" for name in _BY_HEAD):
            ordered = by_head(weights, name, config.n_heads)[:, head_order]
            weights[name] = ordered.reshape(weights[name].shape)
        for name, axis in (("fc_in.weight", 0), ("fc_in.bias", 0), ("fc_out.weight", 1)):
            name = f"{prefix}mlp.{name}"
            weights[name] = weights[name].index_select(axis, neuron_order)
        # What stood at order[k] stands at k now.
        heads[section, layer] = head_order.argsort().tolist()
        neurons[section, layer] = neuron_order.argsort().tolist()
    circuit = compiled.circuit.renumbered(heads, neurons)
    return rebuilt(compiled, weights, circuit, f"permuted (seed {seed})")


def _rotate_heads(weights: Weights, prefix: str, n_heads: int, g: torch.Generator) -> None:
    qkv, bias, out = (by_head(weights, prefix + name, n_heads) for name in _BY_HEAD)
    d_head = out.shape[2]
    for head in range(n_heads):
        scores, values = random_rotation(d_head, g), random_rotation(d_head, g)
        for which, turn in enumerate((scores, scores, values)):
            qkv[which, head] = turn @ qkv[which, head]
            bias[which, head] = turn @ bias[which, head]
        out[:, head] = out[:, head] @ values.mT


def distract(
    compiled: Compiled, *, heads: int = 2, neurons: int = 16, width: int = 8, seed: int
) -> Compiled:
    """Add heads and neurons to every layer that are active and change no output.

    They read all that the program holds, with random weights, and what other distractors wrote,
    and they write along new directions of the residual stream alone. The program reads none of
    those, and the recall drops them, so that nothing accumulates over the loops. Outputs are equal
    up to rounding. Rotate the model afterwards, so that zeros do not give the distractors away.

    Args:
        compiled: The model and its circuit; it is not changed.
        heads: Heads that every layer gets.
        neurons: Neurons that every layer gets.
        width: Directions that the residual stream gets.
        seed: Seed of their weights.

    Raises:
        InputError: a size is no integer or too small, there would be no distractor at all, or the
            seed is no integer from 0 to 2**63 - 1.

    Example:
        >>> from loopinterp.compiler import compile_program, distract
        >>> plain = compile_program("ripple", max_length=6)
        >>> config = distract(plain, heads=1, neurons=4, width=3, seed=0).model.config
        >>> config.n_heads, config.d_mlp - plain.model.config.d_mlp, config.d_model
        (2, 4, 21)
    """
    plain = weights_of(compiled)
    check_integer("heads", heads, least=0)
    check_integer("neurons", neurons, least=0)
    check_integer("width", width, least=1)
    if heads + neurons == 0:
        raise InputError(
            "heads and neurons",
            expected="at least one distractor in each layer",
            given="heads=0, neurons=0",
            fix="Pass heads=1 or neurons=1.",
        )
    old, features = compiled.model.config, StreamFeatures(compiled.circuit)
    write = torch.eye(old.d_model + width, old.d_model, dtype=torch.float64)
    weights = moved(plain, write, write.mT)
    distractors = _Distractors(weights, width, generator(seed))
    for section, layer, prefix in layers(old):
        depth = compiled.circuit.n_layers[section]
        if heads:
            here = features.at(section, 2 * layer)
            distractors.add_heads(f"{prefix}attn.", here, (old.n_heads, heads), depth)
        if neurons:
            here = features.at(section, 2 * layer + 1)
            distractors.add_neurons(f"{prefix}mlp.", here, neurons, depth)
    return rebuilt(
        compiled,
        weights,
        compiled.circuit.moved(write, write.mT),
        f"distracted by {heads} heads and {neurons} neurons a layer along {width} directions "
        f"(seed {seed})",
        d_model=old.d_model + width,
        n_heads=old.n_heads + heads,
        d_head=old.head_width,
        d_mlp=old.mlp_width + neurons,
    )


class _Distractors:
    """Adds heads and neurons that write along ``width`` new directions, one of ``depth`` layers."""

    def __init__(self, weights: Weights, width: int, g: torch.Generator) -> None:
        self.weights, self.width, self.g = weights, width, g

    def add_heads(
        self, prefix: str, here: FeaturePoints, n_heads: tuple[int, int], depth: int
    ) -> None:
        """Put heads behind those of a layer; ``n_heads`` are those before and the new ones."""
        before, new_heads = n_heads
        d_head = self.weights[f"{prefix}out.weight"].shape[1] // before
        read, bias = self._reads(3 * new_heads * d_head, here)
        # Scores with a standard deviation of 3: attention is uneven, and depends on the input.
        scores = slice(2 * new_heads * d_head)
        read[scores] *= 3.0**0.5
        bias[scores] *= 3.0**0.5
        new = {f"{prefix}qkv.weight": read, f"{prefix}qkv.bias": bias}
        for name in new:
            both = by_head(self.weights, name, before), by_head(new, name, new_heads)
            self.weights[name] = torch.cat(both, 1).flatten(0, 2)
        self._add_writes(f"{prefix}out.weight", new_heads * d_head, depth)

    def add_neurons(self, prefix: str, here: FeaturePoints, neurons: int, depth: int) -> None:
        """Put neurons behind those of a layer."""
        read, bias = self._reads(neurons, here)
        for name, new in ((f"{prefix}fc_in.weight", read), (f"{prefix}fc_in.bias", bias)):
            self.weights[name] = torch.cat([self.weights[name], new])
        self._add_writes(f"{prefix}fc_out.weight", neurons, depth)

    def _reads(
        self, rows: int, here: FeaturePoints
    ) -> tuple[Float[Tensor, "row new_d_model"], Float[Tensor, " row"]]:
        """Reads of all that is held somewhere, and biases that put their mean at 1.

        With that mean, few neurons are never above 0 on the inputs.
        """
        spread = sum(float(x.square().sum(-1).mean()) for x in here.centred)
        # Reads of the program have a standard deviation of 1, of other distractors one of 0.5.
        size = max(spread, 1e-12) ** -0.5
        program = size * normal(rows, len(here.mean), g=self.g)
        distractors = 0.5 * self.width**-0.5 * normal(rows, self.width, g=self.g)
        return torch.cat([program, distractors], 1), 1.0 - program @ here.mean

    def _add_writes(self, name: str, columns: int, depth: int) -> None:
        """Let more columns write along the new directions alone."""
        none = torch.zeros(len(self.weights[name]) - self.width, columns, dtype=torch.float64)
        new = (8 * columns * depth) ** -0.5 * normal(self.width, columns, g=self.g)
        self.weights[name] = torch.cat([self.weights[name], torch.cat([none, new])], 1)


def add_noise(compiled: Compiled, *, relative: float, seed: int) -> Compiled:
    r"""Add Gaussian noise to every entry of every weight matrix. Not exact.

    .. math:: W' = W + \epsilon, \qquad \epsilon_{ij} \sim
        \mathcal{N}(0, \sigma^2), \quad \sigma = \text{relative} \cdot \mathrm{rms}(W)

    with the root mean square over all entries of the matrix, so that the noise is relative to the
    matrix in every basis, before or after a rotation. Queries, keys and values count as three
    matrices; biases stay as they are.

    Args:
        compiled: The model and its circuit; it is not changed.
        relative: Size of the noise against that of each matrix; 0 changes nothing.
        seed: Seed of the noise.

    Raises:
        InputError: ``relative`` is negative or no finite number, or the seed no integer from 0 to
            2**63 - 1.

    Example:
        >>> from loopinterp.compiler import add_noise, compile_program
        >>> noisy = add_noise(compile_program("ripple", max_length=6), relative=0.01, seed=0)
        >>> noisy.circuit.disguises
        ('noise of 0.01 on the weights (seed 0)',)
    """
    fix = "Pass 0.01 for noise of a hundredth of each matrix."
    check_number("relative", relative, least=0, fix=fix)
    g, weights = generator(seed), weights_of(compiled)
    for name, w in weights.items():
        if name.endswith("weight"):
            parts = w.chunk(3) if name.endswith("qkv.weight") else (w,)
            sizes = [relative * part.square().mean().sqrt() for part in parts]
            noisy = [part + size * normal(*part.shape, g=g) for part, size in zip(parts, sizes)]
            weights[name] = torch.cat(noisy)
    disguise = f"{NOISE} of {relative:g} on the weights (seed {seed})"
    return rebuilt(compiled, weights, compiled.circuit, disguise)


def weights_of(compiled: Compiled) -> Weights:
    """A copy of all weights, in float64 on the CPU."""
    need_compiled(compiled)
    return {name: w.detach().cpu().double() for name, w in compiled.model.state_dict().items()}


def rebuilt(
    compiled: Compiled, weights: Weights, circuit: Circuit, disguise: str, **changes: Any
) -> Compiled:
    """A compiled model with other weights, of the same device and precision.

    ``disguise`` is added to the circuit's record; ``changes`` are fields of the configuration.
    """
    old = compiled.model
    model = LoopedTransformer(old.config.replace(**changes)).to(device=old.device, dtype=old.dtype)
    model.load_state_dict(weights)
    circuit = dataclasses.replace(circuit, disguises=(*circuit.disguises, disguise))
    return Compiled(model, circuit, compiled.program)


def layers(config: LoopedTransformerConfig) -> Iterator[tuple[str, int, str]]:
    """(section, layer, prefix of its weights) of all layers, in the order in which they run."""
    sections = (("prelude", config.n_prelude), ("block", config.n_layers), ("coda", config.n_coda))
    for section, n_layers in sections:
        for layer in range(n_layers):
            yield section, layer, f"{section}.{layer}."


def by_head(weights: Weights, name: str, n_heads: int) -> Tensor:
    """A view by head: [3, head, d_head, …], or [d_model, head, d_head] of what heads write."""
    w = weights[name]
    if name.endswith("out.weight"):
        return w.view(len(w), n_heads, -1)
    return w.view(3, n_heads, -1, *w.shape[1:])


def moved(
    weights: Weights,
    write: Float[Tensor, "new_d_model d_model"],
    read: Float[Tensor, "d_model new_d_model"],
) -> Weights:
    """The weights in a residual stream that these matrices write and read."""
    result = {}
    for name, w in weights.items():
        parent, kind = name.split(".")[-2:]
        if parent in ("out", "fc_out"):
            result[name] = write @ w
        elif kind == "bias":
            result[name] = w
        elif parent in ("embedding", "position_embedding"):
            result[name] = w @ write.mT
        elif parent in ("qkv", "fc_in", "unembedding"):
            result[name] = w @ read
        else:  # recall: reads the stream and writes it
            result[name] = write @ w @ read
    return result


def generator(seed: int) -> torch.Generator:
    """A random stream of a checked seed."""
    return torch.Generator().manual_seed(check_seed(seed))


def normal(*shape: int, g: torch.Generator) -> Tensor:
    """Standard normal numbers in float64."""
    return torch.randn(*shape, generator=g, dtype=torch.float64)


def random_rotation(size: int, g: torch.Generator) -> Float[Tensor, "size size"]:
    """An orthogonal matrix, each as likely as any other (Mezzadri 2007, math-ph/0609050)."""
    q, r = torch.linalg.qr(normal(size, size, g=g))
    return q * r.diagonal().sign()
