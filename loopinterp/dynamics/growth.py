"""How small disturbances grow: in one loop, over several, and along a trajectory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import torch
from einops import rearrange
from pydantic import Field, PositiveFloat, PositiveInt

from loopinterp.core.boundary import Loops, checked
from loopinterp.core.errors import MOST_LOOPS, check_integer
from loopinterp.core.settings import Seed
from loopinterp.core.text import ShortRepr
from loopinterp.dynamics.fixed_point import map_and_start
from loopinterp.dynamics.jacobian import JacobianOperator, push_forward
from loopinterp.dynamics.krylov import Bidiagonal, golub_kahan
from loopinterp.dynamics.limits import map_and_limit
from loopinterp.dynamics.spectra import largest_singular_values, leading_eigenvalues, turn_of

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from loopinterp.dynamics.jacobian import Positions
    from loopinterp.models.protocol import LoopedModel


@dataclass(frozen=True, repr=False)
class NonNormality(ShortRepr):
    r"""How far one loop's growth exceeds that of many loops, of each example.

    ``ratio`` is the largest singular value over the spectral radius: 1 for a normal Jacobian,
    infinite for a nilpotent one, NaN for J = 0.
    """

    ratio: Float[Tensor, " batch"]
    singular_value: Float[Tensor, " batch"]
    radius: Float[Tensor, " batch"]
    converged: Bool[Tensor, " batch"]


def non_normality(
    model: LoopedModel | Callable[[Tensor], Tensor] | Any,
    h: Tensor | Any,
    *,
    max_products: int = 300,
    **options: Any,
) -> NonNormality:
    r"""Largest singular value of each Jacobian over its spectral radius, :math:`\sigma_1 / \rho`.

    Args:
        model, h, max_products, options: As for :func:`leading_eigenvalues`.

    Example:
        >>> shear = torch.tensor([[0.5, 1.0], [0.0, 0.5]], dtype=torch.float64)
        >>> at = torch.zeros(1, 2, dtype=torch.float64)
        >>> non_normality(lambda h: h @ shear.T, at).ratio.item()
        2.414...
    """
    step, h = map_and_limit(model, h)
    spectrum = leading_eigenvalues(step, h, 1, max_products=max_products, **options).leading
    singular = largest_singular_values(step, h, 1, **options)
    value = singular.values[:, 0]
    known = singular.converged[:, 0] & spectrum.converged
    return NonNormality(value / spectrum.radius, value, spectrum.radius, known)


@dataclass(frozen=True, repr=False)
class TransientGrowth(ShortRepr):
    r"""Norms of the powers of each example's Jacobian.

    Attributes:
        norms: :math:`\|J^t\|` for t from 0 to as many loops as were looked at, from below.
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


@checked
def transient_growth(
    model: LoopedModel | Callable[[Tensor], Tensor] | Any,
    h: Tensor | Any,
    n_loops: PositiveInt = 16,
    *,
    tol: PositiveFloat = 1e-2,
    max_vectors: PositiveInt = 20,
    positions: Positions | None = None,
    seed: Seed = 0,
) -> TransientGrowth:
    r"""The largest transient growth :math:`\max_t \|J^t\|`, by products with powers of J.

    It looks at t = 0, 1, … until every example's norm is under 1, as then none can exceed what was
    seen (:math:`\|J^{s+t}\| \le \|J^s\| \|J^t\|`), and at most ``n_loops``. Each norm begins from
    the vector that the last power enlarged most.

    Args:
        model, h, positions, seed: As for :func:`largest_singular_values`.
        n_loops: Largest power.
        tol: Relative residual of a norm at which it has converged.
        max_vectors: Most vectors for one norm; each costs ``2 t`` products.

    Source: Trefethen and Embree, Spectra and Pseudospectra, chapter 16.

    Example:
        >>> shear = torch.tensor([[0.5, 4.0], [0.0, 0.5]], dtype=torch.float64)
        >>> growth = transient_growth(lambda h: h @ shear.T, torch.zeros(1, 2).double())
        >>> round(growth.largest.item(), 3), growth.at.item(), bool(growth.closed)
        (4.062, 1, True)
    """
    step, h = map_and_limit(model, h)
    operator = JacobianOperator(step, h, positions)
    norms = [torch.ones(len(h), dtype=torch.float64)]
    known = [torch.ones(len(h), dtype=torch.bool)]
    start = None
    for loop in range(1, n_loops + 1):
        power = partial(turn_of, n_times=loop)
        space: Bidiagonal | None = None
        for space in golub_kahan(operator, power, max_vectors=max_vectors, seed=seed, start=start):
            value, residual = space.extremes(1)
            if space.upper.shape[1] > 2 and (residual[:, 0] <= tol).all():
                break
        assert space is not None  # at least one vector was made
        norms.append(torch.from_numpy(value[:, 0]))  # norm of this power of the Jacobian, [batch]
        known.append(torch.from_numpy(residual[:, 0] <= tol))
        if (torch.stack(norms).amin(0) < 1).all():
            break
        # The next power may enlarge another direction most: some of every one goes in.
        noise = operator.random(torch.Generator().manual_seed(seed + loop))
        start = space.leading_right() + 0.1 * noise
        start = start / start.norm(dim=1, keepdim=True)
    every = torch.stack(norms)  # [loop, batch]
    largest, at = every.max(dim=0)
    return TransientGrowth(
        norms=every.to(h),
        converged=torch.stack(known).to(h.device),
        largest=largest.to(h),
        at=at.to(h.device),
        closed=(every.amin(0) < 1).to(h.device),
    )


