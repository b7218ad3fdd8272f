"""Rules that stop an example once its state, its readout or its answer has settled (online)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import TYPE_CHECKING, ClassVar

import torch

from loopinterp.errors import check_integer, check_number

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from loopinterp.models.stopping_rules import LoopView


@dataclass(frozen=True)
class _Settled:
    """An online rule with a tolerance of its own, and no other end than the caller's limit."""

    tolerance: float

    def __post_init__(self) -> None:
        fix = "A small number such as 0.03 means settled to three per cent."
        check_number(f"{type(self).__name__}(tolerance)", self.tolerance, above=0, fix=fix)

    def horizon(self, max_loops: int | None, n_loops: Tensor | None) -> int:
        return check_integer("max_loops", max_loops, least=1)


@dataclass(frozen=True)
class ResidualBelow(_Settled):
    r"""Stop an example when its state has settled (online).

    The first loop where ``||h_t - h_{t-1}|| / ||h_t|| <= tolerance`` at every scored position.

    Args:
        tolerance: Relative residual; 0.03 is the settling threshold of arXiv 2502.05171.

    Raises:
        InputError: If the tolerance is not a positive number.
    """

    def score(self, view: LoopView) -> Float[Tensor, " batch"]:
        """The largest relative residual over the scored positions."""
        if view.previous is None:
            return view.constant(math.inf)
        change = (view.state - view.previous.state).float().norm(dim=-1)
        size = view.state.float().norm(dim=-1)
        # A state that stays exactly zero has settled; 0 / 0 would say it never does.
        return view.worst(torch.where(change == 0, 0.0, change / size))


@dataclass(frozen=True)
class ReadoutKL(_Settled):
    r"""Stop an example when its answer has settled (online).

    The first loop where ``KL(p_t || p_{t-1}) <= tolerance`` at every scored position, with
    ``p_t = softmax(logits_t)``, in nats.

    Args:
        tolerance: In nats; arXiv 2502.05171 uses 5e-4.

    Raises:
        InputError: If the tolerance is not a positive number.
    """

    def score(self, view: LoopView) -> Float[Tensor, " batch"]:
        """The largest divergence over the scored positions."""
        if view.previous is None:
            return view.constant(math.inf)
        now, before = view.log_probs, view.previous.log_probs
        return view.worst((now.exp() * (now - before)).sum(-1))


@dataclass(frozen=True)
class AccelerationBelow(_Settled):
    r"""Stop an example when its updates have stopped to change (online): the second-order exit.

    ``a_t = ||D_t - D_{t-1}|| / ||h_t||`` with ``D_t = h_t - h_{t-1}``. The first loop where
    ``a_t`` and ``a_{t-1}`` are at most the tolerance at every scored position: two hits in a row,
    as one alone may be a turning point. A state that drifts at a constant speed counts as settled.

    Args:
        tolerance: Relative to the size of the state, so that it means the same at any width; the
            paper's difference is absolute, with a threshold chosen for each model.

    Raises:
        InputError: If the tolerance is not a positive number.

    Source: arXiv 2509.23314 (second-order exit with a two-hit check).
    """

    past: ClassVar[int] = 3

    def score(self, view: LoopView) -> Float[Tensor, " batch"]:
        """The largest of the last two relative accelerations over the scored positions."""
        updates = list(islice(view.updates(), 3))
        if len(updates) < 3:
            return view.constant(math.inf)
        hits = []
        for (now, update), (_, before) in pairwise(updates):
            change, size = (update - before).norm(dim=-1), now.state.float().norm(dim=-1)
            hits.append(view.worst(torch.where(change == 0, 0.0, change / size)))
        return torch.maximum(*hits)


@dataclass(frozen=True)
class AnswerHeld:
    """Stop an example when its answer has been the same for some loops (online).

    The first loop at which the argmax at every scored position is that of each of the ``hold``
    loops before. It is told nothing of the task; a model that is right at one loop only and moves
    on never holds an answer, or holds a wrong one by chance.

    Args:
        hold: Loops before it that gave the same answer.

    Raises:
        InputError: If ``hold`` is no positive integer.
    """

    hold: int = 3
    tolerance = 0.0

    def __post_init__(self) -> None:
        check_integer("AnswerHeld(hold)", self.hold, least=1)

    @property
    def past(self) -> int:
        """Loops that have to be remembered."""
        return self.hold

    def horizon(self, max_loops: int | None, n_loops: Tensor | None) -> int:
        return check_integer("max_loops", max_loops, least=1)

    def score(self, view: LoopView) -> Float[Tensor, " batch"]:
        """How many of the ``hold`` loops before, going back, did not give the answer of now."""
        same = torch.ones_like(view.mask[:, 0])
        held, before = view.constant(0.0), view.previous
        for _ in range(self.hold):
            if before is None:
                break
            same = same & ((view.answers == before.answers) | ~view.mask).all(-1)
            held, before = held + same, before.previous
        return self.hold - held
