"""Binary multiplication in the token format ``a * b =``, least significant bit first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from pydantic import PositiveInt

from loopinterp.settings import settings
from loopinterp.tasks.full_output import FullOutput, place_of
from loopinterp.tasks.integers import carry_over, operand_digits
from loopinterp.tasks.rows import cut, same
from loopinterp.tasks.sampling import (
    check_digits,
    check_length,
    check_tokens,
    integers,
    random_bits,
)
from loopinterp.tasks.task import Batch

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor

TIMES = 2


@settings
class Multiplication(FullOutput):
    """a * b, m bits times n bits, in the full-output format: ``BOS a_1 … a_m * b_1 … b_n = EOS …``.

    All numbers are written least significant bit first; the answer has n + m bits. The length n
    is that of b. T = n m.

    Tokens: bits 0 and 1, ``*`` (2), ``=`` (3), EOS (4, which is also the padding), BOS (5).
    Output classes: 0, 1, EOS (2).

    Distributions: ``"uniform"`` (a has m bits, all bits are fair), ``"biased"`` (each factor
    draws the probability of a one from {.05, .5, .95}), ``"mixed"`` (fair bits, and each example
    draws the length of its a from 1..m, as the published training data do).

    Args:
        m: Most bits of a.

    Raises:
        ConfigError: ``m`` is not an integer of at least 1.

    Source: arXiv 2409.15647.

    Example:
        >>> batch = Multiplication().encode([(3, 6)], n=3)
        >>> batch.inputs.tolist()
        [[5, 1, 1, 2, 0, 1, 1, 3, 4, 4, 4, 4, 4]]
        >>> batch.targets[0, 7:].tolist()    # 18 = 10010, read backwards
        [0, 1, 0, 0, 1, 2]
    """

    name = "multiplication"
    symbols = ("0", "1", "*")
    distributions = ("uniform", "biased", "mixed")
    least_first = ("prompt", "answer")

    m: PositiveInt = 2

    def n_loops(self, n: int) -> int:
        return check_length(n) * self.m

    def prompt_length(self, n: int) -> int:
        return n + self.m + 1

    def answer_length(self, n: int) -> int:
        return n + self.m

    def describe(self) -> str:
        return f"Binary multiplication, {self.m} bits * n bits =, least significant bit first."

    def from_bits(
        self,
        a: Int[Tensor, "batch width_a"],
        b: Int[Tensor, "batch width_b"],
        m: Int[Tensor, " batch"],
        n: Int[Tensor, " batch"],
    ) -> Batch:
        """The batch of given bits, least significant first.

        Args:
            a: Bits of the first factors; the first ``m`` of each row count.
            b: Bits of the second factors; the first ``n`` of each row count.
            m: Length of each first factor, at most the task's ``m``.
            n: Length of each second factor.

        Raises:
            InputError: they are no bits, or a length does not fit.
        """
        check_digits(check_tokens(a, 2, "bits a")[:, : self.m], m, 2, "bits a")
        check_digits(b, n, 2, "bits b")
        return self._batch([(a, m), same(TIMES, n), (b, n)], n, n * m)

    def encode(self, operands: Sequence[tuple[int, int]], n: int, m: int | None = None) -> Batch:
        """The batch of given integers: a in 0..2^m - 1, b in 0..2^n - 1.

        Raises:
            InputError: no operands, or one that does not fit.
        """
        m = self.m if m is None else m
        a, b = operand_digits(operands, m, n)
        return self.from_bits(a, b, torch.full((len(a),), m), torch.full((len(b),), n))

    def _draw(self, kind: str, n: Tensor, generator: torch.Generator) -> Batch:
        bits = "biased" if kind == "biased" else "uniform"
        a = random_bits(bits, len(n), self.m, generator)
        b = random_bits(bits, len(n), int(n.max()), generator)
        m = torch.full_like(n, self.m)
        if kind == "mixed":
            m = integers(1, self.m + 1, (len(n),), generator)
        return self.from_bits(a, b, m, n)

    def _solve(self, tokens: Tensor, equals: Tensor) -> tuple[Tensor, Tensor]:
        m = place_of(TIMES, tokens, self.name) - 1
        n = equals - m - 2
        a, b = cut(tokens, m * 0 + 1, m), cut(tokens, m + 2, n)
        columns = b.new_zeros((len(b), a.shape[1] + b.shape[1]))
        for i in range(a.shape[1]):
            columns[:, i : i + b.shape[1]] += a[:, i : i + 1] * b
        return carry_over(columns, 2), n + m
