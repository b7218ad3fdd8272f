"""Binary arithmetic in the full-output format: ``a + b =`` and ``a * b =``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from pydantic import PositiveInt
from torch.nn.functional import pad

from loopinterp.errors import InputError
from loopinterp.settings import settings
from loopinterp.tasks import carries
from loopinterp.tasks.addition import check_operands, draw_bits
from loopinterp.tasks.full_output import FullOutput
from loopinterp.tasks.integers import operand_digits, product_digits
from loopinterp.tasks.prompt_reading import operands_of
from loopinterp.tasks.rows import same
from loopinterp.tasks.sampling import (
    check_digits,
    check_length,
    check_tokens,
    integers,
    lengths,
    random_bits,
)
from loopinterp.tasks.task import Batch

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor

OPERATOR = 2
"""The token of ``+``, and of ``*``."""


@settings
class TokenAddition(FullOutput):
    """a + b of n bits each, in the full-output format: ``BOS a_1 … a_n + b_1 … b_n = EOS …``.

    All numbers are written most significant bit first; the answer has n + 1 bits. So carries run
    from right to left, against the order in which causal attention can pass them on. T(n) = n.

    Tokens: bits 0 and 1, ``+`` (2), ``=`` (3), EOS (4, which is also the padding), BOS (5).
    Output classes: 0, 1, EOS (2).

    Distributions: those of :class:`loopinterp.tasks.Addition`: ``"uniform"``, ``"propagate"``,
    ``"chain"`` (the last bits generate, all others propagate).

    Source: arXiv 2409.15647.

    Example:
        >>> batch = TokenAddition().encode([(3, 5)], n=3)
        >>> batch.inputs.tolist()
        [[5, 0, 1, 1, 2, 1, 0, 1, 3, 4, 4, 4, 4]]
        >>> batch.targets[0, 8:].tolist()    # 3 + 5 = 1000
        [1, 0, 0, 0, 2]
    """

    name = "token_addition"
    symbols = ("0", "1", "+")
    distributions = ("uniform", "propagate", "chain")

    def prompt_length(self, n: int) -> int:
        return 2 * n + 1

    def answer_length(self, n: int) -> int:
        return n + 1

    def describe(self) -> str:
        return "Binary addition of n-bit numbers, a + b =, most significant bit first."

    def from_bits(
        self, a: Int[Tensor, "batch width"], b: Int[Tensor, "batch width"], n: Int[Tensor, " batch"]
    ) -> Batch:
        """The batch of given bits, most significant first; the first ``n`` of each row count.

        Raises:
            InputError: they are no bits, or a length does not fit.
        """
        check_operands(a, b, n)
        return self._batch([(a, n), same(OPERATOR, n), (b, n)], n, n.clone())

    def encode(self, operands: Sequence[tuple[int, int]], n: int) -> Batch:
        """The batch of given integers, each in 0..2^n - 1.

        Raises:
            InputError: no operands, or one that does not fit in ``n`` bits.
        """
        a, b = operand_digits(operands, n, n)
        return self.from_bits(a.flip(1), b.flip(1), torch.full((len(a),), n))

    def _draw(self, kind: str, n: Tensor, generator: torch.Generator) -> Batch:
        a, b = draw_bits(kind, len(n), int(n.max()), generator)
        return self.from_bits(_turn(a, n), _turn(b, n), n)

    def _solve(self, prompt: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
        operands, length = operands_of(prompt, n, operator=OPERATOR, base=2, task=self.name)
        n_a, n_b = length.unbind(dim=1)
        if not torch.equal(n_a, n_b):
            raise InputError(
                "inputs of task token_addition",
                expected="two operands of the same length in every row",
                given="a row without",
                fix="Write the shorter one with leading zeros.",
            )
        a, b = (pad(_turn(x, n_a), (0, 1)) for x in operands.unbind(dim=1))
        return _turn(carries.total(a, b), n_a + 1), n_a + 1


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

        Of each row the first ``m`` bits of ``a`` count, at most the task's, and ``n`` of ``b``.

        Raises:
            InputError: they are no bits, or a length does not fit.
        """
        check_digits(check_tokens(a, 2, "bits a")[:, : self.m], m, 2, "bits a")
        check_digits(b, n, 2, "bits b")
        return self._batch([(a, m), same(OPERATOR, n), (b, n)], n, n * m)

    def encode(self, operands: Sequence[tuple[int, int]], n: int, m: int | None = None) -> Batch:
        """The batch of given integers: a in 0..2^m - 1, b in 0..2^n - 1.

        Raises:
            InputError: no operands, or one that does not fit.
        """
        m = self.m if m is None else m
        a, b = operand_digits(operands, m, n)
        return self.from_bits(a, b, torch.full((len(a),), m), torch.full((len(b),), n))

    def sample_operands(
        self, m: int, n: int, *, batch_size: int, generator: torch.Generator
    ) -> Batch:
        """Draw products of ``m`` bits, at most the task's, and ``n`` bits, all of them fair.

        Raises:
            InputError: a length, the batch size or the generator is not one.
        """
        drawn = [lengths(k, batch_size=batch_size, generator=generator) for k in (m, n)]
        a, b = (random_bits("uniform", batch_size, k, generator) for k in (m, n))
        return self.from_bits(a, b, *drawn)

    def _draw(self, kind: str, n: Tensor, generator: torch.Generator) -> Batch:
        bits = "biased" if kind == "biased" else "uniform"
        a = random_bits(bits, len(n), self.m, generator)
        b = random_bits(bits, len(n), int(n.max()), generator)
        m = torch.full_like(n, self.m)
        if kind == "mixed":
            m = integers(1, self.m + 1, (len(n),), generator)
        return self.from_bits(a, b, m, n)

    def _solve(self, prompt: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
        operands, length = operands_of(prompt, n, operator=OPERATOR, base=2, task=self.name)
        a, b = operands.unbind(dim=1)
        return product_digits(a[:, : int(length[:, 0].max())], b, 2), n - 1


def _turn(bits: Int[Tensor, "batch width"], n: Int[Tensor, " batch"]) -> Tensor:
    """The first ``n`` bits of each row in the opposite order, then zeros."""
    column = torch.arange(bits.shape[1], device=bits.device)
    at = n[:, None] - 1 - column
    return bits.gather(1, at.clamp(min=0)).masked_fill(at < 0, 0)
