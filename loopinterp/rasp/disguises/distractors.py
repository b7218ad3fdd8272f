"""Distractors: heads and neurons that do something, to which nothing listens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from loopinterp.errors import InputError, check_integer
from loopinterp.rasp.compiler.compiled import Compiled
from loopinterp.rasp.disguises.compiled_weights import (
    Weights,
    by_head,
    generator,
    layers,
    moved,
    normal,
    rebuilt,
    weights_of,
)
from loopinterp.rasp.disguises.stream_features import FeaturePoints, StreamFeatures

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

LIFT = 1.0
"""What a distractor reads of the mean of all that may be held, so that few neurons are never
above 0 for the inputs that there are."""

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
    draws = _Draws(width, generator(seed))
    for section, layer, prefix in layers(old):
        depth = compiled.circuit.n_layers[section]
        if heads:
            here = features.at(section, 2 * layer)
            _add_heads(weights, f"{prefix}attn.", here, draws, (old.n_heads, heads, depth))
        if neurons:
            here = features.at(section, 2 * layer + 1)
            _add_neurons(weights, f"{prefix}mlp.", here, draws, (neurons, depth))
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


class _Draws:
    """Draws reads and writes of distractors along ``width`` new directions of the stream."""

    def __init__(self, width: int, g: torch.Generator) -> None:
        self._width, self._g = width, g

    def reads(
        self, rows: int, here: FeaturePoints
    ) -> tuple[Float[Tensor, "row new_d_model"], Float[Tensor, " row"]]:
        """Reads of all that is held somewhere, with biases that put their mean at ``LIFT``."""
        spread = sum(float(apart.square().sum(-1).mean()) for apart in here.apart)
        # Of this size, they read what is held with a standard deviation of 1.
        size = max(spread, 1e-12) ** -0.5
        program = size * normal(rows, len(here.mean), g=self._g)
        own = OWN * self._width**-0.5 * normal(rows, self._width, g=self._g)
        bias = LIFT - program @ here.mean
        return torch.cat([program, own], 1), bias

    def add_writes(self, weights: Weights, name: str, columns: int, depth: int) -> None:
        """Let more columns write along the new directions alone, in one of ``depth`` layers."""
        none = torch.zeros(len(weights[name]) - self._width, columns, dtype=torch.float64)
        new = (8 * columns * depth) ** -0.5 * normal(self._width, columns, g=self._g)
        weights[name] = torch.cat([weights[name], torch.cat([none, new])], 1)


def _add_heads(
    weights: Weights, prefix: str, here: FeaturePoints, draws: _Draws, sizes: tuple[int, int, int]
) -> None:
    """Put heads behind those of a layer; sizes are (heads, new heads, layers of the section)."""
    n_heads, heads, depth = sizes
    d_head = weights[f"{prefix}out.weight"].shape[1] // n_heads
    read, bias = draws.reads(3 * heads * d_head, here)
    scores = slice(2 * heads * d_head)
    read[scores] *= SCORE**0.5
    bias[scores] *= SCORE**0.5
    new = {f"{prefix}qkv.weight": read, f"{prefix}qkv.bias": bias}
    for name in new:
        both = by_head(weights, name, n_heads), by_head(new, name, heads)
        weights[name] = torch.cat(both, 1).flatten(0, 2)
    draws.add_writes(weights, f"{prefix}out.weight", heads * d_head, depth)


def _add_neurons(
    weights: Weights, prefix: str, here: FeaturePoints, draws: _Draws, sizes: tuple[int, int]
) -> None:
    """Put neurons behind those of a layer; sizes are (neurons, layers of the section)."""
    neurons, depth = sizes
    read, bias = draws.reads(neurons, here)
    for name, new in ((f"{prefix}fc_in.weight", read), (f"{prefix}fc_in.bias", bias)):
        weights[name] = torch.cat([weights[name], new])
    draws.add_writes(weights, f"{prefix}fc_out.weight", neurons, depth)
