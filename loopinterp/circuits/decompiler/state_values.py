"""The values that a position with a token can have: classes of states that behave alike."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from loopinterp.circuits.decompiler.behaviour import Behaviour, apart

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

_KEPT = 4
"""States kept of each value, to try each step with several."""


@dataclass(eq=False)
class TokenValues:
    """Values of one token, found so far.

    Attributes:
        behaviour: The token's contexts.
        tolerance: Two states are one value if they behave differently in no larger a share of the
            contexts.
        seen: Behaviour of the first state of each value, [value, context, answer].
        states: Some states of each value.
    """

    behaviour: Behaviour
    tolerance: float
    seen: list[Int[Tensor, "context answer"]] = field(default_factory=list)
    states: list[list[Float[Tensor, " d_model"]]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.states)

    def sort(
        self, states: Float[Tensor, "state d_model"], *, most: int | None = None
    ) -> Int[Tensor, " state"]:
        """The value of each state; one that behaves like none so far becomes a value of its own.

        Args:
            states: The states.
            most: With so many values, a new one is the nearest of these.
        """
        found = []
        for state, seen in zip(states, self.behaviour(states)):
            value, distance = self._nearest(seen)
            if distance > self.tolerance and (most is None or len(self) < most):
                value = len(self)
                self.seen.append(seen)
                self.states.append([])
            if len(self.states[value]) < _KEPT:
                self.states[value].append(state)
            found.append(value)
        return torch.tensor(found, dtype=torch.long)

    def state(self, value: int, turn: int) -> Float[Tensor, " d_model"]:
        """One of the states of a value, another each turn."""
        kept = self.states[value]
        return kept[turn % len(kept)]

    def _nearest(self, seen: Int[Tensor, "context answer"]) -> tuple[int, float]:
        if not self.seen:
            return -1, 2.0
        distances = apart(seen[None], torch.stack(self.seen))[0]
        value = int(distances.argmin())
        return value, float(distances[value])


def spread_out(states: Float[Tensor, "state d_model"], most: int) -> Float[Tensor, "few d_model"]:
    """Some of the states, each as far as can be from those before it (farthest-point sampling).

    Example:
        >>> spread_out(torch.tensor([[0.0], [0.1], [5.0], [5.0]]), 2).tolist()
        [[0.0], [5.0]]
    """
    chosen, left = [0], (states - states[0]).norm(dim=-1)
    while len(chosen) < most and float(left.max()) > 1e-4 * float(states.abs().max()):
        chosen.append(int(left.argmax()))
        left = torch.minimum(left, (states - states[chosen[-1]]).norm(dim=-1))
    return states[chosen]
