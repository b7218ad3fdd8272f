"""Tables as rules: disjoint conditions, each with a value, one of which always holds.

A rule is a conjunction of "this feature has one of these values". As directions are one for each
value, "one of these" is a single linear read, so a rule is one unit however many values it names.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from loopinterp.rasp.compiler.lower.feature_functions import FeatureFunction, distinct

MOST_WORK = 2**22
"""Numbers that a search may go through before it follows one order of the features only."""

WORK_OF_A_STEP = 2**10
"""What a step of the search costs however few numbers it goes through, in the same unit."""


@dataclass(frozen=True, eq=False)
class DecisionRule:
    """If each of some features has one of some values, then the function has this value.

    A condition is an axis of the function, and which of that feature's values it may have.
    """

    conditions: tuple[tuple[int, np.ndarray], ...]
    value: int


def decision_rules(function: FeatureFunction, most: int) -> list[DecisionRule] | None:
    """The fewest rules that a search by splitting finds; None if that is more than ``most``.

    The function is split by one feature into its different restrictions, each of which is split
    further; every order of features is tried, plain features before what depends on them.

    Example:
        >>> from loopinterp.rasp.compiler.lower.lowered_features import Feature
        >>> a, b = Feature("a", (0, 1, 2)), Feature("b", (0, 1, 2))
        >>> larger = FeatureFunction((a, b), np.maximum.outer(np.arange(3), np.arange(3)))
        >>> [(rule.value, len(rule.conditions)) for rule in decision_rules(larger, 10)]
        [(0, 2), (1, 2), (2, 2), (1, 2), (2, 2), (2, 1)]
    """
    values = distinct(function.table)
    if len(values) > most:
        return None
    search = _RuleSearch([feature.order for feature in function.features])
    numbers = np.asarray(np.searchsorted(values, function.table))  # of a constant, no scalar
    numbers = numbers.astype(np.min_scalar_type(len(values)))
    found = search.rules(numbers, tuple(range(numbers.ndim)), most)
    if found is None:
        return None
    return [DecisionRule(rule.conditions, int(values[rule.value])) for rule in found]


class _RuleSearch:
    """A search that meets the same restriction of a function only once.

    ``orders`` says of each axis when it may be asked for.
    """

    def __init__(self, orders: list[int]) -> None:
        self._orders = orders
        self._merged: dict[_Key, _MergedTable] = {}
        self._tried: dict[_Key, tuple[int, list[DecisionRule] | None]] = {}
        self._work = 0

    def rules(
        self, table: np.ndarray, axes: tuple[int, ...], most: int
    ) -> list[DecisionRule] | None:
        """The fewest rules of a table with these axes, if ``most`` are enough."""
        key = _key(table, axes)
        if key not in self._merged:
            self._merged[key] = _merge(table, axes)
        merged = self._merged[key]
        allowed, found = self._tried.get(merged.key, (-1, None))
        if found is None and allowed < most:
            found = self._rules(merged.table, merged.axes, most)
            self._tried[merged.key] = most, found
        if found is None or len(found) > most:
            return None
        return [merged.spread(rule) for rule in found]

    def _rules(
        self, table: np.ndarray, axes: tuple[int, ...], most: int
    ) -> list[DecisionRule] | None:
        # Every axis is asked for somewhere, often enough to tell all its values apart.
        asked = 1 + sum((n_values - 1).bit_length() for n_values in table.shape)
        least = len(table) if len(axes) == 1 else asked
        if least > most:
            return None
        if not axes:
            return [DecisionRule((), int(table))]
        if len(axes) == 1:
            one = np.eye(len(table), dtype=bool)
            return [DecisionRule(((axes[0], one[k]),), int(value)) for k, value in enumerate(table)]
        first = min(self._orders[axis] for axis in axes)
        positions = [position for position, axis in enumerate(axes) if self._orders[axis] == first]
        if self._work > MOST_WORK:
            positions = [min(positions, key=lambda position: table.shape[position])]
        self._work += len(positions) * (table.size + WORK_OF_A_STEP)
        best: list[DecisionRule] | None = None
        for position in positions:
            if best is None or len(best) > least:
                limit = most if best is None else len(best) - 1
                best = self._split(table, axes, position, limit) or best
        return best

    def _split(
        self, table: np.ndarray, axes: tuple[int, ...], position: int, most: int
    ) -> list[DecisionRule] | None:
        """Rules that ask for one axis first, each of whose values makes a difference."""
        n_values = table.shape[position]
        rest = axes[:position] + axes[position + 1 :]
        found: list[DecisionRule] = []
        for k, one in enumerate(np.eye(n_values, dtype=bool)):
            still_to_come = n_values - k - 1
            allowed = most - len(found) - still_to_come
            inner = self.rules(table.take(k, axis=position), rest, allowed)
            if inner is None:
                return None
            condition = (axes[position], one)
            found += [DecisionRule((condition, *rule.conditions), rule.value) for rule in inner]
        return found


_Key = tuple[tuple[int, ...], tuple[int, ...], bytes]
"""Axes, shape and content of a table."""


def _key(table: np.ndarray, axes: tuple[int, ...]) -> _Key:
    return axes, table.shape, table.tobytes()


@dataclass(frozen=True, eq=False)
class _MergedTable:
    """A table with one value for all those of an axis that make no difference.

    Axes that make no difference at all are left out; ``kinds`` says of each other axis which value
    there each value before is.
    """

    table: np.ndarray
    axes: tuple[int, ...]
    kinds: dict[int, np.ndarray]

    @cached_property
    def key(self) -> _Key:
        return _key(self.table, self.axes)

    def spread(self, rule: DecisionRule) -> DecisionRule:
        """A rule in terms of the values before."""
        conditions = tuple((axis, one[self.kinds[axis]]) for axis, one in rule.conditions)
        return DecisionRule(conditions, rule.value)


def _merge(table: np.ndarray, axes: tuple[int, ...]) -> _MergedTable:
    kinds: dict[int, np.ndarray] = {}
    for position in reversed(range(len(axes))):
        slices = [x.tobytes() for x in table.swapaxes(0, position)]
        number = {x: k for k, x in enumerate(dict.fromkeys(slices))}
        if len(number) == 1:
            table = np.asarray(table.take(0, axis=position))  # of one axis, take gives a number
            axes = axes[:position] + axes[position + 1 :]
            continue
        kind = kinds[axes[position]] = np.array([number[x] for x in slices])
        if len(number) < len(slices):
            _, first = np.unique(kind, return_index=True)
            table = table.take(first, axis=position)
    return _MergedTable(table, axes, kinds)