@dataclass(frozen=True, repr=False)
class LyapunovExponents(ShortRepr):
    r"""Lyapunov exponents of each example's trajectory, largest first, in nats per loop.

    -inf where a disturbance is gone in one loop, NaN where the trajectory left the finite numbers.
    ``low`` and ``high`` are the 95% interval over blocks of loops, ``state`` is the last state.
    """

    values: Float[Tensor, "batch exponent"]
    low: Float[Tensor, "batch exponent"]
    high: Float[Tensor, "batch exponent"]
    state: Float[Tensor, "batch ..."]


@checked
def lyapunov_exponents(
    model: LoopedModel | Callable[[Tensor], Tensor] | Any,
    h: Tensor | Any,
    n_loops: Loops,
    k: PositiveInt = 1,
    *,
    discard: Annotated[int, Field(ge=0, le=MOST_LOOPS)] | None = None,
    n_blocks: Annotated[int, Field(ge=2)] = 8,
    seed: Seed = 0,
) -> LyapunovExponents:
    r"""The k largest Lyapunov exponents of the trajectory from a state, by the QR method.

    k tangent vectors are carried through the loops and made orthogonal after each,
    :math:`J(h_t) Q_t = Q_{t+1} R_{t+1}`; then

    .. math:: \lambda_i = \frac{1}{T} \sum_t \log |R_{t,ii}|

    At a fixed point it is :math:`\log |\lambda_i(J)|`, on a cycle the logarithm of its multiplier
    over its period; above 0, near trajectories part, as in chaos. The interval is that of a mean
    of ``n_blocks`` block means (Student's t): it holds the spread along this trajectory alone.

    Args:
        model: A map, such as ``bind(model, inputs).step``, or a looped model.
        h: State from which each trajectory starts.
        n_loops: Loops that are counted, at least one for each block.
        k: How many exponents; each costs a Jacobian-vector product a loop.
        discard: Loops made before, in which the state comes to its attractor, if it has one, and
            the tangents turn into their directions; a quarter of ``n_loops`` by default.

    Source: Benettin, Galgani, Giorgilli and Strelcyn, Meccanica 15 (1980).

    Example:
        >>> halve = lambda x: torch.stack([x[:, 0] / 2, x[:, 1] / 4], dim=1)
        >>> lyapunov_exponents(halve, torch.ones(1, 2), n_loops=40, k=2, discard=40).values.exp()
        tensor([[0.5000, 0.2500]])
    """
    from scipy.stats import t as student

    step, h = map_and_start(model, h)
    check_integer("n_loops", n_loops, least=n_blocks)
    discard = n_loops // 4 if discard is None else discard
    operator = JacobianOperator(step, h, n_values=k)
    generator = torch.Generator().manual_seed(seed)
    tangents, _ = _qr(torch.stack([operator.random(generator) for _ in range(k)], dim=-1))
    state, dead = operator.h, torch.zeros(len(h), dtype=torch.bool, device=h.device)
    total = torch.zeros(n_blocks, len(h), k, dtype=torch.float64, device=h.device)  # log growth
    loops = torch.zeros(n_blocks, dtype=torch.float32)
    for loop in range(discard + n_loops):
        # Images J q of the tangents, [batch, size, k]; QR makes them orthonormal again.
        each = rearrange(tangents, "batch size k -> k batch size")
        carried = [push_forward(step, state, tangent.reshape(state.shape)) for tangent in each]
        pushed = torch.stack([product.flatten(1) for _, product in carried], dim=-1)
        tangents, upper = _qr(pushed.reshape(tangents.shape))
        state = carried[0][0]
        lost = ~(state.flatten(1).isfinite().all(1) & tangents.flatten(1).isfinite().all(1))
        if lost.any():  # what has left the finite numbers stays at 0, and counts as NaN
            dead |= lost
            state = torch.where(of_each(dead, state), 0, state)
            tangents = torch.where(of_each(dead, tangents), 0, tangents)
        if loop >= discard:
            block = (loop - discard) * n_blocks // n_loops  # blocks of equal numbers of loops
            total[block] += upper.diagonal(dim1=1, dim2=2).abs().double().log()
            loops[block] += 1
    means = total / loops[:, None, None].to(total)  # [block, batch, k]
    value = total.sum(0) / n_loops
    # Half-width of the interval from blocks, [batch, k]
    half = float(student.ppf(0.975, n_blocks - 1)) * means.std(dim=0) / n_blocks**0.5
    half = torch.where(value.isfinite(), half, 0)
    ends = (value, value - half, value + half)
    ends = [torch.where(dead[:, None], float("nan"), end) for end in ends]
    return LyapunovExponents(*(end.to(h.dtype) for end in ends), state=state)


def _qr(columns: Tensor) -> tuple[Tensor, Tensor]:
    """Q in the columns' own type, R at least in float32: there is no QR of half precision."""
    q, r = torch.linalg.qr(columns.to(torch.promote_types(columns.dtype, torch.float32)))
    return q.to(columns.dtype), r


def of_each(flags: Bool[Tensor, " batch"], values: Tensor) -> Bool[Tensor, "batch ..."]:
    """One flag of each example, in a shape that broadcasts with its values."""
    return flags.reshape(-1, *[1] * (values.ndim - 1))
