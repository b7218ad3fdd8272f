"""Stop where a model's own gate says: the exit gates and halting heads of published models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from loopinterp.errors import check_integer, check_number

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from loopinterp.models.stopping_rules import LoopView


class HasExitGate(Protocol):
    """A model that says of a state how probable it is to stop there."""

    def exit_probability(
        self, state: Float[Tensor, "batch pos d_state"]
    ) -> Float[Tensor, "batch pos"]:
        """Probability to stop at a state, if the model has not stopped before."""
        ...


@dataclass(frozen=True)
class ExitGate:
    r"""Stop an example once its model would have stopped with some probability (online).

    With :math:`\lambda_t` the gate's probability after loop t, a position has gone on so far with
    probability :math:`\prod_{s \le t} (1 - \lambda_s)`. The first loop t from 1 on at which that is
    at most ``1 - threshold`` at every scored position.

    Args:
        model: What has the gate: an adapter of a model that has one.
        threshold: Probability to have stopped.

    Raises:
        InputError: If the threshold is not between 0 and 1.

    Source: the cumulative exit of Ouro, arXiv 2510.25741.
    """

    model: HasExitGate
    threshold: float = 0.5

    def __post_init__(self) -> None:
        check_number("ExitGate(threshold)", self.threshold, above=0, most=1)

    @property
    def tolerance(self) -> float:
        """Stop at the first score at or below it."""
        return 1 - self.threshold

    def horizon(self, max_loops: int | None, n_loops: Tensor | None) -> int:
        return check_integer("max_loops", max_loops, least=1)

    def score(self, view: LoopView) -> Float[Tensor, " batch"]:
        """The largest probability to have gone on so far, over the scored positions."""
        if view.previous is None:
            going = torch.ones_like(view.mask, dtype=torch.float32)
        else:
            going = view.previous.notes[self] * (
                1 - self.model.exit_probability(view.state).float()
            )
        view.notes[self] = going
        return view.worst(going)
