"""How many ones there are, in binary, with full-output prediction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from loopinterp.tasks.full_output import FullOutput
from loopinterp.tasks.rows import cut
from loopinterp.tasks.sampling import check_fits, check_tokens, random_bits
from loopinterp.tasks.task import Batch

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor


@dataclass(frozen=True)
class BinarySum(FullOutput):
    """The number of ones among n bits, in the full-output format: ``BOS b_1 … b_n = EOS …``.

    The answer is that number in binary, least significant bit first, without leading zeros (a
    single 0 if there are no ones), then EOS to the end. T(n) = n.

    Tokens: bits 0 and 1, ``=`` (2), EOS (3, which is also the padding), BOS (4). Output classes:
    0, 1, EOS (2).

    Distributions: ``"uniform"`` (fair bits), ``"biased"`` (each example draws its probability
    of a one from {.05, .5, .95}).

    Source: arXiv 2409.15647.

    Example:
        >>> batch = BinarySum().from_bits(torch.tensor([[1, 1, 0, 1, 1, 1]]), torch.tensor([6]))
        >>> batch.inputs.tolist()
        [[4, 1, 1, 0, 1, 1, 1, 2, 3, 3, 3]]
        >>> batch.targets[0, 7:].tolist()    # 5 = 101
        [1, 0, 1, 2]
    """

    @property
    def name(self) -> str:
        return "binary_sum"

    @property
    def symbols(self) -> tuple[str, ...]:
        return ("0", "1")

    @property
    def distributions(self) -> tuple[str, ...]:
        return ("uniform", "biased")

    def prompt_length(self, n: int) -> int:
        return n

    def answer_length(self, n: int) -> int:
        return n.bit_length()

    def describe(self) -> str:
        return "How many of n bits are ones, in binary, from the '=' sign on and closed by EOS."

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

    def _solve(self, tokens: Tensor, equals: Tensor) -> tuple[Tensor, Tensor]:
        ones = (cut(tokens, equals * 0 + 1, equals - 1) == 1).sum(dim=1)
        place = torch.arange(max(int(ones.max()).bit_length(), 1), device=tokens.device)
        digits = (ones[:, None] >> place) & 1
        length = ((ones[:, None] >> place) > 0).sum(dim=1).clamp(min=1)
        return digits, length
