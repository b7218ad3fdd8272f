"""What a run's logits were read from, for who reads them again and means those of the run."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch

from loopinterp.errors import InputError

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from loopinterp.models.transformer_lens_names import TransformerLensNames

_PREFIX = "readout."


@dataclass(frozen=True)
class RunReadout:
    """The end of a run.

    Attributes:
        state: The last state, that of each example's own last loop.
        positions: Those that the run's cache keeps, in their order there.
        by_example: Whether each example made a number of loops of its own.
        logits: What was read from the state; None where nothing was.
    """

    state: Float[Tensor, "batch pos d_model"]
    positions: Int[Tensor, " kept"]
    by_example: Bool[Tensor, ""]
    logits: Float[Tensor, "batch pos d_vocab_out"] | None = None

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

    def check(self, model: TransformerLensNames, *, own_last_loop: bool) -> None:
        """Raise unless a model's plain readout is what the run's was, of one loop for all.

        Args:
            model: The model of the run, as it is now.
            own_last_loop: Whether the loop after which the run was read is asked for.

        Raises:
            InputError: If hooks changed what was read, or the weights have changed; if some
                positions are missing or moved that a coda looks at; if there is no such loop.
        """
        if own_last_loop and bool(self.by_example):
            raise InputError(
                "loop",
                expected="a loop to read every example after, as each made its own number of them",
                given="None",
                fix="Pass e.g. loop=0, or cache a run with one n_loops for all.",
            )
        every = torch.arange(self.state.shape[1], device=self.positions.device)
        if model.coda and not torch.equal(self.positions, every):
            raise InputError(
                "cache",
                expected="all positions in their order: the heads of the coda look at them",
                given=f"positions {self.positions.tolist()} of {len(every)}",
                fix="Cache without pos_slice=, and select positions of the result.",
            )
        if self.logits is None:
            return
        logits = self.logits.to(model.device)
        gap = (model._readout(self.state.to(model.device)) - logits).abs()
        # Far above rounding, by whichever kernel.
        if not bool((gap <= torch.finfo(gap.dtype).eps ** 0.5 * logits.abs().max()).all()):
            raise InputError(
                "logit_attribution",
                expected="a model that reads the run's logits from its last state",
                given=f"logits that are off by up to {gap.max().item():.2g}",
                fix="Attribute a run whose coda and final norm no hook has changed, with the "
                "weights of that run.",
            )
