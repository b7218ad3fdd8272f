"""Stage 3, lower (MLPs): a function of features as units of one layer, the cheapest of three ways.

* rules: disjoint conditions of which one always holds, one unit each. A condition is a
  conjunction of "this feature has one of these values", one linear read each.
* levels, for the smaller or larger of two: [min(x, y) >= v] is [x >= v] and [y >= v].
* a sum, for sums, differences and comparisons of many values: thresholds on x + y as a number.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from loopinterp.compiler.features import (
    Feature,
    FeatureFunction,
    Read,
    Role,
    Unit,
    Writes,
    at_least,
    one_if_all,
    one_if_any,
    read_any,
    without_idle,
)
from loopinterp.compiler.validation import ValidatedProgram
from loopinterp.core.errors import InputError, need

_MAX_LAYERS = 128  # most layers of a section
_MAX_UNITS = 8_192  # most units of one function
_MOST_FUSED_RULES = 192
"""The arguments of a function that takes more rules are stored first."""

MOST_WORK = 2**22
"""Table entries visited by a search for rules before it keeps to one order of features."""


class FeatureWriter:
    def __init__(self, source: ValidatedProgram) -> None:
        self.source = source
        self.written: list[Feature] = []

    def write(self, feature: Feature, writes: Writes) -> Feature:
        what = f"{feature.name} of program {self.source.program.name}"
        expected = f"what at most {_MAX_LAYERS} layers can compute, one after the other"
        fix = "Keep intermediate values in variables, and let loops do what repeats."
        need(writes.layer < _MAX_LAYERS, what, expected, "an expression that takes more", fix)
        feature.layer, feature.writes = writes.layer, writes
        self.written.append(feature)
        return feature

    def store(
        self,
        function: FeatureFunction,
        name: str,
        *,
        role: Role = "scratch",
        values: tuple[int, ...] = (),
    ) -> Feature:
        """A feature that holds a function; its values are the function's by default."""
        taken = values or function.values
        writes = lookup_units(function, taken)
        if writes is None:
            sizes = " and ".join(f"{len(f.values)} values" for f in function.features)
            expected, got = "an operation that one layer can look up", f"a function of {sizes}"
            fix = "Compile for a smaller max_length, or write it in smaller steps."
            what = f"{name} of program {self.source.program.name}"
            raise InputError(what, expected=expected, given=got, fix=fix)
        return self.write(Feature(name, taken, role), writes)


def lookup_units(function: FeatureFunction, values: tuple[int, ...]) -> Writes | None:
    """Units that write a function along the directions of the values; None if too many."""
    function = without_idle(function)
    features = function.features
    if not features:
        return Writes("constant", (), constants=((values.index(int(function.table)), 1.0),))
    best = None
    if (rules := decision_rules(function, _MAX_UNITS)) is not None:
        units = (
            one_if_all(
                tuple(read_any(features[axis], chosen) for axis, chosen in rule.conditions),
                ((values.index(rule.value), 1.0),),
            )
            for rule in rules
        )
        best = Writes("rules", features, tuple(units))
    # Sums read numbers, which have larger errors than flags: they are for many rules.
    if function.parts is not None and (best is None or len(best.units) > 64):
        op, args = function.parts
        write = _by_levels if op in ("smaller", "larger") else _by_sum
        other = write(function, op, args, values)
        if other is not None and (best is None or 4 * len(other.units) < len(best.units)):
            best = other
    return best


def has_few_rules(function: FeatureFunction | None) -> bool:
    return function is not None and _decision_tree(function, _MOST_FUSED_RULES)[1] is not None


def thresholds(
    reads: tuple[Read, ...],
    levels: list[tuple[float, float]],
    values: tuple[int, ...],
    at: tuple[int, ...],
) -> tuple[tuple[Unit, ...], tuple[tuple[int, float], ...]]:
    """Units that cut the sum of reads into intervals, each with a value (``at``).

    Levels are (threshold, gap around it that the sum never enters), in order.
    """
    units = [
        at_least(reads, threshold, gap, advance(values, before, after))
        for (threshold, gap), before, after in zip(levels, at, at[1:])
    ]
    return tuple(units), ((values.index(at[0]), 1.0),)


