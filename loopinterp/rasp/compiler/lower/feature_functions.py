"""Functions of features, as tables: what can be read, or computed by one layer's MLP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from loopinterp.rasp.compiler.lower.lowered_features import PLAIN, Feature

MAX_TABLE_ENTRIES = 2**20
"""Largest table that is written out."""

CLOSE = 2**16
"""Span of integers up to which they are counted one by one."""


@dataclass(frozen=True, eq=False)
class FeatureFunction:
    """An integer for each combination of the values of some features.

    Attributes:
        features: The features, one axis of the table each.
        table: The values [value of feature 0, value of feature 1, …].
        parts: How it is made of functions of one feature each, where it is
            (operation, functions); this is what sums and comparisons are lowered by.
    """

    features: tuple[Feature, ...]
    table: np.ndarray
    parts: tuple[str, tuple[FeatureFunction, ...]] | None = None

    @cached_property
    def values(self) -> tuple[int, ...]:
        """The values it takes, in order."""
        return tuple(distinct(self.table).tolist())

    @property
    def for_attention(self) -> bool:
        """Whether a head can read it: a linear function of what is plainly there."""
        return len(self.features) <= 1 and all(f.order == PLAIN for f in self.features)

    def within(self, values: np.ndarray) -> FeatureFunction:
        """The same function, known to have none but these values.

        What else the table holds belongs to combinations that never occur, of which the next
        allowed value is as right as any other.
        """
        if bool(np.isin(self.table, values).all()):
            return self
        place = np.searchsorted(values, self.table).clip(max=len(values) - 1)
        return FeatureFunction(self.features, values[place], self.parts)


def distinct(table: np.ndarray) -> np.ndarray:
    """The different integers of a table, in order.

    Example:
        >>> distinct(np.array([[3, -1], [3, 7]])).tolist()
        [-1, 3, 7]
    """
    low, high = int(table.min()), int(table.max())
    if high - low > CLOSE:
        return np.unique(table)
    # Counting them is several times as fast as sorting.
    return np.flatnonzero(np.bincount(table.reshape(-1) - low)) + low


def constant(value: int) -> FeatureFunction:
    """A function of nothing."""
    return FeatureFunction((), np.array(value))


def of_feature(feature: Feature) -> FeatureFunction:
    """The feature's own value."""
    return FeatureFunction((feature,), np.array(feature.values))


def fuse(
    apply: Callable[[list[np.ndarray]], np.ndarray],
    args: list[FeatureFunction],
    op: str | None = None,
    *,
    most: int = MAX_TABLE_ENTRIES,
) -> FeatureFunction | None:
    """An operation on functions, as one function of all their features.

    ``op`` is its name, if it is one of the language. None where the table would have more than
    ``most`` entries.
    """
    features = tuple(dict.fromkeys(f for arg in args for f in arg.features))
    shape = tuple(len(f.values) for f in features)
    if np.prod(shape, dtype=np.float64) > most:
        return None
    grids = [_spread(arg, features, shape) for arg in args]
    table = np.broadcast_to(apply(grids), shape)
    parts = (op, tuple(args)) if op and all(len(arg.features) <= 1 for arg in args) else None
    return without_idle(FeatureFunction(features, table, parts))


def _spread(
    arg: FeatureFunction, features: tuple[Feature, ...], shape: tuple[int, ...]
) -> np.ndarray:
    """The table of an argument along the axes of all features."""
    order = sorted(range(len(arg.features)), key=lambda k: features.index(arg.features[k]))
    table = arg.table.transpose(order)
    index = tuple(slice(None) if f in arg.features else None for f in features)
    return np.broadcast_to(table[index], shape)


def without_idle(function: FeatureFunction) -> FeatureFunction:
    """The same function without the features that it does not depend on."""
    table, features = function.table, list(function.features)
    for axis in reversed(range(len(features))):
        first = table.take([0], axis=axis)
        if bool((table == first).all()):
            table = first.squeeze(axis)
            del features[axis]
    return FeatureFunction(tuple(features), table, function.parts)
