"""Distractors: heads and neurons that do something, to which nothing listens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from loopinterp.errors import InputError
from loopinterp.rasp.compiler.compiled import Compiled
from loopinterp.rasp.disguises.draws import check_whole, generator
from loopinterp.rasp.disguises.weights import Weights, layers, moved, rebuilt, weights_of

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from loopinterp.rasp.compiler.circuit import Circuit

SCORE = 3.0
"""Standard deviation of a distractor's attention scores: it looks at some keys far more than at
others, and not always at the same ones."""

OWN = 0.5
"""Standard deviation of what a distractor reads of what other distractors wrote, where what it
reads of the program has 1."""


def distract(
    compiled: Compiled, *, heads: int = 2, neurons: int = 16, width: int = 8, seed: int
) -> Compiled:
    """Add heads and neurons to every layer that are active and change no output.

    They read all that the program holds, with random weights, and what other distractors wrote,
    and they write along new directions of the residual stream alone. The program reads none of
    those, and the recall drops them, so that nothing piles up over the loops. Outputs are the same
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
        >>> from loopinterp.rasp import compile_program, distract
        >>> plain = compile_program("ripple", max_length=6)
        >>> config = distract(plain, heads=1, neurons=4, width=3, seed=0).model.config
        >>> config.n_heads, config.d_mlp - plain.model.config.d_mlp, config.d_model
        (2, 4, 21)
    """
    check_whole("heads", heads, least=0)
    check_whole("neurons", neurons, least=0)
    check_whole("width", width, least=1)
    if heads + neurons == 0:
        raise InputError(
            "heads and neurons",
            expected="at least one distractor in each layer",
            given="heads=0, neurons=0",
            fix="Pass heads=1 or neurons=1.",
        )
    makes = _Distractors(compiled.circuit, width, generator(seed))
    old = compiled.model.config
    write = torch.eye(old.d_model + width, old.d_model, dtype=torch.float64)
    weights = moved(weights_of(compiled), write, write.mT)
    depth = {"prelude": old.n_prelude, "block": old.n_layers, "coda": old.n_coda}
    for section, _, prefix in layers(old):
        if heads:
            size = (heads, old.head_width, depth[section])
            makes.add_heads(weights, f"{prefix}attn.", old.n_heads, size)
        if neurons:
            makes.add_neurons(weights, f"{prefix}mlp.", neurons, depth[section])
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
    """Draws weights that read what the circuit holds.

    Args:
        circuit: The circuit.
        width: New directions of the residual stream.
        g: Where the weights are drawn from.
    """

    def __init__(self, circuit: Circuit, width: int, g: torch.Generator) -> None:
        held = [f for f in circuit.features if f.role != "scratch"]
        writes = [circuit.directions[f.id].write.double() for f in held]
        means = torch.stack([w.mean(0) for w in writes])
        spread = sum(float((w - m).square().sum(-1).mean()) for w, m in zip(writes, means))
        self.width, self._g = width, g
        self._middle = means.sum(0)
        # Weights of this size read what is held with a standard deviation of 1.
        self._size = max(spread, 1e-12) ** -0.5

    def add_heads(
        self, weights: Weights, prefix: str, n_heads: int, size: tuple[int, int, int]
    ) -> None:
        """Put heads behind those that there are.

        Args:
            weights: The weights, which are changed.
            prefix: Prefix of those of the layer's attention.
            n_heads: Heads that there are.
            size: (heads, width of a head, layers of the section).
        """
        heads, d_head, depth = size
        read, bias = self._reads(3 * heads * d_head)
        qk = 2 * heads * d_head
        read[:qk] *= SCORE**0.5
        bias[:qk] *= SCORE**0.5
        for name, new in (("qkv.weight", read), ("qkv.bias", bias)):
            old = weights[prefix + name]
            rest = old.shape[1:]
            parts = old.view(3, n_heads, d_head, *rest), new.view(3, heads, d_head, *rest)
            weights[prefix + name] = torch.cat(parts, 1).reshape(-1, *rest)
        out = self._writes(heads * d_head, (4 * heads * d_head * depth) ** -0.5)
        weights[f"{prefix}out.weight"] = torch.cat([weights[f"{prefix}out.weight"], out], 1)

    def add_neurons(self, weights: Weights, prefix: str, neurons: int, depth: int) -> None:
        """Put neurons behind those that there are; the layer is one of ``depth``."""
        read, bias = self._reads(neurons)
        for name, new in (("fc_in.weight", read), ("fc_in.bias", bias)):
            weights[prefix + name] = torch.cat([weights[prefix + name], new])
        out = self._writes(neurons, (4 * neurons * depth) ** -0.5)
        weights[f"{prefix}fc_out.weight"] = torch.cat([weights[f"{prefix}fc_out.weight"], out], 1)

    def _reads(self, rows: int) -> tuple[Float[Tensor, "row new_d_model"], Float[Tensor, " row"]]:
        """Reads of all that is held, and biases that put their middle near 0."""
        program = self._size * self._normal(rows, len(self._middle))
        own = OWN * self.width**-0.5 * self._normal(rows, self.width)
        bias = 0.5 * self._normal(rows, 1)[:, 0] - program @ self._middle
        return torch.cat([program, own], 1), bias

    def _writes(self, columns: int, size: float) -> Float[Tensor, "new_d_model column"]:
        """Writes along the new directions alone."""
        none = torch.zeros(len(self._middle), columns, dtype=torch.float64)
        return torch.cat([none, size * self._normal(self.width, columns)])

    def _normal(self, rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=self._g, dtype=torch.float64)
