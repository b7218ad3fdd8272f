"""Which problem lengths are drawn at each step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor

    from loopinterp.training.config import CurriculumConfig

_MOMENTUM = 0.9


@runtime_checkable
class Curriculum(Protocol):
    """Draws one length per example, and hears how well each step went."""

    longest: int
    """M: the greatest length drawn now."""
    done_at: int | None
    """Step at which M reached its greatest value, or None."""

    def lengths(self, batch_size: int, generator: torch.Generator) -> Int[Tensor, " batch"]: ...

    def update(self, exact_match: float) -> None:
        """Take in the share of examples that the last step got wholly right."""
        ...

    def state(self) -> dict[str, float | int | None]:
        """JSON-ready; :meth:`load` takes it back."""
        ...

    def load(self, state: dict[str, float | int | None]) -> None: ...


class _Growing:
    """Lengths uniform in ``shortest .. M``; subclasses say when M grows by one."""

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
        self.running_accuracy += (1 - _MOMENTUM) * (exact_match - self.running_accuracy)
        self.n_steps += 1
        if self.done_at is None and self._ready():
            self.longest += 1
            self.grown_at = self.n_steps
            if self.longest == self.config.max_n:
                self.done_at = self.n_steps

    def _ready(self) -> bool:
        return False

    def state(self) -> dict[str, float | int | None]:
        names = ("longest", "running_accuracy", "n_steps", "grown_at", "done_at")
        return {name: getattr(self, name) for name in names}

    def load(self, state: dict[str, float | int | None]) -> None:
        for name, value in state.items():
            setattr(self, name, value)


class AccuracyCurriculum(_Growing):
    """M grows when the running accuracy passes ``threshold``, after ``min_steps`` at least."""

    def _ready(self) -> bool:
        enough = self.n_steps - self.grown_at >= self.config.min_steps
        return enough and self.running_accuracy > self.config.threshold


class IntervalCurriculum(_Growing):
    """M grows by one every ``interval`` steps (arXiv 2409.15647), however well it goes."""

    def _ready(self) -> bool:
        return self.n_steps - self.grown_at >= self.config.interval


class NoCurriculum(_Growing):
    """Lengths uniform in ``min_n .. max_n`` from the first step on."""


def make_curriculum(config: CurriculumConfig) -> Curriculum:
    """The curriculum that a configuration asks for."""
    kinds = {"accuracy": AccuracyCurriculum, "interval": IntervalCurriculum, "none": NoCurriculum}
    return kinds[config.kind](config)
