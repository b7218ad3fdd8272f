"""Decimal multiplication by next-token prediction, in the format of the abacus embeddings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loopinterp.settings import settings
from loopinterp.tasks.decimal_operands import DecimalOperands
from loopinterp.tasks.integers import n_significant, product_digits
from loopinterp.tasks.sampling import choice, coins, integers

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SHARES_OF_NINES = (0.5, 0.8, 0.95)


@settings
class AbacusMultiplication(DecimalOperands):
    """a * b in decimal, next token by next token: ``a * b = product $``, least significant first.

    Format, length and distributions are those of :class:`DecimalOperands`; the hard one is
    ``"nines"``: both factors have n digits, and each example draws the probability of a 9 from
    {.5, .8, .95} (the other digits are 1..9), so that all columns are large, and carries long. The
    product is written without leading zeros, 0 as a single one. T(n) = 2 n, a loop for each digit
    of the longest product.

    Source: arXiv 2405.17399, whose grid has operands of up to 15 digits in training, 25 in testing.

    Example:
        >>> task = AbacusMultiplication()
        >>> batch = task.encode([(25, 14)])
        >>> "".join(task.symbols[t] for t in batch.inputs[0].tolist())
        '52*41=053$'
        >>> task.decode(batch), task.n_loops(2)
        (['25 * 14 = 350'], 4)
    """

    name = "abacus_multiplication"
    operator = "*"
    hard = "nines"

    def answer_length(self, n: int) -> int:
        return 2 * n

    def describe(self) -> str:
        return "Decimal multiplication, a*b=product$, least significant digit first."

    def _solve(self, digits: Tensor, n_digits: Tensor) -> tuple[Tensor, Tensor]:
        a, b = digits.unbind(dim=1)
        product = product_digits(a, b, 10)
        return product, n_significant(product).clamp(min=1)

    def _draw_hard(self, digits: Tensor, generator: torch.Generator) -> Tensor:
        share = choice(SHARES_OF_NINES, (len(digits), 1, 1), generator)
        others = integers(1, 10, digits.shape, generator)
        return others.masked_fill(coins(share, digits.shape, generator), 9)
