r"""Runs in half precision: what rounding moves, measured against the same loop in float32.

One loop in the run's dtype is :math:`\tilde f(h) = f(h) + \epsilon(h)`, with f the loop in float32
of the same weights; :math:`\|\epsilon(h)\| / \|f(h)\|` is the *rounding* of a loop. Movement of
that size does not tell whether a run converges. A run in float32 from one of its late states does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from loopinterp.core.results import study
from loopinterp.core.text import ShortRepr
from loopinterp.dynamics.measures import SETTLED, relative_residual, share_of_size
from loopinterp.dynamics.regimes import LEAST_LOOPS, Regime, RegimeCriteria, classify_regimes
from loopinterp.models.iteration import bind
from loopinterp.models.precision import computing_dtype, in_float32, is_coarse, no_autocast
from loopinterp.models.protocol import describe_model

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from loopinterp.core.results import Stopwatch
    from loopinterp.models.iteration import Iteration
    from loopinterp.models.protocol import LoopedModel


def beside_float32(model: LoopedModel, inputs: Tensor) -> tuple[dict[str, Any], Any | None]:
    """The model for the provenance and, if it computes in a coarse dtype, its copy in float32.

    The copy is None in float32, and of a model that cannot be copied.
    """
    about: dict[str, Any] = {"model": describe_model(model)}
    dtype = computing_dtype(bind(model, inputs[:1]).h0)
    if not is_coarse(dtype):
        return about, None
    return about | {"state_dtype": str(dtype).removeprefix("torch.")}, in_float32(model, inputs)


@contextmanager
def limit_study(
    model: LoopedModel, inputs: Tensor, seed: int, **config: Any
) -> Iterator[tuple[Any, Stopwatch]]:
    """A study of limits: the model to run, and the stopwatch of the study.

    In half precision the same weights in float32, without autocast, replace it (``computed_in``). A
    model that cannot be copied stays.
    """
    about, precise = beside_float32(model, inputs)
    if precise is not None:
        model, about = precise, about | {"computed_in": "float32"}
    with (
        nullcontext() if precise is None else no_autocast(inputs.device),
        study(seed, **about, **config) as watch,
    ):
        yield model, watch


@dataclass(frozen=True, repr=False)
class AtRounding(ShortRepr):
    """Late behaviour of a half-precision run, beside that in float32 from the same states.

    Attributes:
        rounding: Largest relative difference that one late loop makes between the two.
        regime, period: As in :class:`~loopinterp.dynamics.Regimes`. A trajectory that moves, though
            the run in float32 converges, has *converged to rounding* if its residual is small and
            its movement leads nowhere.
    """

    rounding: Float[Tensor, "batch pos"]
    regime: Int[Tensor, "batch pos"]
    period: Float[Tensor, "batch pos"]


@torch.no_grad()
def compare_with_float32(
    states: Float[Tensor, "loop batch pos d_model"],
    precise: Iteration,
    *,
    threshold: float = SETTLED,
) -> AtRounding:
    """Classify a half-precision run, with the loop in float32 as the reference.

    Args:
        states: Its states after 0..T loops, at least 12.
        precise: The loop in float32 on the same inputs.
        threshold: Relative residual below which a trajectory counts as converged.
    """
    n_loops = len(states) - 1
    window = max(LEAST_LOOPS // 2, n_loops // 2)
    first = n_loops - max(LEAST_LOOPS, window)  # the state that the run in float32 starts from
    reference = [states[first].float()]
    for loop in range(first, n_loops):
        reference.append(precise.step(reference[-1], loop))
    other = classify_regimes(torch.stack(reference), RegimeCriteria(window=window))
    own = classify_regimes(states, RegimeCriteria(window=window, rounding=0))

    last = n_loops - max(1, window // 3)
    rounding = torch.stack([_difference(states, precise, t) for t in range(last, n_loops)])
    rounding = rounding.amax(dim=0)  # [batch, pos]
    late = states[last:].float()
    residual = relative_residual(late, allow_nonfinite=True)  # [loop, batch, pos]
    small = (residual < small_movement(rounding, threshold)).all(dim=0)
    rests = other.regime == Regime.FIXED_POINT
    to_rounding = rests & small & _leads_nowhere(late, rounding)
    to_rounding &= own.regime != Regime.FIXED_POINT
    return AtRounding(
        rounding=rounding,
        regime=torch.where(to_rounding, int(Regime.CONVERGED_TO_ROUNDING), own.regime),
        period=own.period.float().masked_fill(to_rounding, float("nan")),
    )


def small_movement(rounding: Tensor, threshold: float) -> Float[Tensor, "batch pos"]:
    # A residual is the difference of two states, each with its rounding.
    return (2 * rounding).clamp(min=threshold)


def _difference(states: Tensor, precise: Iteration, loop: int) -> Float[Tensor, "batch pos"]:
    exact = precise.step(states[loop].float(), loop)
    gap = (states[loop + 1].float() - exact).norm(dim=-1)
    return share_of_size(gap, exact.norm(dim=-1))


def _leads_nowhere(late: Tensor, rounding: Tensor) -> Bool[Tensor, "batch pos"]:
    """Whether the way from first to last is within two roundings, or under half of the path."""
    path = (late[1:] - late[:-1]).norm(dim=-1).sum(dim=0)  # [batch, pos]
    net = (late[-1] - late[0]).norm(dim=-1)
    return (net <= 2 * rounding * late[-1].norm(dim=-1)) | (net < 0.5 * path)
