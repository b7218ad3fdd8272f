"""Which problem lengths are drawn at each step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor

    from loopinterp.training.config import CurriculumConfig

_MOMENTUM = 0.9
_STATE = ("longest", "running_accuracy", "n_steps", "grown_at", "done_at")


class Curriculum:
    """Draws one length per example, uniform in ``min_n .. M``, and hears how well each step went.

    By its kind, M grows by one when the running accuracy passes ``threshold`` (after
    ``min_steps`` at least), or every ``interval`` steps however well it goes (arXiv 2409.15647),
    or is ``max_n`` from the first step on.

    Attributes:
        longest: M: the greatest length drawn now.
        done_at: Step at which M reached its greatest value, or None.
    """

    def __init__(self, config: CurriculumConfig) -> None:
        self.config = config
        self.longest = config.first_longest
        self.running_accuracy = 0.0
        self.n_steps = 0
        self.grown_at = 0
        self.done_at: int | None = 0 if self.longest == config.max_n else None

    def lengths(self, batch_size: int, generator: torch.Generator) -> Int[Tensor, " batch"]:
        return torch.randint(
            self.config.min_n, self.longest + 1, (batch_size,), generator=generator
        )

    def update(self, exact_match: float) -> None:
        """Take in the share of examples that the last step got wholly right."""
        self.running_accuracy += (1 - _MOMENTUM) * (exact_match - self.running_accuracy)
        self.n_steps += 1
        if self.done_at is None and self._ready():
            self.longest += 1
            self.grown_at = self.n_steps
            if self.longest == self.config.max_n:
                self.done_at = self.n_steps

    def may_grow(self, n_steps: int) -> bool:
        """Whether M may have grown by the time that so many more steps are taken in.

        Where it may not, whatever they got right, the next lengths can be drawn before they are
        heard of. For ``accuracy`` the running accuracy reaches ``1 - (1 - a) momentum^n`` at most.
        """
        config, steps_at_this_length = self.config, self.n_steps + n_steps - self.grown_at
        if self.done_at is not None:
            return False
        if config.kind == "interval":
            return steps_at_this_length >= config.interval
        highest = 1 - (1 - self.running_accuracy) * _MOMENTUM**n_steps
        # To the rounding of as many additions.
        return steps_at_this_length >= config.min_steps and highest > config.threshold - 1e-9

    def _ready(self) -> bool:
        config, steps_at_this_length = self.config, self.n_steps - self.grown_at
        if config.kind == "interval":
            return steps_at_this_length >= config.interval
        accurate = self.running_accuracy > config.threshold
        return accurate and steps_at_this_length >= config.min_steps

    def state(self) -> dict[str, float | int | None]:
        """JSON-ready; :meth:`load` takes it back."""
        return {name: getattr(self, name) for name in _STATE}

    def load(self, state: dict[str, float | int | None]) -> None:
        for name in _STATE:
            setattr(self, name, state[name])
