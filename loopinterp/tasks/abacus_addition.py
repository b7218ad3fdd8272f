"""Decimal addition by next-token prediction, in the format of the abacus embeddings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import torch
from pydantic import Field
from torch.nn.functional import pad

from loopinterp.settings import settings
from loopinterp.tasks.decimal_operands import ALPHABET as ALPHABET
from loopinterp.tasks.decimal_operands import DecimalOperands
from loopinterp.tasks.integers import carry_over, n_significant
from loopinterp.tasks.sampling import integers

if TYPE_CHECKING:
    from torch import Tensor


class _Sum(DecimalOperands):
    """The sum of several numbers."""

    operator = "+"
    hard = "chain"

    def answer_length(self, n: int) -> int:
        return n + len(str(self.n_operands - 1))  # k numbers carry at most k - 1 out of n columns

    def _solve(self, digits: Tensor, n_digits: Tensor) -> tuple[Tensor, Tensor]:
        more = len(str(self.n_operands - 1))
        total = carry_over(pad(digits.sum(dim=1), (0, more)), 10)
        return total, torch.maximum(n_digits.amax(dim=1), n_significant(total))

    def _draw_hard(self, digits: Tensor, generator: torch.Generator) -> Tensor:
        # Each column sums to 9, in parts as the random digits cut it.
        cuts = pad(digits[:, :-1].sort(dim=1).values, (0, 0, 1, 0))
        digits = pad(cuts, (0, 0, 0, 1), value=9).diff(dim=1)
        rows = (len(digits),)
        a = integers(1, 10, rows, generator)
        digits[:, 0, 0], digits[:, 1, 0] = a, 10 - a + integers(0, 9, rows, generator) % a
        return digits


@settings
class AbacusAddition(_Sum):
    """a + b in decimal, next token by next token: ``a + b = sum $``, least significant first.

    Format, length and distributions are those of :class:`DecimalOperands`; the hard one is
    ``"chain"``: the first digits make a carry, which all others pass on, and operands may begin
    with zeros. The sum is as long as the longer operand, and one digit more if there is a carry
    out of it. T(n) = n + 1.

    Source: arXiv 2405.17399.

    Example:
        >>> task = AbacusAddition()
        >>> batch = task.encode([(95, 8)])
        >>> "".join(ALPHABET[t] for t in batch.inputs[0].tolist())
        '59+8=301$'
        >>> [ALPHABET[t] for t in batch.targets[0].tolist() if t >= 0]
        ['3', '0', '1', '$']
    """

    name = "abacus_addition"

    def describe(self) -> str:
        return "Decimal addition, a+b=sum$ with the least significant digit first, token by token."


@settings
class AbacusSum(_Sum):
    """The sum of several numbers, next token by next token: ``a + b + c = sum $``.

    All is as in :class:`AbacusAddition`, which is the sum of two. T(n) = n + 1 up to ten numbers,
    and one loop more for each further digit that they may carry out of n columns.

    Args:
        n_operands: How many numbers, at least 2.

    Raises:
        ConfigError: ``n_operands`` is not an integer of at least 2.

    Source: the format of arXiv 2405.17399, which has two operands.

    Example:
        >>> task = AbacusSum(n_operands=3)
        >>> batch = task.encode([(95, 8, 900)])
        >>> "".join(ALPHABET[t] for t in batch.inputs[0].tolist())
        '59+8+009=3001$$$'
        >>> task.decode(batch)
        ['95 + 8 + 900 = 1003']
    """

    name = "abacus_sum"

    n_operands: Annotated[int, Field(ge=2)] = 3

    def describe(self) -> str:
        return f"Decimal sum of {self.n_operands} numbers, least significant digit first."
