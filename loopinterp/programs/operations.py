"""The named operations and predicates of the language, on tensors of 64-bit integers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxtyping import Bool, Int
    from torch import Tensor


@dataclass(frozen=True)
class _Op:
    """An elementwise operation: how many arguments, how it is written, what it does."""

    arity: int
    symbol: str | None
    apply: Callable[..., Tensor]


OPS: dict[str, _Op] = {
    "add": _Op(2, "+", torch.add),
    "sub": _Op(2, "-", torch.sub),
    "mul": _Op(2, "*", torch.mul),
    "floordiv": _Op(2, "//", torch.floor_divide),
    "mod": _Op(2, "%", torch.remainder),
    "lt": _Op(2, "<", lambda x, y: (x < y).long()),
    "le": _Op(2, "<=", lambda x, y: (x <= y).long()),
    "gt": _Op(2, ">", lambda x, y: (x > y).long()),
    "ge": _Op(2, ">=", lambda x, y: (x >= y).long()),
    "and": _Op(2, "&", lambda x, y: torch.logical_and(x, y).long()),
    "or": _Op(2, "|", lambda x, y: torch.logical_or(x, y).long()),
    "xor": _Op(2, "^", lambda x, y: torch.logical_xor(x, y).long()),
    "not": _Op(1, "~", lambda x: (x == 0).long()),
    "neg": _Op(1, "-", torch.neg),
    "abs": _Op(1, None, torch.abs),
    "eq": _Op(2, None, lambda x, y: (x == y).long()),
    "ne": _Op(2, None, lambda x, y: (x != y).long()),
    "smaller": _Op(2, None, torch.minimum),
    "larger": _Op(2, None, torch.maximum),
    "where": _Op(3, None, lambda c, x, y: torch.where(c != 0, x, y)),
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


def smallest_integers(low: int, high: int) -> torch.dtype:
    """The smallest integers that hold all from low to high; 64 bits if none do."""
    for dtype in (torch.int8, torch.int16, torch.int32):
        if torch.iinfo(dtype).min <= low and high <= torch.iinfo(dtype).max:
            return dtype
    return torch.int64


def look_up(
    x: Int[Tensor, "*shape"], keys: Int[Tensor, " entry"], new: Int[Tensor, " entry"], default: int
) -> Int[Tensor, "*shape"]:
    """The new value of each ``x`` that is among the keys (sorted), ``default`` of the others."""
    if not len(keys):
        return torch.full_like(x, default)
    before, width = int(keys[0]) - 1, int(keys[-1]) - int(keys[0]) + 1
    if width <= 2**17 and before >= torch.iinfo(torch.int64).min:  # wider spans are searched
        # A place for each value from the least to the largest key, and one on either side.
        table = new.new_full((width + 2,), default)
        table[keys - before] = new
        return table.take((x - before).clamp_(0, width + 1))
    place = torch.searchsorted(keys.contiguous(), x.contiguous()).clamp_(max=len(keys) - 1)
    return torch.where(keys[place] == x, new[place], default)


class Relation:
    """A finite relation of (key, query) pairs, as a table of its keys against its queries.

    Where the queries are few, each is a bit, and a key is the bits of those it goes with: whether
    two numbers share a bit is known several times as fast as what a table holds.
    """

    def __init__(self, pairs: Sequence[tuple[int, int]], device: torch.device) -> None:
        both = torch.tensor(pairs, dtype=torch.int64, device=device).reshape(-1, 2)
        (self._keys, row), (self._queries, column) = (
            torch.unique(part, return_inverse=True) for part in both.T
        )
        # Row and column 0 are of what the relation does not know.
        width = len(self._queries) + 1
        # table [key, query]: whether the pair is in the relation
        table = torch.zeros((len(self._keys) + 1, width), dtype=torch.bool, device=device)
        table[row + 1, column + 1] = True
        self._table = table.flatten()
        numbers = torch.arange(max(table.shape), device=device)
        self._bits = len(self._queries) <= 63  # of an int64
        if self._bits:
            self._columns = 2 ** numbers[: len(self._queries)]
            self._rows = (table[1:, 1:] * self._columns).sum(dim=1)
            self._dtype = smallest_integers(0, 2 ** len(self._queries) - 1)
        else:
            self._rows, self._columns = numbers[1 : len(table)] * width, numbers[1:width]
            self._dtype = torch.int64

    def keys(self, k: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
        """The bits, or the row, of each key."""
        return look_up(k, self._keys, self._rows, 0).to(self._dtype)

    def queries(self, q: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
        """The bit, or the column, of each query."""
        return look_up(q, self._queries, self._columns, 0).to(self._dtype)

    def holds(
        self, keys: Int[Tensor, "*keys"], queries: Int[Tensor, "*queries"]
    ) -> Bool[Tensor, "*both"]:
        """Whether it holds, for what :meth:`keys` and :meth:`queries` give, broadcast."""
        return (keys & queries) != 0 if self._bits else self._table.take(keys + queries)
