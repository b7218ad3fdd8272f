"""A selection on a batch, stored as keys, queries and predicate, and reduced key by key.

A reduction goes through the keys, for all queries of many examples, as [pos, batch] tensors of the
smallest sufficient integer type: a [batch, query, key] tensor would be large.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from loopinterp.core.errors import need

# Elements at a time on a CPU (its cache), fewest of a step over keys; both on other devices
_CHUNK_ELEMENTS, _STEP_ELEMENTS, _GPU_ELEMENTS = 2**18, 2**16, 2**24
_MAX_POSITIONS = 2**14  # longest sequence: one selection then has 2**28 elements


class Selection:
    """The keys that each query selects, for a batch (of 1 where all examples agree)."""

    def __init__(
        self,
        k: Int[Tensor, "_ pos"],
        q: Int[Tensor, "_ pos"],
        predicate: str | tuple[tuple[int, int], ...],
        causal: bool,
    ) -> None:
        self.causal = causal
        self.batch, self.pos = max(len(k), len(q)), k.shape[1]
        expected, got = f"at most {_MAX_POSITIONS:,} positions", f"{self.pos:,}"
        fix = "Cut the sequences: a selection compares every position with every other."
        need(self.pos <= _MAX_POSITIONS, "sequence", expected, got, fix)
        sizes = (_CHUNK_ELEMENTS, _STEP_ELEMENTS)
        self._chunk, self._step = sizes if k.device.type == "cpu" else (_GPU_ELEMENTS,) * 2
        if not isinstance(predicate, str):
            self.k, self.q, self._holds = _by_pairs(predicate, k, q)
            return
        self.k, self.q, self._holds = k, q, PREDICATES[predicate]
        # The smallest integer type that keeps the order of keys and queries; a query beyond all
        # keys compares with them as one just beyond them does.
        low, high = _span(k)
        dtype = _smallest_integers(low - 1, high + 1)
        if dtype != torch.int64:
            self.k, self.q = k.to(dtype), q.clamp(low - 1, high + 1).to(dtype)

    def matrix(self) -> Bool[Tensor, "_ query key"]:
        out = self.k.new_zeros((self.batch, self.pos, self.pos), dtype=torch.bool)
        for keys, queries, rows, selected in self._steps(self.batch):
            out[rows, queries, keys] = selected.permute(2, 1, 0).bool()
        return out

    def width(self) -> Int[Tensor, "_ query"]:
        count = self._zeros(self.batch, 0, self.pos)
        for _, queries, rows, selected in self._steps(self.batch):
            count[queries, rows].add_(_sum(selected, count.dtype))
        return _rows(count)

    def mean(self, value: Int[Tensor, "_ pos"], default: int) -> Int[Tensor, "_ query"]:
        """The mean of the selected values, truncated; ``default`` if none."""
        low, high = _span(value)
        batch = max(self.batch, len(value))
        v = _columns(value.to(_smallest_integers(low, high)), batch)
        total = self._zeros(batch, min(low, 0) * self.pos, max(high, 0) * self.pos)
        count = self._zeros(batch, 0, self.pos)
        for keys, queries, rows, selected in self._steps(batch):
            # selected [key, query, batch], v[keys] [key, 1, batch]: the sum runs over keys
            count[queries, rows].add_(_sum(selected, count.dtype))
            total[queries, rows].add_(_sum(selected * v[keys, None, rows], total.dtype))
        mean = torch.div(total, count.clamp(min=1), rounding_mode="trunc")
        return torch.where(_rows(count) > 0, _rows(mean), default)

    def extreme(
        self, value: Int[Tensor, "_ pos"], mode: str, default: int
    ) -> Int[Tensor, "_ query"]:
        largest = mode == "max"
        low, high = _span(value)
        if high - low >= torch.iinfo(torch.int64).max:  # too far apart to subtract
            levels, order = torch.unique(value, return_inverse=True)
            level = self.extreme(order, mode, -1)
            return torch.where(level >= 0, levels[level], default)
        # The merit of each value is at least 1, so that a merit of 0 is that of none at all.
        worst = low if largest else high
        merit = value - worst if largest else worst - value
        batch = max(self.batch, len(value))
        v = _columns((merit + 1).to(_smallest_integers(0, high - low + 1)), batch)
        best = self._zeros(batch, 0, high - low + 1)
        for keys, queries, rows, selected in self._steps(batch):
            merits = selected * v[keys, None, rows]  # [key, query, batch]
            here = best[queries, rows]
            torch.maximum(here, merits[0] if len(merits) == 1 else merits.amax(0), out=here)
        merit = _rows(best) - 1
        return torch.where(merit >= 0, merit + worst if largest else worst - merit, default)

    def _steps(self, batch: int) -> Iterator[tuple[slice, slice, slice, Tensor]]:
        """Keys, queries, examples, and 1 where they are selected, as int8 [key, query, batch]."""
        k, q = (_columns(x, self.batch) for x in (self.k, self.q))
        positions = torch.arange(self.pos, device=k.device)
        for rows in _split(batch, self._chunk // self.pos):
            mine = rows if self.batch == batch else slice(None)
            for keys in _split(self.pos, self._step // (self.pos * (rows.stop - rows.start))):
                queries = slice(keys.start if self.causal else 0, self.pos)
                selected = self._holds(k[keys, None, mine], q[queries, mine])
                if self.causal and keys.stop - keys.start > 1:
                    selected &= (positions[queries] >= positions[keys, None])[..., None]
                yield keys, queries, rows, selected.view(torch.int8)

    def _zeros(self, batch: int, low: int, high: int) -> Tensor:
        return self.k.new_zeros((self.pos, batch), dtype=_smallest_integers(low, high))


def _split(length: int, size: int) -> Iterator[slice]:
    size = max(size, 1)
    return (slice(first, min(first + size, length)) for first in range(0, length, size))


def _span(x: Tensor) -> tuple[int, int]:
    low, high = x.aminmax() if x.numel() else (0, 0)
    return int(low), int(high)


def _columns(x: Tensor, batch: int) -> Tensor:
    return x.T.expand(-1, batch).contiguous()


def _rows(x: Tensor) -> Tensor:
    return x.T.contiguous().long()


def _sum(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x[0] if len(x) == 1 else x.sum(0, dtype=dtype)


@dataclass(frozen=True)
class _Op:
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
as true, and give 0 or 1. Division and remainder round down, as in Python.
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
"""Named predicates of (key, query): ``"<"`` selects keys smaller than the query."""


def _smallest_integers(low: int, high: int) -> torch.dtype:
    """The smallest integer type that holds low to high, if any; else 64 bits."""
    for dtype in (torch.int8, torch.int16, torch.int32):
        if torch.iinfo(dtype).min <= low and high <= torch.iinfo(dtype).max:
            return dtype
    return torch.int64


class Lookup:
    """The new value of each ``x`` among the sorted keys, ``default`` for others."""

    def __init__(
        self, keys: Int[Tensor, " entry"], new: Int[Tensor, " entry"], default: int
    ) -> None:
        self._keys, self._new, self._default = keys, new, default
        self._before, self._table = 0, None
        if not len(keys):
            return
        before, width = int(keys[0]) - 1, int(keys[-1]) - int(keys[0]) + 1
        if width <= 2**17 and before >= torch.iinfo(torch.int64).min:  # wider spans are searched
            # A place for each value from the least to the largest key, and one on either side.
            self._before, self._table = before, new.new_full((width + 2,), default)
            self._table[keys - before] = new

    def __call__(self, x: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
        if not len(self._keys):
            return torch.full_like(x, self._default)
        if self._table is not None:
            table = self._table.to(x.device)
            return table.take((x - self._before).clamp_(0, len(table) - 1))
        keys, new = self._keys.to(x.device).contiguous(), self._new.to(x.device)
        place = torch.searchsorted(keys, x.contiguous()).clamp_(max=len(keys) - 1)
        return torch.where(keys[place] == x, new[place], self._default)


def _by_pairs(
    pairs: Sequence[tuple[int, int]], k: Int[Tensor, "*keys"], q: Int[Tensor, "*queries"]
) -> tuple[Int[Tensor, "*keys"], Int[Tensor, "*queries"], Callable[[Tensor, Tensor], Tensor]]:
    """Rows of keys and columns of queries in a table of (key, query) pairs, and what reads it."""
    both = torch.tensor(pairs, dtype=torch.int64, device=k.device).reshape(-1, 2)
    (keys, row), (queries, column) = (torch.unique(part, return_inverse=True) for part in both.T)
    # Row and column 0 are of what no pair has.
    n_rows, width = len(keys) + 1, len(queries) + 1
    rows = torch.arange(1, n_rows, device=k.device) * width
    columns = torch.arange(1, width, device=k.device)
    table = torch.zeros(n_rows * width, dtype=torch.bool, device=k.device)
    table[rows[row] + columns[column]] = True
    at = Lookup(keys, rows, 0)(k), Lookup(queries, columns, 0)(q)
    return *at, lambda rows, columns: table.take(rows + columns)
