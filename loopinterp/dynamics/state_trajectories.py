"""Running a looped model's map, in parts that fit in memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from loopinterp.dynamics.state_checks import check_shape, check_state
from loopinterp.errors import check_integer

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from loopinterp.models.looped_model import Iteration

CHUNK_BYTES = 64 * 2**20
"""Largest states tensor that a study holds at once; a study's working memory is a few of them."""


def run_loops(
    iteration: Iteration, n_loops: int, *, start: Float[Tensor, "batch pos d_model"] | None = None
) -> Float[Tensor, "loop batch pos d_model"]:
    """States ``h_0 .. h_T`` of the plain iteration, without gradients.

    Args:
        iteration: A model bound to its input.
        n_loops: ``T``, at least 1.
        start: State to start from instead of ``iteration.h0``.

    Returns:
        ``T + 1`` states; entry ``t`` is the state after ``t`` loops.

    Raises:
        InputError: If ``n_loops`` is below 1, or if the starting state has the wrong shape or
            is not finite.
    """
    check_integer("n_loops", n_loops, least=1)
    h0 = iteration.h0 if start is None else start
    check_shape(h0, iteration.h0, "start", fix="Start from a state of the same batch and length.")
    check_state(h0, "initial state", fix="Check the model's weights and its input.")
    with torch.no_grad():
        states = h0.new_empty(n_loops + 1, *h0.shape)
        for loop, h in iteration.run(n_loops, state=h0):
            states[loop] = h
    return states


def chunks(n_examples: int, bytes_per_example: int, limit: int | None = None) -> Iterator[slice]:
    """Slices over the batch whose examples take at most ``limit`` bytes (:data:`CHUNK_BYTES`).

    Example:
        >>> list(chunks(5, bytes_per_example=40, limit=100))
        [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    size = max(1, (CHUNK_BYTES if limit is None else limit) // max(1, bytes_per_example))
    for first in range(0, n_examples, size):
        yield slice(first, min(first + size, n_examples))
