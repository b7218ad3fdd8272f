"""Whether the number of ones is odd, with full-output prediction."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from loopinterp.settings import settings
from loopinterp.tasks.bit_prompts import BitPrompt

if TYPE_CHECKING:
    from torch import Tensor


@settings
class Parity(BitPrompt):
    """The parity of n bits, in the full-output format: ``BOS b_1 … b_n = EOS …``. T(n) = n.

    Tokens: bits 0 and 1, ``=`` (2), EOS (3, which is also the padding), BOS (4). Output classes:
    0, 1, EOS (2). At the ``=`` the parity bit is asked for, then EOS to the end.

    Distributions: ``"uniform"`` (fair bits), ``"biased"`` (each example draws its probability
    of a one from {.05, .5, .95}).

    Source: arXiv 2409.15647.

    Example:
        >>> batch = Parity().from_bits(torch.tensor([[1, 0, 1, 1]]), torch.tensor([4]))
        >>> batch.inputs.tolist()
        [[4, 1, 0, 1, 1, 2, 3]]
        >>> batch.targets.tolist()
        [[-100, -100, -100, -100, -100, 1, 2]]
    """

    name = "parity"

    def answer_length(self, n: int) -> int:
        return 1

    def describe(self) -> str:
        return "Parity of n bits, answered at the '=' sign and closed by EOS."

    def _solve(self, tokens: Tensor, equals: Tensor) -> tuple[Tensor, Tensor]:
        ones = (self._bits(tokens, equals) == 1).sum(dim=1, keepdim=True)
        return ones % 2, torch.ones_like(equals)
