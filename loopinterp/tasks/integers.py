"""Python integers of any size as digits in tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from loopinterp.errors import InputError, check_integer
from loopinterp.tasks.sampling import check_length

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor


def to_digits(numbers: Sequence[int], n: int, base: int = 2) -> Int[Tensor, "number n"]:
    """The ``n`` digits of each number, least significant first.

    Raises:
        InputError: there are no numbers, or one does not fit in ``n`` digits.

    Example:
        >>> to_digits([6, 1], 3).tolist()
        [[0, 1, 1], [1, 0, 0]]
    """
    check_length(n)
    if not numbers:
        raise InputError(
            "operands", expected="at least one pair", given="none", fix="Pass e.g. [(3, 5)]."
        )
    most = base**n - 1
    fix = f"It must fit in {n} digits to base {base}: pass a larger n, or a smaller number."
    integers = [check_integer("operand", x, least=0, most=most, fix=fix) for x in numbers]
    return torch.tensor([_digits(x, n, base) for x in integers])


def _digits(x: int, n: int, base: int) -> list[int]:
    out = []
    for _ in range(n):
        x, digit = divmod(x, base)
        out.append(digit)
    return out


def carry_over(columns: Int[Tensor, "batch width"], base: int) -> Int[Tensor, "batch width"]:
    """Digits of the number whose columns (least significant first) are summed but not carried.

    What is carried beyond the last column is dropped.

    Example:
        >>> carry_over(torch.tensor([[12, 9, 0]]), 10).tolist()
        [[2, 0, 1]]
    """
    carry = torch.zeros_like(columns[:, 0])
    digits = []
    for column in columns.unbind(dim=1):
        total = column + carry
        digits.append(total % base)
        carry = total // base
    return torch.stack(digits, dim=1)
