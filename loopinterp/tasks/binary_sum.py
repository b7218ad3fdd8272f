"""How many ones there are, in binary, with full-output prediction."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from loopinterp.settings import settings
from loopinterp.tasks.bit_prompts import BitPrompt

if TYPE_CHECKING:
    from torch import Tensor


@settings
class BinarySum(BitPrompt):
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

    name = "binary_sum"

    def answer_length(self, n: int) -> int:
        return n.bit_length()

    def describe(self) -> str:
        return "How many of n bits are ones, in binary, from the '=' sign on and closed by EOS."

    def _solve(self, tokens: Tensor, equals: Tensor) -> tuple[Tensor, Tensor]:
        ones = (self._bits(tokens, equals) == 1).sum(dim=1)
        place = torch.arange(max(int(ones.max()).bit_length(), 1), device=tokens.device)
        digits = (ones[:, None] >> place) & 1
        length = ((ones[:, None] >> place) > 0).sum(dim=1).clamp(min=1)
        return digits, length
