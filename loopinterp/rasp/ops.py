"""The named operations and predicates of the language, on tensors of 64-bit integers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Op:
    """An elementwise operation: how many arguments, how it is written, what it does."""

    arity: int
    symbol: str | None
    apply: Callable[..., Tensor]


OPS: dict[str, Op] = {
    "add": Op(2, "+", torch.add),
    "sub": Op(2, "-", torch.sub),
    "mul": Op(2, "*", torch.mul),
    "floordiv": Op(2, "//", torch.floor_divide),
    "mod": Op(2, "%", torch.remainder),
    "lt": Op(2, "<", lambda x, y: (x < y).long()),
    "le": Op(2, "<=", lambda x, y: (x <= y).long()),
    "gt": Op(2, ">", lambda x, y: (x > y).long()),
    "ge": Op(2, ">=", lambda x, y: (x >= y).long()),
    "and": Op(2, "&", lambda x, y: torch.logical_and(x, y).long()),
    "or": Op(2, "|", lambda x, y: torch.logical_or(x, y).long()),
    "xor": Op(2, "^", lambda x, y: torch.logical_xor(x, y).long()),
    "not": Op(1, "~", lambda x: (x == 0).long()),
    "neg": Op(1, "-", torch.neg),
    "abs": Op(1, None, torch.abs),
    "eq": Op(2, None, lambda x, y: (x == y).long()),
    "ne": Op(2, None, lambda x, y: (x != y).long()),
    "smaller": Op(2, None, torch.minimum),
    "larger": Op(2, None, torch.maximum),
    "where": Op(3, None, lambda c, x, y: torch.where(c != 0, x, y)),
}
"""Elementwise operations by name.

``and``, ``or``, ``xor``, ``not`` and the condition of ``where`` read 0 as false and anything else
as true, and give 0 or 1. Division and remainder round down, as Python's do.
"""

PREDICATES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "==": torch.eq,
    "!=": torch.ne,
    "<": torch.lt,
    "<=": torch.le,
    ">": torch.gt,
    ">=": torch.ge,
    "true": lambda k, q: torch.ones_like(k == q),
}
"""Named predicates of (key, query): ``"<"`` selects the keys that are smaller than the query."""
