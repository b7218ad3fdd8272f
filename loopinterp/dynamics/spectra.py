r"""Eigenvalues and singular values of the loop's Jacobian J and of I - J."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from pydantic import PositiveFloat, PositiveInt

from loopinterp.core.boundary import checked
from loopinterp.core.errors import check_integer
from loopinterp.core.settings import Seed
from loopinterp.core.text import ShortRepr
from loopinterp.dynamics.jacobian import JacobianOperator
from loopinterp.dynamics.krylov import CHECK_EVERY, Bidiagonal, KrylovSchur, golub_kahan
from loopinterp.dynamics.limits import map_and_limit

if TYPE_CHECKING:
    from jaxtyping import Bool, Complex, Float
    from torch import Tensor

    from loopinterp.dynamics.jacobian import Positions
    from loopinterp.models.protocol import LoopedModel


@dataclass(frozen=True, repr=False)
class Spectrum(ShortRepr):
    r"""Leading eigenvalue of each example's Jacobian, as in :class:`Eigenvalues`.

    A fixed point is locally stable if ``radius`` :math:`|\lambda|` is below 1. Before convergence
    it may be too low or, for a strongly non-normal Jacobian, too high.
    """

    radius: Float[Tensor, " batch"]
    eigenvalue: Complex[Tensor, " batch"]
    residual: Float[Tensor, " batch"]
    converged: Bool[Tensor, " batch"]


@dataclass(frozen=True, repr=False)
class Eigenvalues(ShortRepr):
    r"""Eigenvalues of largest modulus of each example's Jacobian, largest first.

    Attributes:
        residuals: :math:`\|Jv - \lambda v\| / |\lambda|` of the Ritz pair: the error of the
            eigenvalue over its condition number.
        vectors: Right eigenvectors of norm 1, shaped like states, if requested.
        n_products: Jacobian-vector products, one counting for all examples.
    """

    values: Complex[Tensor, "batch eigenvalue"]
    residuals: Float[Tensor, "batch eigenvalue"]
    converged: Bool[Tensor, "batch eigenvalue"]
    vectors: Complex[Tensor, "batch eigenvalue ..."] | None
    n_products: int

    @property
    def leading(self) -> Spectrum:
        value, residual = self.values[:, 0], self.residuals[:, 0]
        radius = value.abs().to(residual.dtype)
        return Spectrum(radius, value, residual, self.converged[:, 0])


@checked
def leading_eigenvalues(
    model: LoopedModel | Callable[[Tensor], Tensor] | Any,
    h: Tensor | Any,
    k: PositiveInt = 6,
    *,
    tol: PositiveFloat = 1e-3,
    max_vectors: PositiveInt = 60,
    max_products: PositiveInt = 300,
    positions: Positions | None = None,
    vectors: bool = False,
    seed: Seed = 0,
) -> Eigenvalues:
    """The k eigenvalues of largest modulus of each Jacobian, by restarted Arnoldi iteration.

    Under a causal mask J is block-triangular, and blocks at single ``positions`` converge much
    sooner.

    Args:
        model: A map, such as ``bind(model, inputs).step``, or a looped model.
        h: State of each example, best a fixed point. For a looped model, inputs or a batch: the
            state is their limit.
        tol: Relative residual at which an eigenvalue has converged.
        max_vectors: Largest Krylov space, in states.
        max_products: Most Jacobian-vector products.
        positions: Take the block of J from these positions to these positions: indices, or a mask
            ``[pos]`` or ``[batch, pos]``.

    Source: Stewart, SIAM J. Matrix Anal. 23 (2001).

    Example:
        >>> turn = torch.tensor([[0.0, -0.9, 0.0], [0.9, 0.0, 0.0], [0.0, 0.0, 0.5]])
        >>> leading = leading_eigenvalues(lambda h: h @ turn.T, torch.zeros(1, 3), k=3)
        >>> torch.view_as_real(leading.values).abs().mul(1000).round().div(1000)[0].tolist()
        [[0.0, 0.9], [0.0, 0.9], [0.5, 0.0]]
    """
    step, h = map_and_limit(model, h)
    operator = JacobianOperator(step, h, positions, n_values=k)
    check_integer("max_products", max_products, least=k)
    # A full space must hold k + 3 vectors to be restarted, unless it is never full.
    least = max(k, min(k + 3, int(operator.sizes.max()), max_products))
    check_integer("max_vectors", max_vectors, least=least)
    generator = torch.Generator().manual_seed(seed)
    start, pairs, n_products = operator.random_vector(generator), [], []
    for rows, part in operator.parts(max_vectors + 1):
        krylov = KrylovSchur(part, k, max_vectors, start=start[rows], generator=generator)
        n_converged = 0
        while part.n_products < max_products and not krylov.exhausted.all():
            krylov.grow()
            if part.n_products % CHECK_EVERY or (krylov.length < k).any():
                continue
            # Twice in a row, so that a smaller eigenvalue that appears first is not taken.
            n_converged = n_converged + 1 if (krylov.ritz().residuals <= tol).all() else 0
            if n_converged == 2:
                break
        pairs.append(krylov.ritz(vectors))
        n_products.append(part.n_products)
    residuals = torch.from_numpy(np.concatenate([part.residuals for part in pairs]))
    values = torch.from_numpy(np.concatenate([part.values for part in pairs]))
    ritz_vectors = [part.vectors for part in pairs if part.vectors is not None]
    return Eigenvalues(
        values=values.to(h.device),
        residuals=residuals.to(h),
        converged=(residuals <= tol).to(h.device),
        vectors=torch.cat(ritz_vectors).unflatten(2, h.shape[1:] or (1,)) if ritz_vectors else None,
        n_products=max(n_products),
    )


@checked
def spectral_radius(
    model: LoopedModel | Callable[[Tensor], Tensor] | Any,
    h: Tensor | Any,
    *,
    tol: PositiveFloat = 1e-3,
    max_vectors: PositiveInt = 100,
    positions: Positions | None = None,
    seed: Seed = 0,
) -> Spectrum:
    r"""Largest :math:`|\lambda|` of each Jacobian: :func:`leading_eigenvalues` without restarts.

    Source: Saad, Numerical Methods for Large Eigenvalue Problems, chapter 6.
    """
    options: dict[str, Any] = {"tol": tol, "positions": positions, "seed": seed}
    options |= {"max_vectors": max_vectors, "max_products": max_vectors}
    return leading_eigenvalues(model, h, 1, **options).leading


@checked
def cycle_multipliers(
    model: LoopedModel | Callable[[Tensor], Tensor] | Any,
    h: Tensor | Any,
    period: PositiveInt,
    k: int = 6,
    **options: Any,
) -> Eigenvalues:
    r"""Multipliers of a cycle: leading eigenvalues of the product of Jacobians along one turn.

    .. math:: M = J(h_{p-1}) \cdots J(h_1) J(h_0), \qquad h_{t+1} = \mathrm{step}(h_t)

    A cycle is locally stable if all are inside the unit circle.

    Args:
        model, h, k, options: As for :func:`leading_eigenvalues`, at any state of the cycle.
        period: Loops of one turn, the same for all examples.

    Example:
        >>> logistic = lambda x: 3.2 * x * (1 - x)  # 0.513 <-> 0.799; multiplier 4 + 2r - r²
        >>> at = torch.tensor([[0.5130445095326298]], dtype=torch.float64)
        >>> round(cycle_multipliers(logistic, at, period=2, k=1).values.real.item(), 4)
        0.16
    """
    step, h = map_and_limit(model, h)
    return leading_eigenvalues(turn_of(step, period), h, k, **options)


def turn_of(step: Callable[[Tensor], Tensor], n_times: int) -> Callable[[Tensor], Tensor]:
    def turn(h: Tensor) -> Tensor:
        for _ in range(n_times):
            h = step(h)
        return h

    return turn


@dataclass(frozen=True, repr=False)
class SingularValues(ShortRepr):
    r"""Largest singular values, from below, and :math:`\|J^\top u - \sigma v\| / \sigma`."""

    values: Float[Tensor, "batch singular"]
    residuals: Float[Tensor, "batch singular"]
    converged: Bool[Tensor, "batch singular"]
    n_products: int


@checked
def largest_singular_values(
    model: LoopedModel | Callable[[Tensor], Tensor] | Any,
    h: Tensor | Any,
    k: PositiveInt = 1,
    *,
    tol: PositiveFloat = 1e-3,
    max_vectors: PositiveInt = 60,
    positions: Positions | None = None,
    seed: Seed = 0,
) -> SingularValues:
    """The k largest singular values of each Jacobian, by Golub-Kahan bidiagonalisation.

    The first is the largest growth of a small perturbation in one loop. Arguments are those of
    :func:`leading_eigenvalues`; each vector costs two products and two states.

    Source: Golub and Kahan (1965).

    Example:
        >>> shear = torch.tensor([[0.5, 1.0], [0.0, 0.5]])
        >>> largest_singular_values(lambda h: h @ shear.T, torch.zeros(1, 2), k=2).values
        tensor([[1.2071, 0.2071]])
    """
    step, h = map_and_limit(model, h)
    check_integer("max_vectors", max_vectors, least=k)
    operator = JacobianOperator(step, h, positions, n_values=k)
    space = golub_kahan(operator, max_vectors=max_vectors, seed=seed)
    values, residuals, _ = _extremes(space, operator, range(k), k, tol)
    known = torch.from_numpy(residuals[:, :k] <= tol)
    return SingularValues(
        values=torch.from_numpy(values[:, :k]).to(h),
        residuals=torch.from_numpy(residuals[:, :k]).to(h),
        converged=known.to(h.device),
        n_products=operator.n_products,
    )


@dataclass(frozen=True, repr=False)
class FixedPointCondition(ShortRepr):
    """Condition of the equation h = step(h): largest over smallest singular value of :math:`I - J`.

    ``condition`` is a lower bound if these have not converged.
    """

    largest: Float[Tensor, " batch"]
    smallest: Float[Tensor, " batch"]
    condition: Float[Tensor, " batch"]
    largest_converged: Bool[Tensor, " batch"]
    smallest_converged: Bool[Tensor, " batch"]
    n_products: int

    @property
    def converged(self) -> Bool[Tensor, " batch"]:
        return self.largest_converged & self.smallest_converged


@checked
def fixed_point_condition(
    model: LoopedModel | Callable[[Tensor], Tensor] | Any,
    h: Tensor | Any,
    *,
    tol: PositiveFloat = 1e-2,
    max_vectors: PositiveInt = 120,
    positions: Positions | None = None,
    seed: Seed = 0,
) -> FixedPointCondition:
    r"""Largest and smallest singular value of :math:`I - J`, by Golub-Kahan bidiagonalisation.

    When the loop changes by a small :math:`\delta`, a fixed point moves by
    :math:`(I - J)^{-1} \delta`, at most :math:`\|\delta\| / \sigma_{\min}`. Before convergence the
    smallest value is an upper bound. Arguments are those of :func:`largest_singular_values`.

    Source: arXiv 2604.15259; Golub and Kahan (1965) for the method.

    Example:
        >>> diagonal = torch.tensor([0.5, -0.5, 0.9])
        >>> fixed_point_condition(lambda h: h * diagonal, torch.zeros(1, 3)).condition
        tensor([15.0000])
    """
    step, h = map_and_limit(model, h)
    operator = JacobianOperator(step, h, positions)
    identity_minus = golub_kahan(
        operator, lambda times: lambda v: v - times(v), max_vectors=max_vectors, seed=seed
    )
    values, residuals, complete = _extremes(identity_minus, operator, (0, 1), 1, tol)
    largest, smallest = torch.from_numpy(values).T  # [batch] each
    known = torch.from_numpy((residuals <= tol) | complete[:, None]).to(h.device)
    return FixedPointCondition(
        largest=largest.to(h),
        smallest=smallest.to(h),
        condition=(largest / smallest).where(largest != 0, torch.inf).to(h),  # 0 / 0 is singular
        largest_converged=known[:, 0],
        smallest_converged=known[:, 1],
        n_products=operator.n_products,
    )


def _extremes(
    spaces: Iterator[Bidiagonal],
    operator: JacobianOperator,
    which: Sequence[int],
    k: int,
    tol: float,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The k largest values and the smallest, residuals, completeness of the space."""
    n_converged = 0
    space: Bidiagonal | None = None
    for space in spaces:
        length = space.upper.shape[1]
        if length % CHECK_EVERY or length < k:
            continue
        residuals = space.extremes(k)[1][:, list(which)]
        # Twice in a row, so that a value that appears before its turn is not taken.
        n_converged = n_converged + 1 if (residuals <= tol).all() else 0
        if n_converged == 2:
            break
    assert space is not None  # at least one vector was made
    return *space.extremes(k), (space.lengths >= operator.sizes).numpy()
