"""Finite functions and relations of integers, looked up for whole tensors at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxtyping import Bool, Int
    from torch import Tensor

WIDEST_LOOKUP = 2**17
"""Largest span of the keys of a table that is looked up by place; wider ones are searched."""


def look_up(
    x: Int[Tensor, "*shape"], keys: Int[Tensor, " entry"], new: Int[Tensor, " entry"], default: int
) -> Int[Tensor, "*shape"]:
    """The new value of each ``x`` that is among the keys (sorted), ``default`` of the others.

    Example:
        >>> x = torch.tensor([[7, 2, 3]])
        >>> look_up(x, torch.tensor([2, 7]), torch.tensor([20, 70]), -1).tolist()
        [[70, 20, -1]]
    """
    if not len(keys):
        return torch.full_like(x, default)
    before, width = int(keys[0]) - 1, int(keys[-1]) - int(keys[0]) + 1
    if width <= WIDEST_LOOKUP and before >= torch.iinfo(torch.int64).min:
        # A place for each value from the least to the largest key, and one on either side.
        table = new.new_full((width + 2,), default)
        table[keys - before] = new
        return table.take((x - before).clamp_(0, width + 1))
    found = torch.searchsorted(keys.contiguous(), x.contiguous()).clamp_(max=len(keys) - 1)
    return torch.where(keys[found] == x, new[found], default)


class Relation:
    """A finite relation of (key, query) pairs, as a table of its keys against its queries.

    Args:
        pairs: The pairs for which it holds.
        device: Where it is looked up.
    """

    def __init__(self, pairs: Sequence[tuple[int, int]], device: torch.device) -> None:
        both = torch.tensor(pairs, dtype=torch.int64, device=device).reshape(-1, 2)
        (self._keys, row), (self._queries, column) = (
            torch.unique(part, return_inverse=True) for part in both.T
        )
        # Row and column 0 are of what the relation does not know.
        self._width = len(self._queries) + 1
        self._table = torch.zeros(
            (len(self._keys) + 1) * self._width, dtype=torch.bool, device=device
        )
        self._table[(row + 1) * self._width + column + 1] = True

    def keys(self, k: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
        """Where the row of each key starts."""
        rows = torch.arange(1, len(self._keys) + 1, device=k.device) * self._width
        return look_up(k, self._keys, rows, 0)

    def queries(self, q: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
        """The column of each query."""
        columns = torch.arange(1, len(self._queries) + 1, device=q.device)
        return look_up(q, self._queries, columns, 0)

    def holds(
        self, rows: Int[Tensor, "#batch #query #key"], columns: Int[Tensor, "#batch #query #key"]
    ) -> Bool[Tensor, "batch query key"]:
        """Whether it holds, for what :meth:`keys` and :meth:`queries` give."""
        return self._table.take(rows + columns)
