"""Running a looped model's map, in parts that fit in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch

from loopinterp.errors import MOST_LOOPS, check_integer
from loopinterp.models.looped_model import bind

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from loopinterp.models.looped_model import Iteration, LoopedModel
    from loopinterp.results import Result
    from loopinterp.tasks.task import Batch

CHUNK_BYTES = 64 * 2**20
"""Largest states tensor that a study holds at once; a study's working memory is a few of them."""


def run_loops(iteration: Iteration, n_loops: int) -> Float[Tensor, "loop batch pos d_model"]:
    """States ``h_0 .. h_T`` of the plain iteration, without gradients.

    Args:
        iteration: A model bound to its input.
        n_loops: ``T``, at least 1.

    Returns:
        ``T + 1`` states; entry ``t`` is the state after ``t`` loops.

    Raises:
        InputError: If ``n_loops`` is below 1, or the state before or after the first
            loop is not finite.
    """
    check_integer("n_loops", n_loops, least=1, far=MOST_LOOPS)
    with torch.no_grad():
        states = iteration.h0.new_empty(n_loops + 1, *iteration.h0.shape)
        for loop, h in iteration.run(n_loops, may_diverge=True):
            states[loop] = h
    return states


def state_bytes(model: LoopedModel, batch: Batch) -> int:
    """Bytes of one example's state."""
    h0 = bind(model, batch.inputs[:1]).h0
    return h0.numel() * h0.element_size()


def gather(kind: type[Result], parts: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Arrays of a kind of result, made of parts of a batch, put together along their batch axis."""
    every = list(parts)
    axis = {name: kind.VARIABLES[name].split().index("batch") for name in every[0]}
    return {name: torch.cat([part[name].cpu() for part in every], at) for name, at in axis.items()}


def chunks(n_examples: int, bytes_per_example: int) -> Iterator[slice]:
    """Slices over the batch whose examples take at most :data:`CHUNK_BYTES`.

    Example:
        >>> list(chunks(5, bytes_per_example=2**25))
        [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    size = max(1, CHUNK_BYTES // max(1, bytes_per_example))
    for first in range(0, n_examples, size):
        yield slice(first, min(first + size, n_examples))
