r"""How a trajectory settles: residuals, distances, rates, angles, settling times.

All functions take states ``h_0 .. h_T`` as ``[loop+1, ..., d_model]`` and work on the last axis:
per token on ``[loop+1, batch, pos, d_model]``, per example on states flattened to
``[loop+1, batch, pos*d_model]``. :math:`D_t = h_t - h_{t-1}`; entry ``t - 1`` of a result with
``T`` entries belongs to :math:`D_t`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from loopinterp.dynamics.state_checks import check_shape, check_states
from loopinterp.errors import InputError, check_choice, check_integer, check_number
from loopinterp.short_repr import ShortRepr

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

SETTLED = 0.03
"""Relative residual under which a token counts as settled (arXiv 2502.05171)."""

NOISE = 16
"""Updates smaller than this many rounding errors of the state have no rate and no angle."""

AT_ROUNDING = 2
"""Updates up to so many rounding errors of the state are what a state at rest makes: in half
precision the last loops of models at rest move them by .5 to .7, in float32 by 1.5 to 2.1."""


def relative_residual(
    states: Float[Tensor, "states *lead d_model"],
    *,
    norm: Literal["2", "max"] = "2",
    allow_nonfinite: bool = False,
) -> Float[Tensor, "loop ..."]:
    r"""Relative residual :math:`\|D_t\| / \|h_t\|` along the last axis.

    A state of zeros that does not move has residual 0; one that has just become zero, infinity.
    For the maximum norm over a sequence, flatten positions and features first.

    Args:
        states: States after 0..T loops.
        norm: ``"2"`` (Euclidean) or ``"max"``.
        allow_nonfinite: Let NaN and infinity through (a diverging run).

    Raises:
        InputError: If the states are too few, not floating point or not finite.

    Source: arXiv 2502.05171.

    Example:
        >>> relative_residual(torch.tensor([[0.0, 1.0], [0.0, 2.0], [0.0, 2.0]]))
        tensor([0.5000, 0.0000])
    """
    check_choice("norm", norm, ("2", "max"))
    check_states(states, allow_nonfinite=allow_nonfinite)
    order = 2 if norm == "2" else float("inf")
    update = torch.linalg.vector_norm(states[1:] - states[:-1], ord=order, dim=-1)
    size = torch.linalg.vector_norm(states[1:], ord=order, dim=-1)
    return share_of_size(update, size)


def share_of_size(part: Float[Tensor, "*part"], size: Float[Tensor, "*#part"]) -> Tensor:
    """A length over that of a state: 0 where both are 0, infinity where only the state's is."""
    return torch.where(part == 0, part, part / size)


def distance_to_limit(
    states: Float[Tensor, "states *lead d_model"],
    limit: Float[Tensor, "*limit_lead d_model"],
    *,
    relative: bool = False,
    allow_nonfinite: bool = False,
) -> Float[Tensor, "states ..."]:
    r"""Distance :math:`\|h_t - h^*\|` of each state to the limit.

    Args:
        states: States after 0..T loops.
        limit: :math:`h^*`, from :func:`find_fixed_point` or a late loop; ``[..., d_model]``.
        relative: Divide by :math:`\|h^*\|`. To a limit at zero that is infinity, and 0 there.
        allow_nonfinite: Let NaN and infinity through.

    Raises:
        InputError: If ``limit`` does not have the shape of one state.
    """
    check_states(states, at_least=1, allow_nonfinite=allow_nonfinite)
    check_shape(limit, states[0], "limit", fix="Pass the fixed point of the same batch.")
    distance = (states - limit).norm(dim=-1)
    return share_of_size(distance, limit.norm(dim=-1)) if relative else distance


def update_cosine(
    states: Float[Tensor, "states *lead d_model"], *, allow_nonfinite: bool = False
) -> Float[Tensor, "loop ..."]:
    r"""Cosine of the angle between successive updates, :math:`\cos(D_t, D_{t-1})`.

    Near 1: a straight approach. About 0.5 to 0.65: a spiral. Negative: overshoot, period 2.
    NaN where an update is no larger than rounding error.

    Returns:
        ``T - 1`` entries, the first for :math:`t = 2`.

    Raises:
        InputError: If there are fewer than three states.
    """
    check_states(states, at_least=3, allow_nonfinite=allow_nonfinite)
    update, size, real = _updates(states)
    cosine = (update[1:] * update[:-1]).sum(dim=-1) / (size[1:] * size[:-1])
    return cosine.clamp(-1, 1).masked_fill(~(real[1:] & real[:-1]), float("nan"))


