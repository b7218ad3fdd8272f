r"""Lyapunov exponents: the mean growth of small disturbances along a trajectory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from einops import rearrange

from loopinterp.dynamics.jacobian import JacobianOperator, push_forward
from loopinterp.dynamics.model_maps import map_and_start
from loopinterp.dynamics.state_checks import of_each
from loopinterp.errors import MOST_LOOPS, check_integer
from loopinterp.short_repr import ShortRepr

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from loopinterp.models.looped_model import LoopedModel


@dataclass(frozen=True, repr=False)
class LyapunovExponents(ShortRepr):
    r"""Lyapunov exponents of each example's trajectory, largest first, in nats per loop.

    Attributes:
        values: :math:`\lambda_i`, means over the loops counted; -inf where a disturbance is gone
            in one loop, NaN where the trajectory left the finite numbers.
        low: Lower end of the 95% interval over blocks of loops.
        high: Upper end.
        state: Where each trajectory has come to.
    """

    values: Float[Tensor, "batch exponent"]
    low: Float[Tensor, "batch exponent"]
    high: Float[Tensor, "batch exponent"]
    state: Float[Tensor, "batch ..."]


def lyapunov_exponents(
    model: LoopedModel | Callable[[Tensor], Tensor] | Any,
    h: Tensor | Any,
    n_loops: int,
    k: int = 1,
    *,
    discard: int | None = None,
    n_blocks: int = 8,
    seed: int = 0,
) -> LyapunovExponents:
    r"""The k largest Lyapunov exponents of the trajectory from a state, by the QR method.

    k tangent vectors are carried through the loops and made orthogonal after each,
    :math:`J(h_t) Q_t = Q_{t+1} R_{t+1}`; then

    .. math:: \lambda_i = \frac{1}{T} \sum_t \log |R_{t,ii}|

    At a fixed point it is :math:`\log |\lambda_i(J)|`, on a cycle the logarithm of its multiplier
    over its period; above 0, near trajectories part, as in chaos. The interval is that of a mean
    of ``n_blocks`` block means (Student's t): it holds the spread along this trajectory alone.

    Args:
        model: A map, such as ``bind(model, inputs).step``. Or a looped model.
        h: State from which each trajectory starts.
        n_loops: Loops that are counted.
        k: How many exponents; each costs a Jacobian-vector product a loop.
        discard: Loops made before, in which the state comes to its attractor, if it has one, and
            the tangents turn into their directions; a quarter of ``n_loops`` by default.
        n_blocks: Blocks of loops, at least 2.
        seed: Seed of the first tangents.

    Raises:
        InputError: If the state is empty or not finite, there are fewer than k exponents, or an
            option is out of range.

    Source: Benettin, Galgani, Giorgilli and Strelcyn, Meccanica 15 (1980).

    Example:
        >>> halve = lambda x: torch.stack([x[:, 0] / 2, x[:, 1] / 4], dim=1)
        >>> lyapunov_exponents(halve, torch.ones(1, 2), n_loops=40, k=2, discard=40).values.exp()
        tensor([[0.5000, 0.2500]])
    """
    step, h = map_and_start(model, h)
    check_integer("n_blocks", n_blocks, least=2)
    check_integer("n_loops", n_loops, least=n_blocks, far=MOST_LOOPS)
    discard = n_loops // 4 if discard is None else discard
    check_integer("discard", discard, least=0, far=MOST_LOOPS)
    operator = JacobianOperator.of(step, h, None, least=k)
    generator = torch.Generator().manual_seed(seed)
    first = torch.stack([operator.random(generator) for _ in range(k)], dim=-1)
    tangents, _ = _qr(first)
    state, dead = operator.h, torch.zeros(len(h), dtype=torch.bool, device=h.device)
    total = torch.zeros(n_blocks, len(h), k, dtype=torch.float64, device=h.device)
    loops = torch.zeros(n_blocks, dtype=torch.float32)
    for loop in range(discard + n_loops):
        state, tangents, growth = _advance(step, state, tangents)
        lost = ~(state.flatten(1).isfinite().all(1) & tangents.flatten(1).isfinite().all(1))
        if lost.any():  # what has left the finite numbers stays at 0, and counts as NaN
            dead |= lost
            state = torch.where(of_each(dead, state), 0, state)
            tangents = torch.where(of_each(dead, tangents), 0, tangents)
        if loop >= discard:
            block = (loop - discard) * n_blocks // n_loops
            total[block] += growth
            loops[block] += 1
    means = total / loops[:, None, None].to(total)
    value = total.sum(0) / n_loops
    half = _student(n_blocks) * means.std(dim=0) / n_blocks**0.5
    half = torch.where(value.isfinite(), half, 0)
    ends = (value, value - half, value + half)
    ends = [torch.where(dead[:, None], float("nan"), end) for end in ends]
    return LyapunovExponents(*(end.to(h.dtype) for end in ends), state=state)


def _advance(
    step: Callable[[Tensor], Tensor], state: Tensor, tangents: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """One loop: the state, orthonormal tangents [batch, size, k], log growth [batch, k]."""
    carried = [
        push_forward(step, state, tangent.reshape(state.shape))
        for tangent in rearrange(tangents, "batch size k -> k batch size")
    ]
    pushed = torch.stack([product.flatten(1) for _, product in carried], dim=-1)
    turned, upper = _qr(pushed.reshape(tangents.shape))
    return carried[0][0], turned, upper.diagonal(dim1=1, dim2=2).abs().double().log()


def _qr(columns: Tensor) -> tuple[Tensor, Tensor]:
    """Q in the columns' own type, R at least in float32: there is no QR of half precision."""
    q, r = torch.linalg.qr(columns.to(torch.promote_types(columns.dtype, torch.float32)))
    return q.to(columns.dtype), r


def _student(n_blocks: int) -> float:
    """The 97.5% quantile of Student's t with as many degrees of freedom as blocks but one."""
    from scipy.stats import t

    return float(t.ppf(0.975, n_blocks - 1))
