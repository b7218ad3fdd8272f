"""Copying, with full-output prediction: n bits, and the same bits again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loopinterp.settings import settings
from loopinterp.tasks.bit_prompts import BitPrompt

if TYPE_CHECKING:
    from torch import Tensor


@settings
class Copy(BitPrompt):
    """n bits again, in the full-output format: ``BOS b_1 … b_n = EOS …``. T(n) = n.

    Tokens: bits 0 and 1, ``=`` (2), EOS (3, which is also the padding), BOS (4). Output classes:
    0, 1, EOS (2). Bit k is asked for k - 1 positions after the ``=``, then EOS to the end.

    Distributions: ``"uniform"`` (fair bits), ``"biased"`` (each example draws its probability
    of a one from {.05, .5, .95}).

    Source: arXiv 2409.15647.

    Example:
        >>> import torch
        >>> batch = Copy().from_bits(torch.tensor([[1, 0, 0]]), torch.tensor([3]))
        >>> batch.inputs.tolist(), batch.targets.tolist()
        ([[4, 1, 0, 0, 2, 3, 3, 3]], [[-100, -100, -100, -100, 1, 0, 0, 2]])
    """

    name = "copy"

    def answer_length(self, n: int) -> int:
        return n

    def describe(self) -> str:
        return "The n bits again, answered from the '=' sign on and closed by EOS."

    def _solve(self, tokens: Tensor, equals: Tensor) -> tuple[Tensor, Tensor]:
        return self._bits(tokens, equals), equals - 1
