"""Which limits are one and the same, and what is read of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from loopinterp.dynamics.limits import Limits, around
from loopinterp.dynamics.readouts import correctness, exact_match, likeliest

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from loopinterp.models.looped_model import Iteration

NO_LIMIT = -1
"""Number of a run that found no limit."""

ZERO = 1e-4
"""Norm below which a limit is at 0 and has no size to compare with: searches end at 1e-8 there."""


@torch.no_grad()
def limits_apart(
    ends: Limits, others: Limits, iteration: Iteration, counted: Bool[Tensor, "batch pos"]
) -> tuple[Float[Tensor, " batch"], Float[Tensor, " batch"]]:
    """Distance over the norm, and cosine, of each limit and another one; NaN where one is none.

    Two cycles are compared where they are nearest: what the loop makes of two states that are
    near each other stays so.

    Args:
        ends: Limits; of a cycle, one of its states counts.
        others: Those they are compared with, all around their cycles; the norm is theirs.
        iteration: The model bound to the inputs of ``others``.
        counted: Positions that are compared.
    """

    def seen(state: Tensor) -> Tensor:
        return torch.where(counted[..., None], state, 0).flatten(1)

    here = seen(ends.state)
    distance = torch.full_like(here[:, 0], float("inf"))
    alignment = torch.full_like(distance, float("nan"))
    for state in around(iteration, others):
        there = seen(state)
        gap = (here - there).norm(dim=-1) / there.norm(dim=-1).clamp_min(ZERO)
        alignment = torch.where(
            gap < distance, torch.cosine_similarity(here, there, dim=-1), alignment
        )
        distance = torch.minimum(gap, distance)
    unknown, nothing = ~(ends.found & others.found), float("nan")
    return distance.masked_fill(unknown, nothing), alignment.masked_fill(unknown, nothing)


@torch.no_grad()
def answered_right(
    iteration: Iteration, ends: Limits, targets: Int[Tensor, "batch pos"], loop: int
) -> Bool[Tensor, " batch"]:
    """Whether the whole answer is right in each state reached; on a cycle, all around it."""
    right = [
        exact_match(correctness(likeliest(iteration.read(state, loop)), targets)).bool()
        for state in around(iteration, ends)
    ]
    return torch.stack(right).all(dim=0)


@dataclass
class DistinctLimits:
    """Numbers the limits of each example as they come: 0 is the first, the next far from it is 1.

    A limit is compared with the first of each number, in their order, and takes the number of the
    first one that is near enough; so no limit is further from its own first one than ``same``, and
    no two first ones are nearer.

    Attributes:
        iteration: The model bound to the inputs of the examples.
        counted: Positions that are compared.
        same: Distance over the norm up to which two limits are one.
        firsts: For each number, the first limit of each example that has it.
    """

    iteration: Iteration
    counted: Bool[Tensor, "batch pos"]
    same: float
    firsts: list[Limits] = field(default_factory=list)

    def number(self, ends: Limits, example: Int[Tensor, " row"]) -> Int[Tensor, " row"]:
        """The numbers of some limits, each of the example given; :data:`NO_LIMIT` of none."""
        numbers = torch.full_like(ends.status, NO_LIMIT)
        k = 0
        while (left := (ends.found & (numbers == NO_LIMIT)).nonzero().flatten()).numel():
            if k == len(self.firsts):
                self.firsts.append(Limits.none_like(self.iteration.h0))
            of, first = example[left], self.firsts[k]
            # Of each example without a limit of that number, the first row that is left.
            row = torch.full_like(first.status, len(numbers))
            row.scatter_reduce_(0, of, left, "amin")
            new = (~first.found & (row < len(numbers))).nonzero().flatten()
            first.put(new, ends.select(row[new]))
            known = self.iteration.select(of), self.counted[of]
            near = limits_apart(ends.select(left), first.select(of), *known)[0] <= self.same
            numbers[left[near]] = k
            k += 1
        return numbers

    def count(self) -> Int[Tensor, " batch"]:
        """How many limits each example has so far."""
        found = [first.found for first in self.firsts]
        none = torch.zeros(len(self.counted), dtype=torch.int64, device=self.counted.device)
        return torch.stack(found).sum(dim=0) if found else none
