"""What a run's logits were read from, for who reads them again and means those of the run."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int, UInt8
    from torch import Tensor

_PREFIX = "readout."


@dataclass(frozen=True)
class RunReadout:
    """The end of a run.

    Attributes:
        state: The last state, that of each example's own last loop.
        positions: Those that the run's cache keeps, in their order there.
        by_example: Whether each example made a number of loops of its own.
        logits: What was read from the state; None where nothing was.
        weights: Where nothing was, a digest of the weights that would have read it.
    """

    state: Float[Tensor, "batch pos d_model"]
    positions: Int[Tensor, " kept"]
    by_example: Bool[Tensor, ""]
    logits: Float[Tensor, "batch pos d_vocab_out"] | None = None
    weights: UInt8[Tensor, " byte"] | None = None

    def tensors(self) -> dict[str, Tensor]:
        """As a file has it, under names that no activation has."""
        return {_PREFIX + name: x for name, x in vars(self).items() if x is not None}

    @classmethod
    def names(cls) -> list[str]:
        """All names that :meth:`tensors` may have."""
        return [_PREFIX + field.name for field in fields(cls)]

    @classmethod
    def take(cls, tensors: dict[str, Tensor]) -> RunReadout | None:
        """Take it out of what a file holds; None where it is not there."""
        found = {name.removeprefix(_PREFIX): tensors.pop(name, None) for name in cls.names()}
        needed = (found[name] for name in ("state", "positions", "by_example"))
        return None if any(x is None for x in needed) else cls(**found)  # type: ignore[arg-type]
