"""Noise on the weights: how much a circuit, or a tool, can bear."""

from __future__ import annotations

import torch

from loopinterp.errors import check_number
from loopinterp.rasp.compiler.compiled import Compiled
from loopinterp.rasp.disguises.compiled_weights import generator, normal, rebuilt, weights_of

NOISE = "noise"
"""What the record of this disguise begins with."""


def add_noise(compiled: Compiled, *, relative: float, seed: int) -> Compiled:
    r"""Add Gaussian noise to every entry of every weight matrix. Not exact.

    .. math:: W' = W + \epsilon, \qquad \epsilon_{ij} \sim
        \mathcal{N}(0, \sigma^2), \quad \sigma = \text{relative} \cdot \mathrm{rms}(W)

    with the root mean square over all entries of the matrix, so that the noise is as large
    against the matrix in every basis: it does not matter whether a rotation comes before or
    after. Queries, keys and values count as three matrices; biases stay as they are.

    Args:
        compiled: The model and its circuit; it is not changed.
        relative: Size of the noise against that of each matrix; 0 changes nothing.
        seed: Seed of the noise.

    Raises:
        InputError: ``relative`` is negative or no finite number, or the seed no integer from 0 to
            2**63 - 1.

    Example:
        >>> from loopinterp.rasp import add_noise, compile_program
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
