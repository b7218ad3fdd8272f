"""Stopping rules, which score every example after every loop.

*Online* rules stop an example at the first score at or below their ``tolerance``; *offline* rules
run all loops and choose the loop of least score. In half precision, rules of movement score 0 where
rounding explains all of it (:meth:`LoopView.at_rounding <loopinterp.models.LoopView.at_rounding>`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

import torch
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt
from typing_extensions import dataclass_transform

from loopinterp.core.boundary import checked
from loopinterp.core.errors import InputError, check_integer, describe_tensor

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from loopinterp.models.stopped_run import LoopView, StoppingRule

T = TypeVar("T")
_Probability = Annotated[float, Field(gt=0, lt=1)]


@dataclass_transform(frozen_default=True)
def _rule(cls: type[T]) -> type[T]:
    rule: Any = dataclass(frozen=True)(cls)
    rule.__init__ = checked(rule.__init__)
    return rule


class _Rule:
    """A rule that runs to the caller's limit, at least ``_least``."""

    _least: int = 1

    def horizon(self, max_loops: int | None, n_loops: Tensor | None) -> int:
        return check_integer("max_loops", max_loops, least=self._least)


@_rule
class Fixed:
    """Stop every example after ``n`` loops (online)."""

    n: NonNegativeInt
    tolerance = 0.0

    def horizon(self, max_loops: int | None, n_loops: Tensor | None) -> int:
        return self.n if max_loops is None else min(self.n, max_loops)

    def score(self, view: LoopView) -> Float[Tensor, " batch"]:
        return view.constant(float(self.n - view.loop))


@_rule
class Oracle:
    """Stop each example after its task's T(n) loops (online; arXiv 2409.15647, section 4)."""

    tolerance = 0.0

    def horizon(self, max_loops: int | None, n_loops: Tensor | None) -> int:
        if n_loops is None:
            expected, fix = "T(n) of each example", "Pass n_loops=batch.n_loops."
            raise InputError("n_loops", expected=expected, given="None", fix=fix)
        longest = int(n_loops.max())
        return longest if max_loops is None else min(longest, max_loops)

    def score(self, view: LoopView) -> Float[Tensor, " batch"]:
        assert view.n_loops is not None  # horizon() has checked it
        return (view.n_loops - view.loop).float()


@_rule
class LengthLine(_Rule):
    """Stop every example after ``round(slope * n_pos + offset)`` loops, at least 0 (online).

    :func:`loopinterp.training.calibrate_stopping` fits both numbers to training lengths.
    """

    slope: float
    offset: float
    tolerance = 0.0
    _least = 0

    def loops(self, n_positions: int) -> int:
        return max(round(self.slope * n_positions + self.offset), 0)

    def score(self, view: LoopView) -> Float[Tensor, " batch"]:
        return view.constant(float(self.loops(view.state.shape[1]) - view.loop))


@_rule
class ResidualBelow(_Rule):
    """Stop when ``||h_t - h_{t-1}|| / ||h_t|| <= tolerance`` at every scored position (online).

    Source: arXiv 2502.05171, which uses 0.03.
    """

    tolerance: PositiveFloat

    def score(self, view: LoopView) -> Float[Tensor, " batch"]:
        if view.previous is None:
            return view.constant(math.inf)
        moved = _relative((view.state - view.previous.state).float(), view)
        return view.worst(moved.masked_fill(view.at_rounding(), 0))


@_rule
class ReadoutKL(_Rule):
    """Stop when ``KL(p_t || p_{t-1}) <= tolerance`` nats at every scored position (online).

    ``p_t = softmax(logits_t)``. Source: arXiv 2502.05171, which uses 5e-4.
    """

    tolerance: PositiveFloat

    def score(self, view: LoopView) -> Float[Tensor, " batch"]:
        if view.previous is None:
            return view.constant(math.inf)
        now, before = view.log_probs, view.previous.log_probs
        # KL(now || before) at each position [batch, pos], summed over classes.
        moved = (now.exp() * (now - before)).sum(-1)
        return view.worst(moved.masked_fill(view.at_rounding(), 0))


@_rule
class AccelerationBelow(_Rule):
    """Stop when the updates no longer change (online): the second-order exit.

    ``a_t = ||D_t - D_{t-1}|| / ||h_t||`` with ``D_t = h_t - h_{t-1}`` is at most the tolerance at
    every scored position for two loops in a row. Drift at constant speed meets it too.

    Source: arXiv 2509.23314, whose difference is absolute, not relative.
    """

    tolerance: PositiveFloat
    past: ClassVar[int] = 3

    def score(self, view: LoopView) -> Float[Tensor, " batch"]:
        updates = list(islice(view.updates(), 3))
        if len(updates) < 3:
            return view.constant(math.inf)
        rests = view.at_rounding()  # [batch, pos]
        hits = [
            view.worst(_relative(update - before, now).masked_fill(rests, 0))
            for (now, update), (_, before) in pairwise(updates)
        ]
        return torch.maximum(*hits)


def _relative(change: Float[Tensor, "batch pos d_model"], view: LoopView) -> Tensor:
    change, size = change.norm(dim=-1), view.state.float().norm(dim=-1)
    # A state that stays exactly zero has converged; 0 / 0 would be NaN.
    return torch.where(change == 0, 0.0, change / size)


