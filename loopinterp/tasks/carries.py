"""Carries of an addition, exact for any length; the last axis has the least significant bit first.

    generate g_i = a_i AND b_i,  propagate p_i = a_i XOR b_i,  c_i = g_i OR (p_i AND c_{i-1})

The last position j <= i that does not propagate decides the carry out of i: :math:`c_i = g_j`, and
0 if there is none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

if TYPE_CHECKING:
    from jaxtyping import Bool, Int
    from torch import Tensor


def generate(
    a: Int[Tensor, "*batch pos"], b: Int[Tensor, "*batch pos"]
) -> Bool[Tensor, "*batch pos"]:
    """g_i: the position makes a carry whatever comes in."""
    return (a & b).bool()


def propagate(
    a: Int[Tensor, "*batch pos"], b: Int[Tensor, "*batch pos"]
) -> Bool[Tensor, "*batch pos"]:
    """p_i: the position passes its carry-in on."""
    return (a ^ b).bool()


def chain_start(
    a: Int[Tensor, "*batch pos"], b: Int[Tensor, "*batch pos"]
) -> Int[Tensor, "*batch pos"]:
    """The last position j <= i that does not propagate, which decides c_i; else -1."""
    index = torch.arange(a.shape[-1], device=a.device).expand_as(a)
    # The running maximum of the indices that do not propagate.
    return torch.where(propagate(a, b), -1, index).cummax(dim=-1).values


def carries(
    a: Int[Tensor, "*batch pos"], b: Int[Tensor, "*batch pos"]
) -> Int[Tensor, "*batch pos"]:
    """The carry OUT of each position, 0 or 1.

    Example:
        >>> a, b = torch.tensor([1, 1, 0, 0]), torch.tensor([1, 0, 1, 0])   # 3 + 5
        >>> carries(a, b).tolist()
        [1, 1, 1, 0]
    """
    start = chain_start(a, b)
    # 1 where the chain starts by generating, [*batch, pos]
    return torch.where(start >= 0, (a & b).gather(-1, start.clamp(min=0)), 0)


def carry_in(
    a: Int[Tensor, "*batch pos"], b: Int[Tensor, "*batch pos"]
) -> Int[Tensor, "*batch pos"]:
    """The carry INTO each position, 0 into the first."""
    return pad(carries(a, b), (1, 0))[..., :-1]


def total(a: Int[Tensor, "*batch pos"], b: Int[Tensor, "*batch pos"]) -> Int[Tensor, "*batch pos"]:
    """The bits of a + b mod 2^pos."""
    return a ^ b ^ carry_in(a, b)


def chain_length(
    a: Int[Tensor, "*batch pos"], b: Int[Tensor, "*batch pos"]
) -> Int[Tensor, "*batch pos"]:
    """Consecutive propagating positions up to each one: how far its carry OUT has come."""
    return torch.arange(a.shape[-1], device=a.device) - chain_start(a, b)


def chain_length_in(
    a: Int[Tensor, "*batch pos"], b: Int[Tensor, "*batch pos"]
) -> Int[Tensor, "*batch pos"]:
    """How far the carry INTO each position has come."""
    return pad(chain_length(a, b), (1, 0))[..., :-1]
