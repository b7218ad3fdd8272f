"""Tables as rules: disjoint conditions, each with a value, one of which always holds.

A rule is a conjunction of "this feature has one of these values". As directions are one for each
value, "one of these" is a single linear read, so a rule is one unit however many values it names.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from loopinterp.rasp.compiler.lower.functions import Function


@dataclass(frozen=True, eq=False)
class Rule:
    """If each of some features has one of some values, then the function has this value.

    Attributes:
        conditions: Axis of the function -> which of that feature's values it may have.
        value: The value.
    """

    conditions: tuple[tuple[int, np.ndarray], ...]
    value: int


def rules(function: Function, most: int) -> list[Rule] | None:
    """The fewest rules that a search by splitting finds; None if that is more than ``most``.

    The function is split by one feature into its different restrictions, each of which is split
    further; every order of features is tried, plain features before what depends on them.

    Example:
        >>> from loopinterp.rasp.compiler.lower.features import Feature
        >>> a, b = Feature("a", (0, 1, 2)), Feature("b", (0, 1, 2))
        >>> larger = Function((a, b), np.maximum.outer(np.arange(3), np.arange(3)))
        >>> [(rule.value, len(rule.conditions)) for rule in rules(larger, 10)]
        [(0, 2), (1, 2), (2, 2), (1, 2), (2, 2), (2, 1)]
    """
    orders = [feature.order for feature in function.features]
    return _search(function.table, tuple(range(function.table.ndim)), orders, most)


def _search(
    table: np.ndarray, axes: tuple[int, ...], orders: list[int], most: int
) -> list[Rule] | None:
    table, axes = _without_idle_axes(table, axes)
    if not axes:
        return [Rule((), int(table))] if most >= 1 else None
    if len(axes) == 1:
        values = np.unique(table).tolist()
        found = [Rule(((axes[0], table == value),), value) for value in values]
        return found if len(found) <= most else None
    first = min(orders[axis] for axis in axes)
    best: list[Rule] | None = None
    for place, axis in enumerate(axes):
        if orders[axis] == first:
            limit = most if best is None else len(best) - 1
            best = _split(table, axes, place, orders, limit) or best
    return best


def _split(
    table: np.ndarray, axes: tuple[int, ...], place: int, orders: list[int], most: int
) -> list[Rule] | None:
    """Rules that ask for one axis first."""
    slices = np.moveaxis(table, place, 0)
    flat = slices.reshape(len(slices), -1)
    _, first, kind = np.unique(flat, axis=0, return_index=True, return_inverse=True)
    found: list[Rule] = []
    if len(first) > most:
        return None
    for k, example in enumerate(first):
        rest = axes[:place] + axes[place + 1 :]
        inner = _search(slices[example], rest, orders, most - len(found))
        if inner is None:
            return None
        condition = (axes[place], kind.reshape(-1) == k)
        found += [Rule((condition, *rule.conditions), rule.value) for rule in inner]
    return found


def _without_idle_axes(
    table: np.ndarray, axes: tuple[int, ...]
) -> tuple[np.ndarray, tuple[int, ...]]:
    for place in reversed(range(len(axes))):
        first = table.take([0], axis=place)
        if bool((table == first).all()):
            table, axes = first.squeeze(place), axes[:place] + axes[place + 1 :]
    return table, axes
