"""In how many directions a set of states lies, and along which axes trajectories run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from loopinterp.core.errors import InputError, check_integer
from loopinterp.core.text import ShortRepr
from loopinterp.dynamics.measures import NOISE, check_finite, check_states
from loopinterp.dynamics.runs import chunks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxtyping import Float
    from torch import Tensor


def effective_rank(
    states: Float[Tensor, "*lead sample d_model"], *, centred: bool = True
) -> Float[Tensor, "*lead"]:
    r"""Effective rank :math:`\exp H(s / \sum s)` of the singular values of a set of states.

    Their number where all are equal, 1 where the states lie on a line, 0 where they are one point
    (up to rounding).

    Args:
        states: The set, its members along the axis before the last.
        centred: Take the mean of the set away first.

    Source: Roy and Vetterli (2007), The effective rank: a measure of effective dimensionality.

    Example:
        >>> effective_rank(torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])).round()
        tensor(2.)
    """
    return _rank(_singular_values(states, centred)).to(states.dtype)


def participation_ratio(
    states: Float[Tensor, "*lead sample d_model"], *, centred: bool = True
) -> Float[Tensor, "*lead"]:
    r"""Participation ratio :math:`(\sum s^2)^2 / \sum s^4` of the singular values of a set.

    That is :math:`(\sum \lambda)^2 / \sum \lambda^2` of the eigenvalues of the covariance: where
    few directions hold most of the variance it is lower than :func:`effective_rank`, which takes
    the same arguments.

    Source: Gao et al. (2017), A theory of multineuronal dimensionality, dynamics and measurement.

    Example:
        >>> participation_ratio(torch.tensor([[2.0, 0.0], [-2.0, 0.0], [0.0, 1.0], [0.0, -1.0]]))
        tensor(1.4706)
    """
    return _participation(_singular_values(states, centred)).to(states.dtype)


def _singular_values(states: Tensor, centred: bool) -> Tensor:
    if states.ndim < 2 or states.shape[-2] < 1 or not states.is_floating_point():
        raise InputError(
            "states",
            expected="a floating-point tensor [..., sample, feature] with at least one sample",
            given=f"shape {tuple(states.shape)}, {states.dtype}",
            fix="Flatten examples and positions into one axis.",
        )
    check_finite(states.reshape(-1, states.shape[-1]), "states")
    return StateMoments(states).singular_values(about_zero=not centred)


@dataclass(frozen=True, repr=False)
class PrincipalAxes(ShortRepr):
    """The directions in which trajectories spread most.

    Attributes:
        mean: Mean of all states, which projections are about.
        axes: Orthonormal rows, the widest direction first; the largest entry of each is positive.
        explained: Share of the variance along each.
    """

    mean: Float[Tensor, " d_model"]
    axes: Float[Tensor, "component d_model"]
    explained: Float[Tensor, " component"]

    def project(self, states: Float[Tensor, "*lead d_model"]) -> Float[Tensor, "*lead component"]:
        """Coordinates of states along the axes."""
        return (states - self.mean) @ self.axes.mT


def principal_axes(
    states: Float[Tensor, "loop *lead d_model"], n_components: int = 3
) -> PrincipalAxes:
    r"""Principal components of all states of some trajectories together.

    The right singular vectors of the centred states; a component's share is
    :math:`s_k^2 / \sum s^2`, 0 where the states are one point.

    Args:
        states: Trajectories, ``[loop, ..., d_model]``, finite.
        n_components: Axes wanted, at most as many as features, and as states.

    Example:
        >>> line = torch.arange(5.0)[:, None] * torch.tensor([3.0, 4.0])
        >>> principal = principal_axes(line, 1)
        >>> principal.axes, principal.explained
        (tensor([[0.6000, 0.8000]]), tensor([1.]))
    """
    check_states(states)
    rows = states.reshape(-1, states.shape[-1]).double()
    check_integer("n_components", n_components, least=1, most=min(rows.shape))
    mean = rows.mean(dim=0)  # [d_model]
    _, singular, axes = torch.linalg.svd(rows - mean, full_matrices=False)  # axes in rows
    # The component of largest modulus, made positive to fix each sign, [axis, 1]
    largest = axes.gather(1, axes.abs().argmax(dim=1, keepdim=True))
    axes = axes * torch.where(largest < 0, -1, 1)
    variance = singular**2
    total = variance.sum()
    explained = variance / torch.where(total > 0, total, 1)
    parts = (mean, axes[:n_components], explained[:n_components])
    return PrincipalAxes(*(x.to(states.dtype) for x in parts))


def _rank(singular: Float[Tensor, "*lead value"]) -> Float[Tensor, "*lead"]:
    """Effective rank; 0 where all singular values are 0."""
    total = singular.sum(dim=-1, keepdim=True)
    share = singular / torch.where(total > 0, total, 1)  # [*lead, value], sums to 1
    rank = torch.special.entr(share).sum(dim=-1).exp()
    return torch.where(total[..., 0] == 0, 0, rank)


def _participation(singular: Float[Tensor, "*lead value"]) -> Float[Tensor, "*lead"]:
    """Participation ratio; 0 where all singular values are 0."""
    largest = singular.amax(dim=-1, keepdim=True)
    # Over the largest, so that squares cannot overflow
    variance = (singular / torch.where(largest > 0, largest, 1)) ** 2
    squares = (variance**2).sum(dim=-1)
    return variance.sum(dim=-1) ** 2 / torch.where(squares == 0, 1, squares)


class StateMoments:
    """First and second moments of sets of states, to which more can be added.

    Sums are about a state near the mean: they lose no digits where all states are far from zero
    and near each other.

    Args:
        states: A first part of each set.
    """

    def __init__(self, states: Float[Tensor, "*lead sample d_model"]) -> None:
        self.origin = states.double().mean(dim=-2)
        self.eps = torch.finfo(states.dtype).eps
        self.count = 0
        self.total = torch.zeros_like(self.origin)  # [*lead, d_model]
        self.products = torch.zeros(*self.total.shape, states.shape[-1]).to(self.total)
        self.add(states)

    def add(self, states: Float[Tensor, "*lead sample d_model"]) -> None:
        """Count more states in."""
        n_sample, width = states.shape[-2:]
        total, products = self.total.view(-1, width), self.products.view(-1, width, width)
        flat = zip(states.reshape(-1, n_sample, width), self.origin.view(-1, width))
        # Set by set, [sample, d_model]: float64 of all at once takes many times the memory.
        for k, (part, origin) in enumerate(flat):
            about = part.double() - origin  # [sample, d_model]
            total[k] += about.sum(dim=0)
            products[k] += about.T @ about
        self.count += n_sample

    def singular_values(self, *, about_zero: bool = False) -> Float[Tensor, "*lead d_model"]:
        """Those of each set, about its mean; NaN where a state is not finite.

        Zeros where the spread is no larger than rounding errors of the states.
        """
        mean = self.total / self.count
        # Gram matrix of the states about their mean (or about zero), [*lead, d_model, d_model].
        gram = self.products - self.count * mean[..., :, None] * mean[..., None, :]
        if about_zero:
            middle = self.origin + mean
            gram += self.count * middle[..., :, None] * middle[..., None, :]
        known = gram.isfinite().all(dim=-1).all(dim=-1)  # [*lead]
        values = torch.linalg.eigvalsh(torch.where(known[..., None, None], gram, 0))  # ascending
        # Directions without any spread get no more than the rounding of the others.
        nothing = values <= values.shape[-1] * torch.finfo(values.dtype).eps * values[..., -1:]
        singular = values.masked_fill(nothing, 0).sqrt()
        if not about_zero:
            singular = singular.masked_fill((self.spread() == 0)[..., None], 0)
        return singular.masked_fill(~known[..., None], float("nan"))

    def spread(self) -> Float[Tensor, "*lead"]:
        """Root mean square distance from the mean over the root mean square norm; 0 by rounding."""
        mean = self.total / self.count
        # Mean square distance from the origin, [*lead]
        squares = self.products.diagonal(dim1=-2, dim2=-1).sum(dim=-1) / self.count
        variance = (squares - (mean**2).sum(dim=-1)).clamp_min(0)
        size = variance + ((self.origin + mean) ** 2).sum(dim=-1)
        spread = (variance / torch.where(size == 0, 1, size)).sqrt()
        return torch.where(spread <= NOISE * self.eps, 0, spread)


class StateSets:
    """Moments of sets of states by name, each one set or one for every loop."""

    def __init__(self) -> None:
        self.moments: dict[str, StateMoments] = {}

    def add(self, name: str, states: Float[Tensor, "*lead sample d_model"]) -> None:
        """Count states in; an empty batch makes no set."""
        if name in self.moments:
            self.moments[name].add(states)
        elif states.shape[-2]:
            self.moments[name] = StateMoments(states)

    def measures(
        self, loops: str, others: Sequence[str], generator: torch.Generator
    ) -> dict[str, Tensor]:
        """Dimensions of the sets of all loops, of others beside them, and of as many Gaussians."""
        arrays = _dimension(self.moments[loops])
        sets = [self.moments.get(name) for name in others]
        each = [_dimension(moments) for moments in sets]
        arrays |= {f"set_{name}": torch.stack([d[name] for d in each]) for name in arrays}
        counts = [0 if moments is None else moments.count for moments in sets]
        width = self.moments[loops].origin.shape[-1]
        draws = [_gaussian(count, width, generator) for count in counts]
        arrays |= {f"control_{name}": torch.stack([d[name] for d in draws]) for name in draws[0]}
        return {**arrays, "set_size": torch.tensor(counts)}


def _dimension(moments: StateMoments | None) -> dict[str, Tensor]:
    """Effective rank, participation ratio and spread; NaN where there is nothing."""
    if moments is None:
        return dict.fromkeys(("rank", "participation", "spread"), torch.tensor(float("nan")))
    singular = moments.singular_values()
    values = {"rank": _rank(singular), "participation": _participation(singular)}
    values["spread"] = moments.spread()
    return {name: value.float().cpu() for name, value in values.items()}


def _gaussian(count: int, width: int, generator: torch.Generator) -> dict[str, Tensor]:
    """The dimensions of as many Gaussian vectors, in four draws."""
    if not count:
        nothing = torch.full((4,), float("nan"), dtype=torch.float64)
        return {"rank": nothing, "participation": nothing}
    draws = []
    for _ in range(4):
        sets = StateSets()
        for rows in chunks(count, 8 * width):
            shape = rows.stop - rows.start, width
            sets.add("", torch.randn(shape, generator=generator, dtype=torch.float64))
        draws.append(_dimension(sets.moments[""]))
    return {name: torch.stack([d[name] for d in draws]) for name in ("rank", "participation")}
