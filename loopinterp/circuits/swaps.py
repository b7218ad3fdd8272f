"""Swaps of one position's state between two inputs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import torch
    from jaxtyping import Bool, Int
    from torch import Tensor
    from typing_extensions import Self


@dataclass(frozen=True)
class Swaps:
    """Pairs of inputs (base, source) with a position and a loop each.

    After ``loop`` loops, the state at ``position`` is taken from the source's run and put into
    the base's.

    Attributes:
        base: Base inputs.
        source: Source inputs.
        position: Position whose state is swapped.
        loop: The swap is made after so many loops.
        place: A number for each kind of swap; kinds count alike in a score.
        scored: Positions of the base that have an answer.
        n_loops: Loops of a full run.
    """

    base: Int[Tensor, "pair pos"]
    source: Int[Tensor, "pair pos"]
    position: Int[Tensor, " pair"]
    loop: Int[Tensor, " pair"]
    place: Int[Tensor, " pair"]
    scored: Bool[Tensor, "pair pos"]
    n_loops: int

    ARRAYS: ClassVar[tuple[str, ...]] = ("base", "source", "position", "loop", "place", "scored")

    def __len__(self) -> int:
        return len(self.base)

    def __getitem__(self, index: Tensor) -> Self:
        return dataclasses.replace(self, **{k: getattr(self, k)[index] for k in self.ARRAYS})

    def to(self, device: torch.device | str) -> Self:
        return dataclasses.replace(self, **{k: getattr(self, k).to(device) for k in self.ARRAYS})
