"""What is asked about a row of bits, with full-output prediction: copy, parity, number of ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from loopinterp.settings import settings
from loopinterp.tasks.full_output import FullOutput
from loopinterp.tasks.sampling import check_digits, random_bits
from loopinterp.tasks.task import Batch

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor


class BitPrompt(FullOutput):
    """A question about n bits, in the full-output format: ``BOS b_1 … b_n = EOS …``. T(n) = n.

    Tokens: bits 0 and 1, ``=`` (2), EOS (3, which is also the padding), BOS (4). Output classes:
    0, 1, EOS (2).

    Distributions: ``"uniform"`` (fair bits), ``"biased"`` (each example draws its probability
    of a one from {.05, .5, .95}).

    Source: arXiv 2409.15647.
    """

    symbols = ("0", "1")
    distributions = ("uniform", "biased")

    def from_bits(self, bits: Int[Tensor, "batch width"], n: Int[Tensor, " batch"]) -> Batch:
        """The batch of given bits; only the first ``n`` of each row count.

        Raises:
            InputError: ``bits`` are not 0 and 1, or a length does not fit.
        """
        check_digits(bits, n, 2, "bits")
        return self._batch([(bits, n)], n, n.clone())

    def _draw(self, kind: str, n: Tensor, generator: torch.Generator) -> Batch:
        return self.from_bits(random_bits(kind, len(n), int(n.max()), generator), n)


@settings
class Copy(BitPrompt):
    """The n bits again; see :class:`BitPrompt` for the format and the distributions.

    Bit k is asked for k - 1 positions after the ``=``, then EOS to the end.

    Example:
        >>> batch = Copy().from_bits(torch.tensor([[1, 0, 0]]), torch.tensor([3]))
        >>> batch.inputs.tolist(), batch.targets.tolist()
        ([[4, 1, 0, 0, 2, 3, 3, 3]], [[-100, -100, -100, -100, 1, 0, 0, 2]])
    """

    name = "copy"
    question = "copy of {}"

    def describe(self) -> str:
        return "The n bits again, answered from the '=' sign on and closed by EOS."

    def _solve(self, prompt: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
        return prompt, n


@settings
class Parity(BitPrompt):
    """Whether the number of ones is odd; see :class:`BitPrompt` for format and distributions.

    At the ``=`` the parity bit is asked for, then EOS to the end.

    Example:
        >>> batch = Parity().from_bits(torch.tensor([[1, 0, 1, 1]]), torch.tensor([4]))
        >>> batch.inputs.tolist()
        [[4, 1, 0, 1, 1, 2, 3]]
        >>> batch.targets.tolist()
        [[-100, -100, -100, -100, -100, 1, 2]]
    """

    name = "parity"
    question = "parity of {}"

    def answer_length(self, n: int) -> int:
        return 1

    def describe(self) -> str:
        return "Parity of n bits, answered at the '=' sign and closed by EOS."

    def _solve(self, prompt: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
        return (prompt == 1).sum(dim=1, keepdim=True) % 2, torch.ones_like(n)


@settings
class BinarySum(BitPrompt):
    """The number of ones; see :class:`BitPrompt` for the format and the distributions.

    The answer is that number in binary, least significant bit first, without leading zeros (a
    single 0 if there are no ones), then EOS to the end.

    Example:
        >>> batch = BinarySum().from_bits(torch.tensor([[1, 1, 0, 1, 1, 1]]), torch.tensor([6]))
        >>> batch.inputs.tolist()
        [[4, 1, 1, 0, 1, 1, 1, 2, 3, 3, 3]]
        >>> batch.targets[0, 7:].tolist()    # 5 = 101
        [1, 0, 1, 2]
    """

    name = "binary_sum"
    question = "ones in {}"
    least_first = ("answer",)

    def answer_length(self, n: int) -> int:
        return n.bit_length()

    def describe(self) -> str:
        return "How many of n bits are ones, in binary, from the '=' sign on and closed by EOS."

    def _solve(self, prompt: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
        ones = (prompt == 1).sum(dim=1)
        place = torch.arange(max(int(ones.max()).bit_length(), 1), device=prompt.device)
        shifted = ones[:, None] >> place
        return shifted & 1, (shifted > 0).sum(dim=1).clamp(min=1)