def advance(values: tuple[int, ...], before: int, after: int) -> tuple[tuple[int, float], ...]:
    """The write that replaces one value by the next."""
    return ((values.index(before), -1.0), (values.index(after), 1.0))


_Args = tuple[FeatureFunction, ...]


def _by_levels(
    function: FeatureFunction, op: str, args: _Args, values: tuple[int, ...]
) -> Writes | None:
    if not all(arg.features for arg in args):
        return None
    combine = one_if_all if op == "smaller" else one_if_any
    taken, units = function.values, []
    for before, after in pairwise(taken):
        reads = tuple(read_any(arg.features[0], arg.table >= after) for arg in args)
        units.append(combine(reads, advance(values, before, after)))
    start = (values.index(taken[0]), 1.0)
    return Writes("levels", function.features, tuple(units), (start,))


def _by_sum(
    function: FeatureFunction, op: str, args: _Args, values: tuple[int, ...]
) -> Writes | None:
    inputs = {feature for arg in args for feature in arg.features}
    if op not in ("add", "sub", "lt", "le", "gt", "ge", "eq", "ne"):
        return None
    if len(function.features) != 2 or inputs != {*function.features}:
        return None
    numbers = [arg.table.astype(float) for arg in args]
    if max(float(np.abs(x).max()) for x in numbers) >= 2.0**53:
        return None  # from there on integers are not exact as numbers of 64 bits
    x, y = (x - x.min() for x in numbers)
    y *= 1 if op == "add" else -1
    table = function.table if function.features[:1] == args[0].features else function.table.T
    # total: the distinct sums x + y, in order; at: the value of the function for each
    total, first = np.unique(np.add.outer(x, y).reshape(-1), return_index=True)
    at = table.reshape(-1)[first]
    changes = np.flatnonzero(at[1:] != at[:-1])
    below, above = total[changes], total[changes + 1]
    # With a larger span, in units of the least difference, the roundings of 32 bits would show.
    if not len(changes) or total[-1] - total[0] > 2**11 * (above - below).min():
        return None
    levels = list(zip(((below + above) / 2).tolist(), (above - below).tolist()))
    intervals = tuple(at[[0, *(changes + 1)]].tolist())
    reads = (Read(args[0].features[0], x), Read(args[1].features[0], y))
    return Writes("sum", function.features, *thresholds(reads, levels, values, intervals))


@dataclass(frozen=True, eq=False)
class _DecisionRule:
    """A function has this value if each of some features has one of some values."""

    conditions: tuple[tuple[int, np.ndarray], ...]  # (axis of the function, which of its values)
    value: int


_Axes = tuple[int, ...]


def decision_rules(function: FeatureFunction, most: int) -> list[_DecisionRule] | None:
    """Few rules for a function, by splitting it by one feature after another; None if above
    ``most``.

    All orders of features are tried, plain features before those that depend on them.
    """
    values, tree = _decision_tree(function, most)
    if tree is None:
        return None
    return [_DecisionRule(x.conditions, int(values[x.value])) for x in _rules_of(tree, {})]


def _decision_tree(function: FeatureFunction, most: int) -> tuple[np.ndarray, _Tree | None]:
    """The values of a function, and the tests that tell their numbers apart."""
    values = np.unique(function.table)
    if len(values) > most:
        return values, None
    search = _RuleSearch([feature.order for feature in function.features])
    numbers = np.asarray(np.searchsorted(values, function.table))  # of a constant, no scalar
    numbers = numbers.astype(np.min_scalar_type(len(values)))
    return values, search.tree(numbers, tuple(range(numbers.ndim)), most)


@dataclass(frozen=True, eq=False)
class _Test:
    """Tells the values of a table apart by those of one axis; a leaf has no axis, but a value."""

    n_rules: int
    axis: int = -1
    trees: tuple[_Tree, ...] = ()  # for each value of the axis
    value: int = 0


_Kinds = dict[int, np.ndarray]  # of each axis: the new value for each value before
_Tree = tuple[_Kinds, _Test]  # how the values of a table are merged, and what tests them then