@dataclass(frozen=True, repr=False)
class ContractionRates(ShortRepr):
    r"""How fast updates shrink, from :math:`r_t = \|D_{t+1}\| / \|D_t\|`.

    Attributes:
        per_loop: :math:`r_t`; NaN where an update is no larger than rounding error.
        mean: Mean over loops.
        spread: Standard deviation over loops (0 for one loop).
        asymptotic: Geometric mean over the last loops with a rate: the linear rate, to compare
            with the spectral radius at the fixed point.
    """

    per_loop: Float[Tensor, "loop ..."]
    mean: Float[Tensor, "*lead"]
    spread: Float[Tensor, "*lead"]
    asymptotic: Float[Tensor, "*lead"]


def contraction_rates(
    states: Float[Tensor, "states *lead d_model"], *, last: int = 8, allow_nonfinite: bool = False
) -> ContractionRates:
    r"""Contraction rate :math:`\|D_{t+1}\| / \|D_t\|`: per loop, mean, spread, asymptotic.

    Args:
        states: States after 0..T loops, ``T >= 2``.
        last: Number of last loops (above rounding error) behind the asymptotic rate.
        allow_nonfinite: Let NaN and infinity through.

    Raises:
        InputError: If there are fewer than three states, or ``last`` is below 1.

    Source: arXiv 2605.21488.

    Example:
        >>> halving = 2 - torch.tensor([1.0, 0.5, 0.25, 0.125])[:, None]
        >>> contraction_rates(halving).asymptotic
        tensor(0.5000)
    """
    check_states(states, at_least=3, allow_nonfinite=allow_nonfinite)
    check_integer("last", last, least=1)
    _, size, real = _updates(states)
    valid = real[1:] & real[:-1]
    ratio = (size[1:] / size[:-1]).masked_fill(~valid, float("nan"))
    count = valid.sum(dim=0)
    mean = ratio.nansum(dim=0) / count
    spread = ((ratio - mean) ** 2).nansum(dim=0).div(count).sqrt()
    # Valid loops counted from the end: the last ones are numbered 1 .. last.
    from_end = valid.flip(0).cumsum(dim=0).flip(0)
    late = valid & (from_end <= last)
    log_ratio = torch.where(late, ratio, 1).log()
    asymptotic = (log_ratio.sum(dim=0) / late.sum(dim=0)).exp()
    return ContractionRates(ratio, mean, spread, asymptotic)


def settling_time(
    residual: Float[Tensor, "loop ..."], *, threshold: float = SETTLED
) -> Int[Tensor, "*lead"]:
    """First loop from which the residual stays under the threshold; -1 where it never does.

    Args:
        residual: :func:`relative_residual`; entry ``t - 1`` belongs to loop ``t``.
        threshold: Residual that counts as settled.

    The residual of a state that grows by as much in each loop falls below any threshold, as 1/t:
    whether a token comes to rest is for :func:`classify_regimes` to say.

    Returns:
        Loops, counted from 1: a token with settling time ``t`` no longer moves by more than the
        threshold in loop ``t`` and after. NaN counts as unsettled.

    Raises:
        InputError: If there is no loop, or the threshold is not positive.

    Source: arXiv 2502.05171.

    Example:
        >>> settling_time(torch.tensor([0.5, 0.01, 0.2, 0.02, 0.01]))
        tensor(4)
    """
    check_number("threshold", threshold, above=0)
    if residual.ndim == 0 or len(residual) == 0:
        raise InputError(
            "residual",
            expected="residuals [loop, ...] of at least one loop",
            given=f"shape {tuple(residual.shape)}",
            fix="Pass the output of relative_residual.",
        )
    last_moving = last_loop(~(residual < threshold))
    return torch.where(last_moving == len(residual), -1, last_moving + 1)


def last_loop(holds: Bool[Tensor, "loop ..."]) -> Int[Tensor, "*lead"]:
    """The last loop, counted from 1, at which something holds; 0 where it never does."""
    loops = torch.arange(1, len(holds) + 1, device=holds.device)
    return (holds * loops.reshape(-1, *[1] * (holds.ndim - 1))).amax(dim=0)


def _updates(states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Updates, their norms, and which are larger than the rounding error of the state."""
    update = states[1:] - states[:-1]
    size, norm = update.norm(dim=-1), states.norm(dim=-1)
    rounding = NOISE * torch.finfo(states.dtype).eps * torch.maximum(norm[1:], norm[:-1])
    return update, size, size > rounding
