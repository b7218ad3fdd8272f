"""Pairs of additions that differ in one carry: the inputs of interchange interventions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from loopinterp.errors import InputError, unknown_name
from loopinterp.tasks.addition import Addition, draw_bits
from loopinterp.tasks.sampling import coins, lengths
from loopinterp.tasks.task import Batch

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor


@dataclass(frozen=True)
class CarryPairs:
    """Pairs (base, source) whose carry INTO one position is opposite.

    Attributes:
        base: The base inputs.
        source: The source inputs, pair by pair.
        position: Model position of the carry that differs.
        bit: Bit index of that position (``position - 1`` after a BOS token).
        start: Model position of the bit that decides the carry: it generates in one of the pair
            and kills in the other.
        chain_length: Number of propagating positions between ``start`` and ``position``.
        carry: The carry into ``position`` in the base; in the source it is ``1 - carry``.
    """

    base: Batch
    source: Batch
    position: int
    bit: int
    start: int
    chain_length: int
    carry: Int[Tensor, " batch"]


def carry_pairs(
    n: int,
    position: int,
    chain_length: int,
    batch_size: int,
    *,
    generator: torch.Generator,
    minimal: bool = True,
    propagate_after: int = 0,
    distribution: str = "uniform",
    task: Addition | None = None,
) -> CarryPairs:
    """Draw pairs of additions that differ in the carry into ``position``, and say where from.

    With i the bit at ``position`` and k the ``chain_length``, in both members of a pair bits
    i-k .. i-1 propagate, so the carry into i is decided at bit s = i-k-1. Bit s generates
    (1, 1) in one member and kills (0, 0) in the other; which of the two is the base is a fair
    coin. Bits i and above are the same in both. So are all other bits if ``minimal``; otherwise
    the bits below s, and which operand holds the 1 of each propagating bit of the chain, are
    drawn separately, and the pair differs there without any effect on position i or above.

    Args:
        n: Bits of each operand.
        position: Model position of bit i, as in :meth:`Addition.carries`: i + 1 in the pairs
            format (after BOS), i in the features format. Bit 0 takes no carry, so i >= 1.
        chain_length: k, in 0..i-1.
        batch_size: Number of pairs.
        generator: Source of randomness; its device is where the pairs are made.
        minimal: The pair differs in bit s only.
        propagate_after: Make the first so many bits from i on propagate, so that a changed
            carry runs on: at most n - i.
        distribution: ``"uniform"`` or ``"propagate"``, for all other bits.
        task: The format; pairs if omitted.

    Raises:
        InputError: a position, chain or run-on that does not fit in ``n`` bits; an unknown
            distribution.

    Example:
        >>> g = torch.Generator().manual_seed(0)
        >>> pairs = carry_pairs(8, position=6, chain_length=3, batch_size=4, generator=g)
        >>> task = Addition()
        >>> bool((task.carry_in(pairs.base)[:, 6] == 1 - task.carry_in(pairs.source)[:, 6]).all())
        True
        >>> task.chain_length_in(pairs.base)[:, 6].tolist()
        [3, 3, 3, 3]
    """
    task = task or Addition()
    bit = position - task.offset
    each = lengths(n, batch_size=batch_size, generator=generator)
    _check_fit(n, bit, chain_length, propagate_after, task.offset)
    if distribution not in ("uniform", "propagate"):
        raise unknown_name("distribution of carry_pairs", distribution, ("uniform", "propagate"))
    start = bit - chain_length - 1

    a, b = draw_bits(distribution, batch_size, n, generator)
    b[:, bit : bit + propagate_after] = 1 - a[:, bit : bit + propagate_after]
    a2, b2 = a.clone(), b.clone()
    if not minimal:
        a2[:, :bit], b2[:, :bit] = draw_bits(distribution, batch_size, bit, generator)
    carry = coins(0.5, (batch_size,), generator).long()
    for x, y, value in ((a, b, carry), (a2, b2, 1 - carry)):
        y[:, start + 1 : bit] = 1 - x[:, start + 1 : bit]
        x[:, start] = y[:, start] = value
    return CarryPairs(
        base=task.from_bits(a, b, each),
        source=task.from_bits(a2, b2, each),
        position=position,
        bit=bit,
        start=start + task.offset,
        chain_length=chain_length,
        carry=carry,
    )


def _check_fit(n: int, bit: int, chain_length: int, propagate_after: int, offset: int) -> None:
    if not 1 <= bit < n:
        raise InputError(
            "position",
            expected=f"a position in {1 + offset}..{n - 1 + offset} (bits 1..{n - 1}; bit 0 takes "
            "no carry)",
            given=str(bit + offset),
            fix="Pass a position within, or a larger n.",
        )
    if not 0 <= chain_length < bit:
        raise InputError(
            "chain_length",
            expected=f"0..{bit - 1}, so that the chain and the bit that decides it lie below bit "
            f"{bit}",
            given=str(chain_length),
            fix="Pass a shorter chain, or a higher position.",
        )
    if not 0 <= propagate_after <= n - bit:
        raise InputError(
            "propagate_after",
            expected=f"0..{n - bit}, the bits from {bit} on",
            given=str(propagate_after),
            fix="Pass fewer, or a larger n.",
        )
