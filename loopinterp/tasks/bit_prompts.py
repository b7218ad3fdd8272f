"""What the full-output tasks share whose prompt is a row of bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from loopinterp.tasks.full_output import FullOutput
from loopinterp.tasks.rows import cut
from loopinterp.tasks.sampling import check_fits, check_tokens, random_bits
from loopinterp.tasks.task import Batch

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor


class BitPrompt(FullOutput):
    """A full-output task that is asked about n bits."""

    symbols = ("0", "1")
    distributions = ("uniform", "biased")

    def prompt_length(self, n: int) -> int:
        return n

    def from_bits(self, bits: Int[Tensor, "batch width"], n: Int[Tensor, " batch"]) -> Batch:
        """The batch of given bits; only the first ``n`` of each row count.

        Raises:
            InputError: ``bits`` are not 0 and 1, or a length does not fit.
        """
        check_tokens(bits, 2, "bits")
        check_fits(n, bits)
        return self._batch([(bits, n)], n, n.clone())

    def _draw(self, kind: str, n: Tensor, generator: torch.Generator) -> Batch:
        return self.from_bits(random_bits(kind, len(n), int(n.max()), generator), n)

    @staticmethod
    def _bits(tokens: Tensor, equals: Tensor) -> Tensor:
        """The bits of the prompts, and 0 where a row has fewer than the longest."""
        return cut(tokens, torch.ones_like(equals), equals - 1)
