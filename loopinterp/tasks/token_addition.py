"""Binary addition in the token format ``a + b =``, most significant bit first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from loopinterp.settings import settings
from loopinterp.tasks import carries
from loopinterp.tasks.addition import check_operands, draw_bits
from loopinterp.tasks.full_output import FullOutput, place_of
from loopinterp.tasks.integers import operand_digits
from loopinterp.tasks.rows import cut, same
from loopinterp.tasks.task import Batch

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor

PLUS = 2


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
        return self._batch([(a, n), same(PLUS, n), (b, n)], n, n.clone())

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

    def _solve(self, tokens: Tensor, equals: Tensor) -> tuple[Tensor, Tensor]:
        n = place_of(PLUS, tokens, self.name) - 1
        a, b = cut(tokens, n * 0 + 1, n), cut(tokens, n + 2, equals - n - 2)
        zero = torch.zeros_like(a[:, :1])
        a, b = (torch.cat([_turn(x, n), zero], dim=1) for x in (a, b))
        return _turn(carries.total(a, b), n + 1), n + 1


def _turn(bits: Int[Tensor, "batch width"], n: Int[Tensor, " batch"]) -> Tensor:
    """The first ``n`` bits of each row in the opposite order, then zeros."""
    column = torch.arange(bits.shape[1], device=bits.device)
    at = n[:, None] - 1 - column
    return bits.gather(1, at.clamp(min=0)).masked_fill(at < 0, 0)
