r"""Singular values of the loop's Jacobian J, and of I - J."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from loopinterp.dynamics.jacobian import JacobianOperator
from loopinterp.dynamics.krylov import CHECK_EVERY, Bidiagonal, golub_kahan
from loopinterp.dynamics.limits import map_and_limit
from loopinterp.errors import check_integer, check_number
from loopinterp.short_repr import ShortRepr

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

    from loopinterp.dynamics.jacobian import Positions
    from loopinterp.models.looped_model import LoopedModel


@dataclass(frozen=True, repr=False)
class SingularValues(ShortRepr):
    r"""Largest singular values of each example's Jacobian, largest first.

    Attributes:
        values: :math:`\sigma`, from below: none is above the one it stands for.
        residuals: :math:`\|J^\top u - \sigma v\| / \sigma`.
        converged: Whether the residual is under the tolerance.
        n_products: Products made, with J and with its transpose.
    """

    values: Float[Tensor, "batch singular"]
    residuals: Float[Tensor, "batch singular"]
    converged: Bool[Tensor, "batch singular"]
    n_products: int


def largest_singular_values(
    model: LoopedModel | Callable[[Tensor], Tensor] | Any,
    h: Tensor | Any,
    k: int = 1,
    *,
    tol: float = 1e-3,
    max_vectors: int = 60,
    positions: Positions | None = None,
    seed: int = 0,
) -> SingularValues:
    r"""The k largest singular values of each Jacobian, by Golub-Kahan bidiagonalisation.

    The first is the most that one loop can enlarge a small disturbance. It uses products with J
    and its transpose alone, with full reorthogonalisation on both sides.

    Args:
        model: A map, such as ``bind(model, inputs).step``. Or a looped model.
        h: State of each example.
            Of a looped model, its inputs or a batch; the state is then the
            limit that its own loops reach.
        k: How many.
        tol: Relative residual at which a value has converged.
        max_vectors: Most vectors on either side; each costs two products and two states of memory.
        positions: Restrict J to the block from these positions to these positions: indices, or a
            mask ``[pos]`` or ``[batch, pos]``.
        seed: Seed of the starting vectors.

    Raises:
        InputError: If the state is empty or not finite, there are fewer than k values, a position
            is not there, or an option is out of range.

    Source: Golub and Kahan, SIAM J. Numer. Anal. 2 (1965).

    Example:
        >>> shear = torch.tensor([[0.5, 1.0], [0.0, 0.5]])
        >>> largest_singular_values(lambda h: h @ shear.T, torch.zeros(1, 2), k=2).values
        tensor([[1.2071, 0.2071]])
    """
    step, h = map_and_limit(model, h)
    check_number("tol", tol, above=0)
    check_integer("max_vectors", max_vectors, least=k)
    operator = JacobianOperator.of(step, h, positions, least=k)
    values, residuals, _ = _extremes(
        operator, operator.apply, operator.apply_transposed, range(k), k, tol, max_vectors, seed
    )
    known = torch.from_numpy(residuals[:, :k] <= tol)
    return SingularValues(
        values=torch.from_numpy(values[:, :k]).to(h),
        residuals=torch.from_numpy(residuals[:, :k]).to(h),
        converged=known.to(h.device),
        n_products=operator.n_products,
    )


@dataclass(frozen=True, repr=False)
class FixedPointCondition(ShortRepr):
    r"""How well the equation h = step(h) determines its solution, of each example.

    Attributes:
        largest: Largest singular value of :math:`I - J`, from below.
        smallest: The smallest one. Where it has not converged it is an upper bound.
        condition: Their ratio: the condition number of :math:`I - J`; else a lower bound of it.
        largest_converged: Whether the largest value is known to the tolerance.
        smallest_converged: Whether the smallest one is.
        n_products: Products made, with J and with its transpose.
    """

    largest: Float[Tensor, " batch"]
    smallest: Float[Tensor, " batch"]
    condition: Float[Tensor, " batch"]
    largest_converged: Bool[Tensor, " batch"]
    smallest_converged: Bool[Tensor, " batch"]
    n_products: int

    @property
    def converged(self) -> Bool[Tensor, " batch"]:
        """Whether the condition number is known; elsewhere it is a lower bound."""
        return self.largest_converged & self.smallest_converged


def fixed_point_condition(
    model: LoopedModel | Callable[[Tensor], Tensor] | Any,
    h: Tensor | Any,
    *,
    tol: float = 1e-2,
    max_vectors: int = 120,
    positions: Positions | None = None,
    seed: int = 0,
) -> FixedPointCondition:
    r"""Largest and smallest singular value of :math:`I - J`, by Golub-Kahan bidiagonalisation.

    A fixed point moves by :math:`(I - J)^{-1} \delta` when the loop is changed by a small
    :math:`\delta`: by as much as :math:`1 / \sigma_{\min}` for each unit. A space of fixed points
    has :math:`\sigma_{\min} = 0`. Over a growing space the smallest value falls towards the true
    one, so before it has converged it is an upper bound, and the condition a lower one.

    Args:
        model: A map, such as ``bind(model, inputs).step``. Or a looped model.
        h: State of each example, best a fixed point.
            Of a looped model, its inputs or a batch; the state is then the
            limit that its own loops reach.
        tol: Relative residual at which a value has converged.
        max_vectors: Most vectors on either side; each costs two products and two states of memory.
        positions: Restrict I - J to the block of these positions.
        seed: Seed of the starting vectors.

    Raises:
        InputError: As :func:`largest_singular_values`.

    Source: the geometry axis of arXiv 2604.15259; Golub and Kahan (1965) for the method.

    Example:
        >>> diagonal = torch.tensor([0.5, -0.5, 0.9])
        >>> fixed_point_condition(lambda h: h * diagonal, torch.zeros(1, 3)).condition
        tensor([15.0000])
    """
    step, h = map_and_limit(model, h)
    check_number("tol", tol, above=0)
    check_integer("max_vectors", max_vectors, least=1)
    operator = JacobianOperator(step, h, positions)
    values, residuals, whole = _extremes(
        operator,
        lambda v: v - operator.apply(v),
        lambda u: u - operator.apply_transposed(u),
        (0, 1),
        1,
        tol,
        max_vectors,
        seed,
    )
    largest, smallest = torch.from_numpy(values).T
    known = torch.from_numpy((residuals <= tol) | whole[:, None]).to(h.device)
    return FixedPointCondition(
        largest=largest.to(h),
        smallest=smallest.to(h),
        condition=(largest / smallest).to(h),
        largest_converged=known[:, 0],
        smallest_converged=known[:, 1],
        n_products=operator.n_products,
    )


def _extremes(
    operator: JacobianOperator,
    forward: Callable[[Tensor], Tensor],
    backward: Callable[[Tensor], Tensor],
    wanted: range | tuple[int, ...],
    k: int,
    tol: float,
    max_vectors: int,
    seed: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The k largest values and the smallest, residuals, and whether the space is the whole one."""
    settled = 0
    found: Bidiagonal | None = None
    for found in golub_kahan(operator, forward, backward, max_vectors=max_vectors, seed=seed):
        length = found.upper.shape[1]
        if length % CHECK_EVERY or length < k:
            continue
        residuals = found.extremes(k)[1][:, list(wanted)]
        # Twice in a row, so that a value that appears before its turn is not taken.
        settled = settled + 1 if (residuals <= tol).all() else 0
        if settled == 2:
            break
    assert found is not None  # at least one vector was made
    return *found.extremes(k), (found.lengths >= operator.sizes).numpy()
