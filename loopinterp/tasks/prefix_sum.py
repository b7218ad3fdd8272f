"""Prefix sums mod m; mod 2 they are the running XOR of the bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from loopinterp.settings import settings
from loopinterp.tasks.examples_in_words import spell
from loopinterp.tasks.rows import join, same
from loopinterp.tasks.sampling import (
    Sampler,
    check_digits,
    check_length,
    check_tokens,
    integers,
    random_bits,
)
from loopinterp.tasks.task import IGNORE, Batch

if TYPE_CHECKING:
    import torch
    from jaxtyping import Int
    from torch import Tensor


@settings
class PrefixSum(Sampler):
    """Running sum mod m of n digits after a BOS token; mod 2, the parity of all bits so far.

    Tokens: digits 0 .. m - 1, BOS (m), PAD (m + 1, on the right). Targets ``IGNORE`` at BOS and
    PAD. T(n) = n + 1.

    Distributions: ``"uniform"`` (each digit as likely as any other), ``"biased"`` (each example
    draws the probability that a digit is not 0 from {.05, .5, .95}).

    Args:
        modulus: m, at least 2.

    Raises:
        ConfigError: ``modulus`` is not an integer of at least 2.

    Source: the prefix-sum task of arXiv 2604.15259.

    Example:
        >>> import torch
        >>> batch = PrefixSum().from_bits(torch.tensor([[1, 0, 1, 1]]), torch.tensor([4]))
        >>> batch.inputs.tolist(), batch.targets.tolist()
        ([[2, 1, 0, 1, 1]], [[-100, 1, 1, 0, 1]])
        >>> PrefixSum(modulus=10).targets(torch.tensor([[10, 7, 7, 7]])).tolist()
        [[-100, 7, 4, 1]]
    """

    name = "prefix_sum"
    distributions = ("uniform", "biased")

    modulus: Annotated[int, Field(ge=2)] = 2

    @property
    def d_vocab(self) -> int:
        return self.modulus + 2

    @property
    def d_vocab_out(self) -> int:
        return self.modulus

    def n_positions(self, n: int) -> int:
        """BOS and n digits."""
        return check_length(n) + 1

    def describe(self) -> str:
        what = "XOR of n bits" if self.modulus == 2 else f"sum of n digits mod {self.modulus}"
        return f"Running {what}, answered at every one."

    def say(self, row: Sequence[int], answer: Sequence[int] | None) -> str:
        space = "" if self.modulus <= 10 else " "
        real = [digit for digit in row if digit < self.modulus]
        what = "running XOR" if self.modulus == 2 else f"running sum mod {self.modulus}"
        said = f"{what} of {spell(real, separator=space)} ="
        if answer is None:
            return said
        return f"{said} {spell(answer[1 : len(real) + 1], separator=space)}"

    def from_bits(self, bits: Int[Tensor, "batch width"], n: Int[Tensor, " batch"]) -> Batch:
        """The batch of given bits (mod m: digits); only the first ``n`` of each row count.

        Raises:
            InputError: a digit is not below the modulus, or a length does not fit.
        """
        check_digits(bits, n, self.modulus, "bits")
        parts = [same(self.modulus, n), (bits, n)]
        tokens = join(parts, width=bits.shape[1] + 1, fill=self.modulus + 1)
        return Batch(tokens, self.targets(tokens), n, n + 1, self)

    def targets(self, inputs: Batch | Tensor) -> Int[Tensor, "batch pos"]:
        """The exact answer to given inputs: the running sum, ``IGNORE`` at BOS and PAD.

        Raises:
            InputError: the inputs are not tokens of this task.
        """
        tokens = check_tokens(inputs, self.modulus + 2)
        special = tokens >= self.modulus
        answer = tokens.masked_fill(special, 0).cumsum(dim=1) % self.modulus
        return answer.masked_fill(special, IGNORE)

    def _draw(self, kind: str, n: Tensor, generator: torch.Generator) -> Batch:
        shape = (len(n), int(n.max()))
        if self.modulus == 2:
            return self.from_bits(random_bits(kind, *shape, generator), n)
        digits = integers(0 if kind == "uniform" else 1, self.modulus, shape, generator)
        if kind == "biased":
            digits = digits * random_bits(kind, *shape, generator)
        return self.from_bits(digits, n)
