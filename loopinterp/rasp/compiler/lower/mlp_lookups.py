"""Stage 3, lower (MLPs): a function of features as units of one layer.

Three ways, the cheapest of which is taken:

* rules: one unit for each rule of :mod:`loopinterp.rasp.compiler.lower.decision_rules`;
* levels, for the smaller or larger of two: [min(x, y) >= v] is [x >= v] and [y >= v];
* a sum, for sums, differences and comparisons of many values: thresholds on x + y as a number.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from loopinterp.rasp.compiler.lower.decision_rules import DecisionRule, decision_rules
from loopinterp.rasp.compiler.lower.feature_functions import FeatureFunction, without_idle
from loopinterp.rasp.compiler.lower.lowered_features import (
    Feature,
    Read,
    Unit,
    Writes,
    at_least,
    one_if_all,
    one_if_any,
    read_any,
)

MAX_UNITS = 8_192
"""Most units of one function."""

MANY_RULES = 64
"""From here on a sum is considered: it reads numbers, which have larger errors than flags."""

MOST_LEVELS = 2**11
"""Largest span of a sum, in units of the least difference that matters: with more, the roundings
of 32 bits would show."""

EXACT = 2.0**53
"""From here on integers are not exact as numbers of 64 bits."""

MOST_FUSED_RULES = 192
"""A function that would take more rules than this has its arguments stored first."""

_SIGNS = {"add": 1, "sub": -1, "lt": -1, "le": -1, "gt": -1, "ge": -1, "eq": -1, "ne": -1}


def lookup_units(function: FeatureFunction, values: tuple[int, ...]) -> Writes | None:
    """Units that write a function along the directions of the values; None if too many."""
    function = without_idle(function)
    if not function.features:
        return Writes("constant", (), constants=((values.index(int(function.table)), 1.0),))
    found = decision_rules(function, MAX_UNITS)
    best = None
    if found is not None:
        units = tuple(_of_rule(rule, function.features, values) for rule in found)
        best = Writes("rules", function.features, units)
    if best is None or len(best.units) > MANY_RULES:
        for other in (_by_levels(function, values), _by_sum(function, values)):
            if other is not None and (best is None or 4 * len(other.units) < len(best.units)):
                best = other
    return best


def has_few_rules(function: FeatureFunction | None) -> bool:
    """Whether there is a function, of at most :data:`MOST_FUSED_RULES` rules."""
    return function is not None and decision_rules(function, MOST_FUSED_RULES) is not None


def thresholds(
    reads: tuple[Read, ...],
    levels: list[tuple[float, float]],
    values: tuple[int, ...],
    at: tuple[int, ...],
) -> tuple[tuple[Unit, ...], tuple[tuple[int, float], ...]]:
    """Units that cut the sum of reads into intervals, each of which has a value (``at``).

    Levels are where it is cut, in order: (threshold, gap around it in which it never is).
    """
    units = [
        at_least(reads, threshold, gap, advance(values, before, after))
        for (threshold, gap), before, after in zip(levels, at, at[1:])
    ]
    return tuple(units), ((values.index(at[0]), 1.0),)


def advance(values: tuple[int, ...], before: int, after: int) -> tuple[tuple[int, float], ...]:
    """From one value to the next: written by a unit that says that the next is reached."""
    return ((values.index(before), -1.0), (values.index(after), 1.0))


def _of_rule(rule: DecisionRule, features: tuple[Feature, ...], values: tuple[int, ...]) -> Unit:
    reads = tuple(read_any(features[axis], chosen) for axis, chosen in rule.conditions)
    return one_if_all(reads, ((values.index(rule.value), 1.0),))


def _by_levels(function: FeatureFunction, values: tuple[int, ...]) -> Writes | None:
    if function.parts is None or function.parts[0] not in ("smaller", "larger"):
        return None
    op, args = function.parts
    if not all(arg.features for arg in args):
        return None
    combine = one_if_all if op == "smaller" else one_if_any
    taken, units = function.values, []
    for before, after in pairwise(taken):
        reads = tuple(read_any(arg.features[0], arg.table >= after) for arg in args)
        units.append(combine(reads, advance(values, before, after)))
    start = (values.index(taken[0]), 1.0)
    return Writes("levels", function.features, tuple(units), (start,))


def _by_sum(function: FeatureFunction, values: tuple[int, ...]) -> Writes | None:
    if function.parts is None or function.parts[0] not in _SIGNS:
        return None
    op, args = function.parts
    inputs = {feature for arg in args for feature in arg.features}
    if len(function.features) != 2 or inputs != {*function.features}:
        return None
    numbers = [arg.table.astype(float) for arg in args]
    if max(float(np.abs(x).max()) for x in numbers) >= EXACT:
        return None
    x, y = (x - x.min() for x in numbers)
    y *= _SIGNS[op]
    table = function.table if function.features[:1] == args[0].features else function.table.T
    total, first = np.unique(np.add.outer(x, y).reshape(-1), return_index=True)
    at = table.reshape(-1)[first]
    changes = np.flatnonzero(at[1:] != at[:-1]).tolist()
    cuts = [(float(total[k]), float(total[k + 1])) for k in changes]
    if not cuts or total[-1] - total[0] > MOST_LEVELS * min(above - below for below, above in cuts):
        return None
    levels = [((below + above) / 2, above - below) for below, above in cuts]
    intervals = (int(at[0]), *(int(at[k + 1]) for k in changes))
    reads = (Read(args[0].features[0], x), Read(args[1].features[0], y))
    return Writes("sum", function.features, *thresholds(reads, levels, values, intervals))
