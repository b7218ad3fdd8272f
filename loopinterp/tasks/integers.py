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
    operands: Sequence[Sequence[int]], *n: int, base: int = 2
) -> tuple[Int[Tensor, "example _"], ...]:
    """The digits of the first operands, of the second, and so on: ``n`` of each; the least first.

    Raises:
        InputError: they are not as many operands, or a number does not fit in its digits.

    Example:
        >>> a, b = operand_digits([(6, 1), (1, 0)], 3, 2)
        >>> a.tolist(), b.tolist()
        ([[0, 1, 1], [1, 0, 0]], [[1, 0], [0, 0]])
    """
    columns = zip(*check_operands(operands, len(n)))
    return tuple(to_digits(column, k, base) for column, k in zip(columns, n))


def check_operands(operands: Iterable[Any], n: int = 2) -> list[tuple[Any, ...]]:
    """The operands as a list of ``n`` each, which they must be: tuples, lists or rows of arrays."""
    try:
        found = [tuple(example) for example in operands]
    except TypeError:  # not a sequence, or not of sequences
        found = []
    if not found or any(len(example) != n for example in found):
        kind, several = ("pair", "pairs") if n == 2 else (f"list of {n}", f"lists of {n}")
        raise InputError(
            "operands",
            expected=f"at least one {kind} of integers, and nothing but {several}",
            given=reprlib.repr(operands),
            fix=f"Pass e.g. [{tuple(range(3, 3 + 2 * n, 2))}].",
        )
    return found


def to_digits(numbers: Sequence[int], n: int, base: int) -> Int[Tensor, "number n"]:
    """The ``n`` digits of each number, the least significant first.

    Raises:
        InputError: a number is no integer of at least 0, or does not fit.
    """
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


def product_digits(
    a: Int[Tensor, "batch width_a"], b: Int[Tensor, "batch width_b"], base: int
) -> Int[Tensor, "batch width"]:
    """Digits of the products, the least significant first, as many as both factors together.

    Example:
        >>> product_digits(torch.tensor([[5, 2]]), torch.tensor([[4, 1]]), 10).tolist()  # 25 * 14
        [[0, 5, 3, 0]]
    """
    columns = b.new_zeros((len(b), a.shape[1] + b.shape[1]))
    for i in range(a.shape[1]):
        columns[:, i : i + b.shape[1]] += a[:, i : i + 1] * b
    return carry_over(columns, base)


def n_significant(digits: Int[Tensor, "batch width"]) -> Int[Tensor, " batch"]:
    """How many digits (least significant first) each number has without leading zeros; 0 of 0.

    Example:
        >>> n_significant(torch.tensor([[3, 0, 1, 0], [0, 0, 0, 0]])).tolist()
        [3, 0]
    """
    column = torch.arange(1, digits.shape[1] + 1, device=digits.device)
    return ((digits > 0) * column).amax(dim=1)


def lead(
    digits: Int[Tensor, "*batch width"],
    n_digits: Int[Tensor, "*batch"],
    first: Int[Tensor, "*batch"],
) -> Int[Tensor, "*batch width"]:
    """Numbers of ``n_digits`` (least significant first) with another leading digit.

    Numbers of one digit stay as they are, as a single 0 is well written.

    Example:
        >>> digits, n_digits = torch.tensor([[4, 0, 9], [0, 9, 9]]), torch.tensor([2, 1])
        >>> lead(digits, n_digits, torch.tensor([7, 7])).tolist()
        [[4, 7, 9], [0, 9, 9]]
    """
    at = (n_digits - 1)[..., None]
    fresh = torch.where(at > 0, first[..., None], digits.gather(-1, at))
    return digits.scatter(-1, at, fresh)
