"""A random rotation of the residual stream: nothing stands along a coordinate any more."""

from __future__ import annotations

from loopinterp.rasp.compiler.compiled import Compiled
from loopinterp.rasp.disguises.compiled_weights import (
    generator,
    moved,
    random_rotation,
    rebuilt,
    weights_of,
)


def rotate(compiled: Compiled, *, seed: int) -> Compiled:
    r"""Turn the residual stream by a random orthogonal matrix Q.

    h' = Q h. Every weight that reads the stream is multiplied by :math:`Q^\top` from the right,
    every weight that writes it by Q from the left, those of the recall by both. Exact up to the
    rounding of the stored weights.

    Args:
        compiled: The model and its circuit; it is not changed.
        seed: Seed of Q.

    Raises:
        InputError: the seed is no integer from 0 to 2**63 - 1.

    Example:
        >>> import torch
        >>> from loopinterp.rasp import compile_program, rotate
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