@_rule
class AnswerHeld(_Rule):
    """Stop when no scored position changed its argmax over the last ``hold`` loops (online)."""

    hold: PositiveInt = 3
    tolerance = 0.0
    past = property(lambda self: self.hold, doc="Loops to remember.")

    def score(self, view: LoopView) -> Float[Tensor, " batch"]:
        same = torch.ones_like(view.mask)
        n_same, before = torch.zeros_like(view.mask, dtype=torch.float32), view.previous
        for _ in range(self.hold):
            if before is None:
                break
            # [batch, pos]: True while the run of equal answers, going back, is unbroken.
            same = same & (view.answers == before.answers)
            n_same, before = n_same + same, before.previous
        return view.worst(self.hold - n_same)


class _AtThreshold(_Rule):
    threshold: float

    @property
    def tolerance(self) -> float:
        return 1 - self.threshold


@_rule
class EntropyBelow(_Rule):
    r"""Stop when no scored position's readout has an entropy above ``tolerance`` nats (online)."""

    tolerance: PositiveFloat

    def score(self, view: LoopView) -> Float[Tensor, " batch"]:
        # Entropy -sum p log p at each position [batch, pos], summed over classes.
        return view.worst(torch.special.entr(view.log_probs.exp()).sum(-1))


@_rule
class ConfidenceAbove(_AtThreshold):
    """Stop when the top probability is at least ``threshold`` at every scored position (online)."""

    threshold: _Probability

    def score(self, view: LoopView) -> Float[Tensor, " batch"]:
        # 1 - max p at each position [batch, pos]; expm1 keeps digits where p is close to 1.
        return view.worst(-torch.expm1(view.log_probs.amax(-1)))


@_rule
class GateAbove(_AtThreshold):
    r"""Stop when a gate of the model is at least ``threshold`` at every scored position (online).

    Examples run at least one loop. ``cumulated`` compares the probability of having stopped,
    :math:`1 - \prod_{s=1}^{t} (1 - \lambda_s)`, for gates :math:`\lambda_t` conditional on not
    having stopped before (Ouro, arXiv 2510.25741).

    Args:
        gate: From a state ``[batch, pos, d_model]`` to a probability of stopping there, per
            position or per example.
    """

    gate: Callable[[Tensor], Tensor] = field(repr=False)
    threshold: _Probability = 0.5
    cumulated: bool = False

    def score(self, view: LoopView) -> Float[Tensor, " batch"]:
        shape = view.mask.shape
        going = torch.ones(shape, dtype=torch.float32, device=view.mask.device)
        if view.loop > 0:
            stop = self.gate(view.state)
            if stop.shape not in (shape, shape[:1]):
                expected, got = f"a probability for each place {list(shape)}", list(stop.shape)
                fix = "Take the last axis off, e.g. gate(h).sigmoid()[..., 0]."
                raise InputError("gate", expected=expected, given=str(got), fix=fix)
            if bool(((stop < 0) | (stop > 1)).any()):
                fix = "Pass the sigmoid of the gate's logits."
                got = describe_tensor(stop)
                raise InputError("gate", expected="probabilities", given=got, fix=fix)
            # Probability of not stopping here, and of not having stopped: [batch, pos].
            going = 1 - (stop[:, None] if stop.ndim == 1 else stop).float().expand(shape)
            before = view.previous.notes.get(id(self)) if self.cumulated and view.previous else None
            going = going if before is None else going * before
        if self.cumulated:
            view.notes[id(self)] = going  # as a gate need not have a hash
        return view.worst(going)


@_rule
class MaxConfidence:
    """The loop of the most confident readout (offline).

    ``t* = argmin_t mean CE(logits_t, argmax logits_t)`` from ``min_loop`` on; the mean is over the
    scored positions of an example (``per="sample"``) or of the ``batch``. A model can be
    confidently wrong early: compare with the oracle.

    Source: arXiv 2409.15647, equation 5 and section 6.4.
    """

    per: Literal["sample", "batch"] = "sample"
    min_loop: NonNegativeInt = 1
    tolerance = None

    def horizon(self, max_loops: int | None, n_loops: Tensor | None) -> int:
        return check_integer("max_loops", max_loops, least=self.min_loop)

    def score(self, view: LoopView) -> Float[Tensor, " batch"]:
        if view.loop < self.min_loop:
            return view.constant(math.inf)
        # Cross-entropy against the argmax is minus its log-probability: [batch, pos].
        doubt = -view.log_probs.amax(-1) * view.mask
        if self.per == "sample":
            return doubt.sum(-1) / view.mask.sum(-1)  # [batch]: mean over scored positions
        return (doubt.sum() / view.mask.sum()).expand(doubt.shape[0])


STOPPING_RULES: Mapping[str, StoppingRule] = {
    "max-confidence": MaxConfidence(),
    "max-confidence-batch": MaxConfidence(per="batch"),
    "residual": ResidualBelow(0.03),
    "readout-kl": ReadoutKL(5e-4),
    "acceleration": AccelerationBelow(0.03),
    "answer-held": AnswerHeld(3),
    "entropy": EntropyBelow(0.1),
    "confidence": ConfidenceAbove(0.95),
}
"""Rules that need neither T(n) nor a gate, with their usual thresholds."""
