"""A selection on a batch: kept as its keys, queries and predicate, and read part by part.

[batch, query, key] numbers are large: 4,096 sequences of 64 tokens have 17 million of them. So a
selection is computed for a few examples at a time, while they fit the processor's cache, and
reduced to [batch, query] at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from loopinterp.errors import InputError
from loopinterp.rasp.ops import PREDICATES
from loopinterp.rasp.tables import Relation

if TYPE_CHECKING:
    from jaxtyping import Bool, Int
    from torch import Tensor

CHUNK_ELEMENTS = 2**18
"""Elements [batch, query, key] that are computed at a time on a CPU."""

GPU_CHUNK_ELEMENTS = 2**24
"""The same on other devices, which want more at a time."""

MAX_POSITIONS = 2**14
"""Longest sequence: one selection then has 2**28 elements."""

EXACT_IN_FLOAT32 = 2**24
EXACT_IN_FLOAT64 = 2**53
_INT32 = torch.iinfo(torch.int32)


class Selection:
    """Which keys each query looks at, for a batch of examples.

    Args:
        k: Value of each key [batch or 1, pos].
        q: Value of each query [batch or 1, pos].
        predicate: A name in :data:`loopinterp.rasp.ops.PREDICATES`, or (key, query) pairs.
        causal: Look only at the query's own position and before.

    Raises:
        InputError: the sequences are too long.
    """

    def __init__(
        self,
        k: Int[Tensor, "_ pos"],
        q: Int[Tensor, "_ pos"],
        predicate: str | tuple[tuple[int, int], ...],
        causal: bool,
    ) -> None:
        self.k, self.q, self.causal = k, q, causal
        self.batch, self.pos = max(len(k), len(q)), k.shape[1]
        if self.pos > MAX_POSITIONS:
            raise InputError(
                "sequence",
                expected=f"at most {MAX_POSITIONS:,} positions where there is a selection",
                given=f"{self.pos:,}",
                fix="Cut the sequences: a selection compares every position with every other.",
            )
        if isinstance(predicate, str):
            self._holds = PREDICATES[predicate]
        else:
            relation = Relation(predicate, k.device)
            self.k, self.q, self._holds = relation.keys(k), relation.queries(q), relation.holds
        self._below = torch.ones(self.pos, self.pos, dtype=torch.bool, device=k.device).tril()

    def all(self) -> Bool[Tensor, "_ query key"]:
        """The whole selection, with a batch axis of 1 if it is the same for all examples."""
        out = self.k.new_empty((self.batch, self.pos, self.pos), dtype=torch.bool)
        for part in self._parts(self.batch):
            out[part] = self._rows(part)
        return out

    def width(self) -> Int[Tensor, "_ query"]:
        """How many keys each query selects."""
        out = self.k.new_empty((self.batch, self.pos))
        for part in self._parts(self.batch):
            out[part] = _count(self._rows(part))
        return out

    def mean(self, value: Int[Tensor, "_ pos"], default: int) -> Int[Tensor, "_ query"]:
        """The mean of the selected values, truncated; ``default`` where none is selected."""
        largest = int(value.abs().max()) if value.numel() else 0
        bound = largest * self.pos if largest >= 0 else EXACT_IN_FLOAT64  # |-2**63| wraps
        exact = torch.float64 if bound < EXACT_IN_FLOAT64 else torch.int64
        exact = torch.float32 if bound < EXACT_IN_FLOAT32 else exact
        return self._reduce(value.to(exact), _mean, default)

    def extreme(
        self, value: Int[Tensor, "_ pos"], mode: str, default: int
    ) -> Int[Tensor, "_ query"]:
        """The largest or smallest selected value; ``default`` where none is selected."""
        small = value.numel() and _INT32.min < int(value.min()) <= int(value.max()) < _INT32.max
        value = value.int() if small else value
        return self._reduce(value, _max if mode == "max" else _min, default)

    def _reduce(
        self, value: Tensor, reduce: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], default: int
    ) -> Tensor:
        """``reduce(selected, value)`` part by part, and ``default`` where none is selected."""
        batch = max(self.batch, len(value))
        out = self.k.new_empty((batch, self.pos))
        shared = self._rows(slice(None)) if self.batch == 1 else None
        for part in self._parts(batch):
            selected = self._rows(part) if shared is None else shared
            reduced, some = reduce(selected, value if len(value) == 1 else value[part])
            out[part] = torch.where(some, reduced.long(), default)
        return out

    def _rows(self, part: slice) -> Bool[Tensor, "_ query key"]:
        k = self.k if len(self.k) == 1 else self.k[part]
        q = self.q if len(self.q) == 1 else self.q[part]
        selected = self._holds(k[:, None, :], q[:, :, None])
        return selected & self._below if self.causal else selected

    def _parts(self, batch: int) -> Iterator[slice]:
        most = CHUNK_ELEMENTS if self.k.device.type == "cpu" else GPU_CHUNK_ELEMENTS
        rows = max(most // self.pos**2, 1)
        return (slice(first, first + rows) for first in range(0, batch, rows))


def _count(selected: Tensor) -> Tensor:
    return selected.view(torch.uint8).sum(dim=-1, dtype=torch.int64)


def _mean(selected: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """The truncated mean [batch, query], and where anything is selected."""
    count = _count(selected)
    if len(selected) == 1 and value.is_floating_point():
        total = value @ selected[0].T.to(value.dtype)
    else:
        total = torch.where(selected, value[:, None, :], 0).sum(dim=-1)
    return torch.div(total.long(), count.clamp(min=1), rounding_mode="trunc"), count > 0


def _max(selected: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    lowest = torch.iinfo(value.dtype).min
    found = torch.where(selected, value[:, None, :], lowest).amax(dim=-1)
    # No value of 32 bits is the lowest number (see Selection.extreme); one of 64 bits may be.
    return found, found > lowest if value.dtype == torch.int32 else selected.any(dim=-1)


def _min(selected: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    highest = torch.iinfo(value.dtype).max
    found = torch.where(selected, value[:, None, :], highest).amin(dim=-1)
    return found, found < highest if value.dtype == torch.int32 else selected.any(dim=-1)
