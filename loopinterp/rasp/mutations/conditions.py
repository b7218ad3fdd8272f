"""When a mutation acts: always, at some tokens, or once natural runs have settled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from loopinterp.rasp.expr import Seq
from loopinterp.rasp.language import eq, indices, larger, tok_map, tokens, var, where
from loopinterp.rasp.mutations.rewriting import fresh

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor

    from loopinterp.rasp.program import LoopProgram

MOST_LISTED = 3
"""Tokens that a label lists."""


@dataclass(frozen=True)
class Condition:
    """A condition on positions and loops, with the variables it needs.

    Attributes:
        label: How the name of a mutation says it; empty for the one that always holds.
        holds: 1 where it holds; None if it always does.
        prepare: Variables it needs, before the first loop.
        step: The same, after a loop.
    """

    label: str = ""
    holds: Seq | None = None
    prepare: Mapping[str, Seq] = field(default_factory=dict)
    step: Mapping[str, Seq] = field(default_factory=dict)

    def choose(self, inside: Seq, outside: Seq) -> Seq:
        """One expression where the condition holds, the other elsewhere."""
        return inside if self.holds is None else where(self.holds, inside, outside)

    def __and__(self, other: Condition) -> Condition:
        parts = [x for x in (self.holds, other.holds) if x is not None]
        return Condition(
            " ".join(filter(None, (self.label, other.label))),
            None if not parts else parts[0] if len(parts) == 1 else parts[0] & parts[1],
            {**self.prepare, **other.prepare},
            {**self.step, **other.step},
        )


ALWAYS = Condition()


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
    loops_left = fresh(program, "until_settled")
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
