"""Rules that stop an example once its readout, or a gate of the model's own, is sure (online)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from loopinterp.errors import InputError, check_integer, check_number

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from loopinterp.models.stopping_rules import LoopView

_SURE = "0.95 asks for a probability of 95% at every position."


class _Sure:
    """An online rule without an end of its own, but the caller's."""

    def horizon(self, max_loops: int | None, n_loops: Tensor | None) -> int:
        return check_integer("max_loops", max_loops, least=1)


@dataclass(frozen=True)
class EntropyBelow(_Sure):
    r"""Stop an example when its readout is no longer spread (online).

    The first loop where the entropy :math:`-\sum_k p_k \log p_k` of the readout is at most the
    tolerance at every scored position. Sure is not right: see :class:`MaxConfidence`.

    Args:
        tolerance: In nats.

    Raises:
        InputError: If the tolerance is not a positive number.
    """

    tolerance: float

    def __post_init__(self) -> None:
        fix = "0.1 nats is the entropy of about 98% on one of two classes."
        check_number("EntropyBelow(tolerance)", self.tolerance, above=0, fix=fix)

    def score(self, view: LoopView) -> Float[Tensor, " batch"]:
        """The largest entropy over the scored positions."""
        return view.worst(torch.special.entr(view.log_probs.exp()).sum(-1))


@dataclass(frozen=True)
class ConfidenceAbove(_Sure):
    """Stop an example when its readout is sure of its answer (online).

    The first loop where the greatest probability is at least the threshold at every scored
    position.

    Args:
        threshold: Probability in (0, 1).

    Raises:
        InputError: If the threshold is no such number.
    """

    threshold: float

    def __post_init__(self) -> None:
        check_number("ConfidenceAbove(threshold)", self.threshold, above=0, below=1, fix=_SURE)

    @property
    def tolerance(self) -> float:
        """What is left to other classes, at most."""
        return 1 - self.threshold

    def score(self, view: LoopView) -> Float[Tensor, " batch"]:
        """The largest probability over the scored positions that is left to other classes."""
        return view.worst(-torch.expm1(view.log_probs.amax(-1)))


@dataclass(frozen=True)
class GateAbove(_Sure):
    r"""Stop an example when a gate of the model's own says so (online).

    The first loop where the gate :math:`\lambda_t` is at least the threshold at every scored
    position; the initial state, which no loop has made, is not asked. ``cumulated``: where the
    probability of having stopped by then is, :math:`1 - \prod_{s=1}^{t} (1 - \lambda_s)`, for gates
    that say how probable it is to stop at a loop if one has not stopped before.

    Args:
        gate: From a state ``[batch, pos, d_model]`` to a probability of stopping there, for each
            position or for each example.
        threshold: Probability in (0, 1).
        cumulated: Whether the loops before count.

    Raises:
        InputError: If the threshold is no such number; once it is asked, if the gate gives
            something else.

    Source: the cumulative exit of Ouro, arXiv 2510.25741.
    """

    gate: Callable[[Tensor], Tensor] = field(repr=False)
    threshold: float = 0.5
    cumulated: bool = False

    def __post_init__(self) -> None:
        check_number("GateAbove(threshold)", self.threshold, above=0, below=1, fix=_SURE)

    @property
    def tolerance(self) -> float:
        """Probability of going on, at most."""
        return 1 - self.threshold

    def score(self, view: LoopView) -> Float[Tensor, " batch"]:
        """The largest probability over the scored positions of going on, or of having gone on."""
        going = torch.ones(view.mask.shape, dtype=torch.float32, device=view.mask.device)
        if view.loop > 0:
            before = view.previous.notes.get(id(self)) if self.cumulated and view.previous else None
            going = self._going_on(view) * (going if before is None else before)
        if self.cumulated:
            view.notes[id(self)] = going  # as a gate need not have a hash
        return view.worst(going)

    def _going_on(self, view: LoopView) -> Float[Tensor, "batch pos"]:
        stop = self.gate(view.state)
        if stop.shape not in (view.mask.shape, view.mask.shape[:1]):
            raise InputError(
                "gate",
                expected=f"a probability for each place {list(view.mask.shape)}, or each example",
                given=f"shape {list(stop.shape)}",
                fix="Take the last axis off, e.g. gate(h).sigmoid()[..., 0].",
            )
        return 1 - (stop[:, None] if stop.ndim == 1 else stop).float().expand(view.mask.shape)
