"""Python integers of any size as digits in tensors."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from loopinterp.errors import InputError, check_integer
from loopinterp.tasks.sampling import check_length

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor


def operand_digits(
    operands: Sequence[tuple[int, int]], n_a: int, n_b: int, base: int = 2
) -> tuple[Int[Tensor, "pair n_a"], Int[Tensor, "pair n_b"]]:
    """The ``n_a`` digits of the first operands, and the ``n_b`` of the second; the least first.

    Raises:
        InputError: they are no pairs, or a number does not fit in its digits.

    Example:
        >>> a, b = operand_digits([(6, 1), (1, 0)], 3, 2)
        >>> a.tolist(), b.tolist()
        ([[0, 1, 1], [1, 0, 0]], [[1, 0], [0, 0]])
    """
    first, second = zip(*check_pairs(operands))
    return _to_digits(first, n_a, base), _to_digits(second, n_b, base)


def check_pairs(operands: Iterable[Any]) -> list[tuple[int, int]]:
    """The operands as a list of pairs, which they must be: tuples, lists or rows of an array."""
    try:
        pairs = [(a, b) for a, b in operands]
    except (TypeError, ValueError):  # not a sequence, or not of pairs
        pairs = []
    if not pairs:
        raise InputError(
            "operands",
            expected="at least one pair of integers, and nothing but pairs",
            given=reprlib.repr(operands),
            fix="Pass e.g. [(3, 5)].",
        )
    return pairs


def _to_digits(numbers: Sequence[int], n: int, base: int) -> Tensor:
    most = base ** check_length(n) - 1
    fix = f"It must fit in {n} digits to base {base}: pass a larger n, or a smaller number."
    integers = [check_integer("operand", x, least=0, most=most, fix=fix) for x in numbers]
    return torch.tensor([[x // base**k % base for k in range(n)] for x in integers])


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