def _rules_of(tree: _Tree, kinds: _Kinds) -> list[_DecisionRule]:
    """A rule for each leaf of a tree; ``kinds`` are those that all tests above have merged."""
    merged, test = tree
    if not test.trees:
        return [_DecisionRule((), test.value)]
    kinds = {axis: new[kinds[axis]] if axis in kinds else new for axis, new in merged.items()}
    rules = []
    for k, below in enumerate(test.trees):
        condition = (test.axis, kinds[test.axis] == k)
        for rule in _rules_of(below, kinds):
            rules.append(_DecisionRule((condition, *rule.conditions), rule.value))
    return rules


_Key = tuple[_Axes, _Axes, bytes]  # axes, shape and content of a table


class _RuleSearch:
    """A search that visits each restriction of a function once."""

    def __init__(self, orders: list[int]) -> None:
        self._orders = orders  # of the features of each axis: PLAIN, WITNESS or RAW
        self._merged: dict[_Key, _MergedTable] = {}
        self._tried: dict[_Key, tuple[int, _Test | None]] = {}
        self._work = 0

    def tree(self, table: np.ndarray, axes: _Axes, most: int) -> _Tree | None:
        key = _key(table, axes)
        if key not in self._merged:
            self._merged[key] = _merge(table, axes)
        merged = self._merged[key]
        allowed, test = self._tried.get(merged.key, (-1, None))
        if test is None and allowed < most:
            test = self._test(merged.table, merged.axes, most)
            self._tried[merged.key] = most, test
        if test is None or test.n_rules > most:
            return None
        return merged.kinds, test

    def _test(self, table: np.ndarray, axes: _Axes, most: int) -> _Test | None:
        # Every axis is tested somewhere, often enough to separate all its values.
        tests = 1 + sum((n_values - 1).bit_length() for n_values in table.shape)
        least = len(table) if len(axes) == 1 else tests
        if least > most:
            return None
        if not axes:
            return _Test(1, value=int(table))
        if len(axes) == 1:
            leaves = (({}, _Test(1, value=value)) for value in table.tolist())
            return _Test(len(table), axes[0], tuple(leaves))
        first = min(self._orders[axis] for axis in axes)
        positions = [position for position, axis in enumerate(axes) if self._orders[axis] == first]
        if self._work > MOST_WORK:
            positions = [min(positions, key=lambda position: table.shape[position])]
        self._work += len(positions) * (table.size + 2**10)  # a step costs as much as 2**10 entries
        best: _Test | None = None
        for position in positions:
            if best is None or best.n_rules > least:
                limit = most if best is None else best.n_rules - 1
                best = self._split(table, axes, position, limit) or best
        return best

    def _split(self, table: np.ndarray, axes: _Axes, position: int, most: int) -> _Test | None:
        n_values = table.shape[position]
        rest = axes[:position] + axes[position + 1 :]
        n_rules, trees = 0, []
        for k in range(n_values):
            allowed = most - n_rules - (n_values - k - 1)  # one rule for each value to come
            tree = self.tree(table.take(k, axis=position), rest, allowed)
            if tree is None:
                return None
            n_rules += tree[1].n_rules
            trees.append(tree)
        return _Test(n_rules, axes[position], tuple(trees))


def _key(table: np.ndarray, axes: _Axes) -> _Key:
    return axes, table.shape, table.tobytes()


@dataclass(frozen=True, eq=False)
class _MergedTable:
    """A table in which values of an axis with equal entries are merged."""

    table: np.ndarray
    axes: _Axes  # without those that make no difference at all
    kinds: _Kinds

    @cached_property
    def key(self) -> _Key:
        return _key(self.table, self.axes)


def _merge(table: np.ndarray, axes: _Axes) -> _MergedTable:
    kinds: _Kinds = {}
    for position in reversed(range(len(axes))):
        entries = table.swapaxes(0, position).tobytes()
        size = len(entries) // table.shape[position]
        slices = [entries[k : k + size] for k in range(0, len(entries), size)]
        number = {x: k for k, x in enumerate(dict.fromkeys(slices))}
        if len(number) == 1:
            table = np.asarray(table.take(0, axis=position))  # of one axis, take gives a number
            axes = axes[:position] + axes[position + 1 :]
            continue
        kinds[axes[position]] = np.array([number[x] for x in slices])
        if len(number) < len(slices):
            first = dict(zip(reversed(slices), reversed(range(len(slices)))))
            table = table.take([first[x] for x in number], axis=position)
    return _MergedTable(table, axes, kinds)
