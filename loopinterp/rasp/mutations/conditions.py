"""When a mutation acts: always, at some tokens, or once natural runs have settled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from loopinterp.rasp.language import eq, indices, larger, tok_map, tokens, var
from loopinterp.rasp.mutations.rewriting import Condition

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor

    from loopinterp.rasp.program import LoopProgram

MOST_LISTED = 3
"""Tokens that a label lists."""


def at_tokens(program: LoopProgram, chosen: Sequence[int]) -> Condition:
    """Where the position's own token is one of those.

    Example:
        >>> from loopinterp.rasp import get_program
        >>> at_tokens(get_program("ripple"), [1, 3]).label
        'at a=1 b=0, a=1 b=1'
    """
    listed = ", ".join(program.inputs[token] for token in chosen[:MOST_LISTED])
    more = len(chosen) - MOST_LISTED
    label = f"at {listed}" + (f" and {more} more" if more > 0 else "")
    return Condition(label, tok_map(tokens, dict.fromkeys(chosen, 1), default=0, name="chosen"))


def once_settled(program: LoopProgram, lateness: int) -> Condition:
    """Position i from loop i + lateness on, by a countdown; see :func:`lateness`."""
    loops_left = program.unused_name("until_settled")
    return Condition(
        "once settled",
        eq(var(loops_left), 0),
        {loops_left: larger(indices + lateness, 0)},
        {loops_left: larger(var(loops_left) - 1, 0)},
    )


def lateness(program: LoopProgram, inputs: Int[Tensor, "batch pos"], *, n_loops: int) -> int:
    """By how many loops position i is settled later than at loop i, at most.

    Example:
        >>> import torch
        >>> from loopinterp.rasp import get_program
        >>> tokens = torch.tensor([[4, 3, 1, 2, 0]])
        >>> lateness(get_program("ripple"), tokens, n_loops=6)     # position 4 after 3 loops
        0
    """
    trace = program.trace(inputs, n_loops)
    positions = torch.arange(inputs.shape[1], device=inputs.device)
    return max(int((trace.settled(name) - positions).max()) for name in program.step)
