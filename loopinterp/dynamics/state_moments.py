"""Sets of states of which only the second moments are kept, and in how many directions they lie."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from loopinterp.dynamics.measures import NOISE
from loopinterp.dynamics.state_trajectories import chunks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxtyping import Float
    from torch import Tensor

N_DRAWS = 4
"""Draws of the Gaussian control."""

MEASURES = ("rank", "participation", "spread")


def rank_of(singular: Float[Tensor, "*lead value"]) -> Float[Tensor, "*lead"]:
    """Effective rank of some singular values; 0 where all are 0."""
    total = singular.sum(dim=-1, keepdim=True)
    share = singular / torch.where(total > 0, total, 1)
    rank = torch.special.entr(share).sum(dim=-1).exp()
    return torch.where(total[..., 0] == 0, 0, rank)


def participation_of(singular: Float[Tensor, "*lead value"]) -> Float[Tensor, "*lead"]:
    """Participation ratio of some singular values; 0 where all are 0."""
    largest = singular.amax(dim=-1, keepdim=True)
    variance = (singular / torch.where(largest > 0, largest, 1)) ** 2
    squares = (variance**2).sum(dim=-1)
    return variance.sum(dim=-1) ** 2 / torch.where(squares == 0, 1, squares)


@dataclass
class StateMoments:
    """What is kept of sets of states, to which more can be added: ``[*lead, d, d]`` however many.

    Attributes:
        origin: A state near the mean, which sums are about: they lose no digits where all states
            are far from zero and near each other.
        count: States in each set.
        total: Their sum.
        products: Sum of their outer products.
        eps: Rounding error of their numbers.
    """

    origin: Tensor
    count: int
    total: Tensor
    products: Tensor
    eps: float

    @classmethod
    def of(cls, states: Float[Tensor, "*lead sample d_model"]) -> StateMoments:
        """The moments of a first part of each set."""
        origin = states.double().mean(dim=-2)
        moments = cls(
            origin=origin,
            count=0,
            total=torch.zeros_like(origin),
            products=torch.zeros(*origin.shape, origin.shape[-1]).to(origin),
            eps=torch.finfo(states.dtype).eps,
        )
        moments.add(states)
        return moments

    def add(self, states: Float[Tensor, "*lead sample d_model"]) -> None:
        """Count more states in."""
        lead = states.shape[:-2]
        flat = (states.reshape(-1, *states.shape[-2:]), self.origin.reshape(-1, states.shape[-1]))
        total, products = (
            x.reshape(-1, *x.shape[len(lead) :]) for x in (self.total, self.products)
        )
        # Set by set: in float64 all of them at once would be many times what is kept.
        for k, (part, origin) in enumerate(zip(*flat)):
            about = part.double() - origin
            total[k] += about.sum(dim=0)
            products[k] += about.T @ about
        self.count += states.shape[-2]

    def singular_values(self, *, about_zero: bool = False) -> Float[Tensor, "*lead d_model"]:
        """Those of each set, about its mean; NaN where a state is not finite.

        Zeros where the spread is no larger than rounding errors of the states.
        """
        mean = self.total / self.count
        gram = self.products - self.count * mean[..., :, None] * mean[..., None, :]
        if about_zero:
            middle = self.origin + mean
            gram += self.count * middle[..., :, None] * middle[..., None, :]
        known = gram.isfinite().all(dim=-1).all(dim=-1)
        values = torch.linalg.eigvalsh(torch.where(known[..., None, None], gram, 0))
        # Directions without any spread get no more than the rounding of the others.
        nothing = values <= values.shape[-1] * torch.finfo(values.dtype).eps * values[..., -1:]
        found = values.masked_fill(nothing, 0).sqrt()
        if not about_zero:
            found = found.masked_fill((self.spread() == 0)[..., None], 0)
        return found.masked_fill(~known[..., None], float("nan"))

    def spread(self) -> Float[Tensor, "*lead"]:
        """Root mean square distance from the mean over the root mean square norm; 0 by rounding."""
        mean = self.total / self.count
        squares = self.products.diagonal(dim1=-2, dim2=-1).sum(dim=-1) / self.count
        variance = (squares - (mean**2).sum(dim=-1)).clamp_min(0)
        size = variance + ((self.origin + mean) ** 2).sum(dim=-1)
        spread = (variance / torch.where(size == 0, 1, size)).sqrt()
        return torch.where(spread <= NOISE * self.eps, 0, spread)


@dataclass
class StateSets:
    """Sets of states by name, each one set or one for every loop, to which states are added."""

    moments: dict[str, StateMoments] = field(default_factory=dict)

    def add(self, name: str, states: Float[Tensor, "*lead sample d_model"]) -> None:
        """Count states in; none at all make no set."""
        if name in self.moments:
            self.moments[name].add(states)
        elif states.shape[-2]:
            self.moments[name] = StateMoments.of(states)

    def measures(
        self, loops: str, others: Sequence[str], generator: torch.Generator
    ) -> dict[str, Tensor]:
        """Dimensions of the sets of all loops, of others beside them, and of as many Gaussians."""
        found = [self.moments.get(name) for name in others]
        arrays = dict(zip(MEASURES, _dimension(self.moments[loops])))
        beside = [_dimension(moments) for moments in found]
        controls = [_gaussian(moments, generator) for moments in found]
        arrays |= {f"set_{m}": torch.stack(v) for m, v in zip(MEASURES, zip(*beside))}
        arrays |= {f"control_{m}": torch.stack(v) for m, v in zip(MEASURES, zip(*controls))}
        sizes = [0 if moments is None else moments.count for moments in found]
        return {**arrays, "set_size": torch.tensor(sizes)}


def _dimension(moments: StateMoments | None) -> tuple[Tensor, Tensor, Tensor]:
    """Effective rank, participation ratio and spread; NaN where there is nothing."""
    if moments is None:
        nothing = torch.tensor(float("nan"))
        return nothing, nothing, nothing
    singular = moments.singular_values()
    rank, participation = rank_of(singular), participation_of(singular)
    return rank.float().cpu(), participation.float().cpu(), moments.spread().float().cpu()


def _gaussian(like: StateMoments | None, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The dimensions of as many Gaussian vectors, [draw]."""
    if like is None:
        nothing = torch.full((N_DRAWS,), float("nan"), dtype=torch.float64)
        return nothing, nothing
    width = like.origin.shape[-1]
    found = []
    for _ in range(N_DRAWS):
        sets = StateSets()
        for rows in chunks(like.count, 8 * width):
            shape = rows.stop - rows.start, width
            sets.add("", torch.randn(shape, generator=generator, dtype=torch.float64))
        found.append(_dimension(sets.moments[""])[:2])
    rank, participation = (torch.stack(values) for values in zip(*found))
    return rank, participation
