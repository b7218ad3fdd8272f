r"""Non-normality of the loop's Jacobian J, and how far a disturbance grows before it dies out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from loopinterp.dynamics.eigenvalues import leading_eigenvalues
from loopinterp.dynamics.jacobian import JacobianOperator
from loopinterp.dynamics.krylov import Bidiagonal, golub_kahan
from loopinterp.dynamics.limits import map_and_limit
from loopinterp.dynamics.singular_values import largest_singular_values
from loopinterp.errors import check_integer, check_number
from loopinterp.short_repr import ShortRepr

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from loopinterp.dynamics.jacobian import Positions
    from loopinterp.models.looped_model import LoopedModel


@dataclass(frozen=True, repr=False)
class NonNormality(ShortRepr):
    r"""How far one loop's growth exceeds that of many loops, of each example.

    Attributes:
        ratio: Largest singular value over spectral radius; 1 for a normal Jacobian, infinite for
            a nilpotent one, NaN for none at all (J = 0).
        singular_value: :math:`\sigma_1`.
        radius: :math:`\rho`.
        converged: Whether both are known to the tolerance.
    """

    ratio: Float[Tensor, " batch"]
    singular_value: Float[Tensor, " batch"]
    radius: Float[Tensor, " batch"]
    converged: Bool[Tensor, " batch"]


def non_normality(
    model: LoopedModel | Callable[[Tensor], Tensor] | Any,
    h: Tensor | Any,
    *,
    tol: float = 1e-3,
    max_vectors: int = 60,
    max_products: int = 300,
    positions: Positions | None = None,
    seed: int = 0,
) -> NonNormality:
    r"""Largest singular value of each Jacobian over its spectral radius, :math:`\sigma_1 / \rho`.

    Args:
        model: A map, such as ``bind(model, inputs).step``. Or a looped model.
        h: State of each example.
            Of a looped model, its inputs or a batch; the state is then the
            limit that its own loops reach.
        tol: As for :func:`leading_eigenvalues` and :func:`largest_singular_values`, like the rest.
        max_vectors: Most vectors held.
        max_products: Most products for the radius.
        positions: Restrict J to the block of these positions.
        seed: Seed of the starting vectors.

    Raises:
        InputError: As :func:`leading_eigenvalues`.

    Example:
        >>> shear = torch.tensor([[0.5, 1.0], [0.0, 0.5]], dtype=torch.float64)
        >>> at = torch.zeros(1, 2, dtype=torch.float64)
        >>> non_normality(lambda h: h @ shear.T, at).ratio.item()
        2.414...
    """
    step, h = map_and_limit(model, h)
    options = {"tol": tol, "max_vectors": max_vectors, "positions": positions, "seed": seed}
    spectrum = leading_eigenvalues(step, h, 1, max_products=max_products, **options).leading
    singular = largest_singular_values(step, h, 1, **options)
    value = singular.values[:, 0]
    return NonNormality(
        ratio=value / spectrum.radius,
        singular_value=value,
        radius=spectrum.radius,
        converged=singular.converged[:, 0] & spectrum.converged,
    )


@dataclass(frozen=True, repr=False)
class TransientGrowth(ShortRepr):
    r"""Norms of the powers of each example's Jacobian.

    Attributes:
        norms: :math:`\|J^t\|` for t from 0 to as many loops as were looked at, from below.
        converged: Whether it is known to the tolerance, [loop, batch].
        largest: The most that a small disturbance grows before it dies out, :math:`\max_t \|J^t\|`.
        at: Loop t at which it does.
        closed: Whether :math:`\|J^t\| < 1` for some t that was looked at: then no later power
            exceeds ``largest``. Elsewhere it may be exceeded later.
    """

    norms: Float[Tensor, "loop batch"]
    converged: Bool[Tensor, "loop batch"]
    largest: Float[Tensor, " batch"]
    at: Int[Tensor, " batch"]
    closed: Bool[Tensor, " batch"]


def transient_growth(
    model: LoopedModel | Callable[[Tensor], Tensor] | Any,
    h: Tensor | Any,
    n_loops: int = 16,
    *,
    tol: float = 1e-2,
    max_vectors: int = 20,
    positions: Positions | None = None,
    seed: int = 0,
) -> TransientGrowth:
    r"""The largest transient growth :math:`\max_t \|J^t\|`, by products with powers of J.

    It looks at t = 0, 1, … until every example's norm is under 1, as then none can exceed what was
    seen (:math:`\|J^{s+t}\| \le \|J^s\| \|J^t\|`), and at most ``n_loops``. Each norm begins from
    the vector that the last power enlarged most.

    Args:
        model: A map, such as ``bind(model, inputs).step``. Or a looped model.
        h: State of each example, best a fixed point, where J stays what it is.
            Of a looped model, its inputs or a batch; the state is then the
            limit that its own loops reach.
        n_loops: Largest power.
        tol: Relative residual of a norm at which it has converged.
        max_vectors: Most vectors for one norm; each costs ``2 t`` products.
        positions: Restrict J to the block of these positions.
        seed: Seed of the starting vectors.

    Raises:
        InputError: As :func:`largest_singular_values`, or ``n_loops`` is below 1.

    Source: Trefethen and Embree, Spectra and Pseudospectra, chapter 16.

    Example:
        >>> shear = torch.tensor([[0.5, 4.0], [0.0, 0.5]], dtype=torch.float64)
        >>> found = transient_growth(lambda h: h @ shear.T, torch.zeros(1, 2).double())
        >>> round(found.largest.item(), 3), found.at.item(), bool(found.closed)
        (4.062, 1, True)
    """
    step, h = map_and_limit(model, h)
    check_integer("n_loops", n_loops, least=1)
    check_integer("max_vectors", max_vectors, least=1)
    check_number("tol", tol, above=0)
    operator = JacobianOperator(step, h, positions)
    norms = [torch.ones(len(h), dtype=torch.float64)]
    known = [torch.ones(len(h), dtype=torch.bool)]
    start = None
    for loop in range(1, n_loops + 1):
        power = golub_kahan(
            operator,
            _power(operator.apply, loop),
            _power(operator.apply_transposed, loop),
            max_vectors=max_vectors,
            seed=seed,
            start=start,
        )
        found: Bidiagonal | None = None
        for found in power:
            value, residual = found.extremes(1)
            if found.upper.shape[1] > 2 and (residual[:, 0] <= tol).all():
                break
        assert found is not None
        norms.append(torch.from_numpy(value[:, 0]))
        known.append(torch.from_numpy(residual[:, 0] <= tol))
        start = _blended(operator, found.leading_right(), seed + loop)
        if (torch.stack(norms).amin(0) < 1).all():
            break
    every = torch.stack(norms)
    largest, at = every.max(dim=0)
    return TransientGrowth(
        norms=every.to(h),
        converged=torch.stack(known).to(h.device),
        largest=largest.to(h),
        at=at.to(h.device),
        closed=(every.amin(0) < 1).to(h.device),
    )


def _power(product: Callable[[Tensor], Tensor], times: int) -> Callable[[Tensor], Tensor]:
    def powered(v: Tensor) -> Tensor:
        for _ in range(times):
            v = product(v)
        return v

    return powered


def _blended(operator: JacobianOperator, vector: Tensor, seed: int) -> Tensor:
    """A vector to go on from, with some of every direction: the next may lie in another one."""
    noise = operator.random(torch.Generator().manual_seed(seed))
    mixed = vector + 0.1 * noise
    return mixed / mixed.norm(dim=1, keepdim=True)
