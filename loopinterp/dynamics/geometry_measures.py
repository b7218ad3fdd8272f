"""In how many directions a set of states lies, and along which axes trajectories run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from loopinterp.dynamics.state_checks import check_finite, check_states
from loopinterp.dynamics.state_moments import StateMoments, participation_of, rank_of
from loopinterp.errors import InputError, check_integer
from loopinterp.short_repr import ShortRepr

if TYPE_CHECKING:
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

    Raises:
        InputError: If there is no state, or one is not finite.

    Source: Roy and Vetterli (2007), The effective rank: a measure of effective dimensionality.

    Example:
        >>> effective_rank(torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])).round()
        tensor(2.)
    """
    return rank_of(_singular_values(states, centred)).to(states.dtype)


def participation_ratio(
    states: Float[Tensor, "*lead sample d_model"], *, centred: bool = True
) -> Float[Tensor, "*lead"]:
    r"""Participation ratio :math:`(\sum s^2)^2 / \sum s^4` of the singular values of a set.

    That is :math:`(\sum \lambda)^2 / \sum \lambda^2` of the eigenvalues of the covariance: where
    few directions hold most of the variance it is lower than :func:`effective_rank`.

    Args:
        states: The set, its members along the axis before the last.
        centred: Take the mean of the set away first.

    Raises:
        InputError: If there is no state, or one is not finite.

    Source: Gao et al. (2017), A theory of multineuronal dimensionality, dynamics and measurement.

    Example:
        >>> participation_ratio(torch.tensor([[2.0, 0.0], [-2.0, 0.0], [0.0, 1.0], [0.0, -1.0]]))
        tensor(1.4706)
    """
    return participation_of(_singular_values(states, centred)).to(states.dtype)


def _singular_values(states: Tensor, centred: bool) -> Tensor:
    if states.ndim < 2 or states.shape[-2] < 1 or not states.is_floating_point():
        raise InputError(
            "states",
            expected="a floating-point tensor [..., sample, feature] with at least one sample",
            given=f"shape {tuple(states.shape)}, {states.dtype}",
            fix="Flatten examples and positions into one axis.",
        )
    check_finite(states.reshape(-1, states.shape[-1]), "states")
    moments = StateMoments.of(states)
    return moments.singular_values() if centred else moments.singular_values(about_zero=True)


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
        states: Trajectories, ``[loop, ..., d_model]``.
        n_components: Axes wanted, at most as many as features, and as states.

    Raises:
        InputError: If the states are too few or not finite, or too many axes are wanted.

    Example:
        >>> line = torch.arange(5.0)[:, None] * torch.tensor([3.0, 4.0])
        >>> found = principal_axes(line, 1)
        >>> found.axes, found.explained
        (tensor([[0.6000, 0.8000]]), tensor([1.]))
    """
    check_states(states)
    rows = states.reshape(-1, states.shape[-1]).double()
    check_integer("n_components", n_components, least=1, most=min(rows.shape))
    mean = rows.mean(dim=0)
    _, singular, axes = torch.linalg.svd(rows - mean, full_matrices=False)
    largest = axes.gather(1, axes.abs().argmax(dim=1, keepdim=True))
    axes = axes * torch.where(largest < 0, -1, 1)
    variance = singular**2
    total = variance.sum()
    explained = variance / torch.where(total > 0, total, 1)
    found = (mean, axes[:n_components], explained[:n_components])
    return PrincipalAxes(*(x.to(states.dtype) for x in found))
