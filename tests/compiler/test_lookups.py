"""Rules of a table: disjoint, complete, few, and in an order that means something."""

from __future__ import annotations

import functools
import itertools
import operator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loopinterp.compiler.features import (
    PLAIN,
    RAW,
    WITNESS,
    Feature,
    FeatureFunction,
    constant,
    fuse,
    of_feature,
)
from loopinterp.compiler.lookups import (
    _MAX_LAYERS,
    _MAX_UNITS,
    _MOST_FUSED_RULES,
    FeatureWriter,
    decision_rules,
    has_few_rules,
    lookup_units,
)
from loopinterp.compiler.validation import validate
from loopinterp.core.errors import InputError
from loopinterp.programs import var
from tests.compiler.small_programs import program
from tests.work import at_most

pytestmark = pytest.mark.usefixtures("quick")


def function(table, orders=()) -> FeatureFunction:
    table = np.array(table)
    orders = orders or [PLAIN] * table.ndim
    return FeatureFunction(
        tuple(
            Feature(f"f{k}", tuple(range(n)), order=o)
            for k, (n, o) in enumerate(zip(table.shape, orders))
        ),
        table,
    )


def of_bits(f, n: int) -> FeatureFunction:
    """A function of n bits."""
    values = [int(f(bits)) for bits in itertools.product((0, 1), repeat=n)]
    return function(np.array(values).reshape((2,) * n))


def holds(rule, place) -> bool:
    return all(chosen[place[axis]] for axis, chosen in rule.conditions)


@st.composite
def tables(draw) -> np.ndarray:
    shape = draw(st.lists(st.integers(1, 4), max_size=4))
    n_values = draw(st.integers(1, 5))
    table = np.random.default_rng(draw(st.integers(0, 2**32 - 1))).integers(-2, n_values, shape)
    if shape and draw(st.booleans()):  # values of one axis that make no difference
        table = table.take(np.arange(shape[0]) // 2, axis=0)
    return table


@settings(max_examples=80, deadline=None, derandomize=True, database=None)
@given(tables())
def test_of_the_rules_exactly_one_holds_and_it_is_right(table):
    rules = decision_rules(function(table), table.size)
    assert rules is not None and len(rules) >= len(np.unique(table))
    for place in np.ndindex(table.shape):
        assert [rule.value for rule in rules if holds(rule, place)] == [table[place]]
    assert decision_rules(function(table), len(rules)) is not None
    assert decision_rules(function(table), len(rules) - 1) is None


@pytest.mark.parametrize(
    ("table", "fewest"),
    [
        (of_bits(all, 6), 7),
        (of_bits(any, 6), 7),
        (of_bits(lambda x: sum(x) % 2, 5), 2**5),
        (of_bits(lambda x: x[1 + x[0]], 3), 4),
        (function(np.maximum.outer(np.arange(5), np.arange(5))), 15),
        (function(np.eye(6, dtype=int)), 12),
        (function(np.add.outer(np.arange(4), 10 * np.arange(4))), 16),
        (function(np.arange(1000) // 500), 2),
        (function(5), 1),
    ],
)
def test_the_fewest_rules_are_found(table, fewest):
    rules = decision_rules(table, 10_000)
    assert rules is not None and len(rules) == fewest


@pytest.mark.parametrize("orders", list(itertools.permutations([PLAIN, WITNESS, RAW])))
def test_what_a_head_wrote_is_asked_for_only_where_it_found_a_key(orders):
    # if asked and found: what was read, else the default
    plain, witness, raw = (orders.index(kind) for kind in (PLAIN, WITNESS, RAW))
    table = np.zeros((2, 2, 2), dtype=int)
    for place in np.ndindex(2, 2, 2):
        table[place] = 1 + place[raw] if place[plain] and place[witness] else 0
    rules = decision_rules(function(table, orders), 100)
    assert rules is not None
    for rule in rules:
        restricted = {axis: chosen for axis, chosen in rule.conditions if not chosen.all()}
        assert raw not in restricted or restricted[witness].tolist() == [False, True]
        assert witness not in restricted or restricted[plain].tolist() == [False, True]


@pytest.mark.parametrize(
    "f", [all, any, lambda x: sum(x) % 2, lambda x: sum(x) > 9, operator.itemgetter(3)]
)
def test_functions_of_many_bits_are_searched_soon(f):
    table = of_bits(f, 16)
    with at_most(calls=2_000_000):
        rules = decision_rules(table, 192)
    assert rules is None or len(rules) in (2, 17)


def test_a_search_cut_short_still_finds_right_rules(monkeypatch):
    table = np.random.default_rng(0).integers(0, 2, (3, 2, 3, 2, 3, 2))
    all_of_it = decision_rules(function(table), 1_000)
    monkeypatch.setattr("loopinterp.compiler.lookups.MOST_WORK", 0)
    rules = decision_rules(function(table), 1_000)
    assert rules is not None and all_of_it is not None and len(all_of_it) <= len(rules)
    for place in np.ndindex(table.shape):
        assert [rule.value for rule in rules if holds(rule, place)] == [table[place]]


def test_chains_of_choices_take_a_rule_for_each_choice():
    # where(x0, 0, where(x1, 1, where(x2, 2, ...)))
    first = of_bits(
        lambda x: functools.reduce(lambda rest, k: k if x[k] else rest, range(9, -1, -1), 10), 10
    )
    rules = decision_rules(first, 192)
    assert rules is not None and len(rules) == 11


OPERATIONS = {
    "add": np.add,
    "sub": np.subtract,
    "lt": lambda x, y: (x < y).astype(int),
    "le": lambda x, y: (x <= y).astype(int),
    "gt": lambda x, y: (x > y).astype(int),
    "ge": lambda x, y: (x >= y).astype(int),
    "eq": lambda x, y: (x == y).astype(int),
    "ne": lambda x, y: (x != y).astype(int),
    "smaller": np.minimum,
    "larger": np.maximum,
    "mul": np.multiply,
}


def written(writes, features: tuple[Feature, ...], n_values: int) -> np.ndarray:
    """What units write, in 32 bits as a model computes it [*value of each feature, direction]."""
    shape = tuple(len(f.values) for f in features)
    out = np.zeros((*shape, n_values), dtype=np.float32)
    for value, weight in writes.constants:
        out[..., value] += weight
    for unit in writes.units:
        x = np.full(shape, unit.bias, dtype=np.float32)
        for read in unit.reads:
            amounts = (read.weights + read.constant).astype(np.float32)  # one direction is 1
            x += amounts.reshape([-1 if f is read.feature else 1 for f in features])
        clipped = np.maximum(x, 0) - np.maximum(x - 1, 0)
        for value, weight in unit.out:
            out[..., value] += np.float32(weight) * clipped
    return out


def is_looked_up(function: FeatureFunction, how: str | None = None) -> None:
    values = function.values
    writes = lookup_units(function, values)
    assert writes is not None and how in (None, writes.how)
    assert set(writes.inputs) == set(function.features)
    expected = function.table[..., None] == np.array(values)
    assert np.abs(written(writes, function.features, len(values)) - expected).max() < 1e-3


def operation(op: str, xs, ys) -> FeatureFunction:
    x, y = Feature("x", tuple(xs)), Feature("y", tuple(ys))
    fused = fuse(lambda z: OPERATIONS[op](z[0], z[1]), [of_feature(x), of_feature(y)], op)
    assert fused is not None
    return fused


VALUES = st.lists(st.integers(-9, 9), min_size=1, max_size=5, unique=True).map(sorted)


@settings(max_examples=80, deadline=None, derandomize=True, database=None)
@given(st.sampled_from(list(OPERATIONS)), VALUES, VALUES)
def test_operations_of_few_values_are_looked_up(op, xs, ys):
    is_looked_up(operation(op, xs, ys))


@pytest.mark.parametrize(
    ("op", "how"),
    [
        ("add", "sum"),
        ("sub", "sum"),
        ("lt", "sum"),
        ("ge", "sum"),
        ("eq", "sum"),
        ("smaller", "levels"),
        ("larger", "levels"),
    ],
)
@pytest.mark.parametrize("start", [-20, 0, 10**6, 10**15])
def test_operations_of_many_values_take_few_units(op, how, start):
    fused = operation(op, range(start, start + 40), range(start - 7, start + 33))
    is_looked_up(fused, how)
    writes = lookup_units(fused, fused.values)
    assert writes is not None and len(writes.units) < 90


@pytest.mark.parametrize("distance", [10**3, 10**4, 10**7, 10**10])
@pytest.mark.parametrize("op", ["ge", "eq", "sub"])
def test_sums_too_far_apart_for_32_bits_are_looked_up_by_rules(op, distance):
    # Numbers such as 3 * 10**10 + 1, whose units all count.
    some = sorted(k * distance + unit for k in range(-4, 4) for unit in (0, 1, 3))
    is_looked_up(operation(op, some, some), "rules")


def test_sums_of_numbers_that_are_not_exact_as_floats_are_right():
    is_looked_up(operation("lt", range(2**62, 2**62 + 70), range(2**62 - 3, 2**62 + 67, 2)))
    is_looked_up(operation("sub", range(-(2**61), -(2**61) + 30), range(20)))


def test_the_other_argument_may_come_first():
    x, y = Feature("x", tuple(range(30))), Feature("y", tuple(range(0, 90, 3)))
    inner = fuse(lambda z: z[0] % 7, [of_feature(y)])
    assert inner is not None
    fused = fuse(lambda z: z[0] - z[1], [inner, of_feature(x)], "sub")
    assert fused is not None
    swapped = FeatureFunction((x, y), fused.table.T, fused.parts)
    is_looked_up(fused)
    is_looked_up(swapped)


def test_a_constant_takes_no_units():
    writes = lookup_units(constant(4), (3, 4))
    assert writes is not None and writes.units == ()
    assert written(writes, (), 2).tolist() == [0.0, 1.0]


def test_what_takes_too_many_units_is_not_looked_up():
    rng = np.random.default_rng(0)
    x, y = Feature("x", tuple(range(200))), Feature("y", tuple(range(200)))
    table = rng.integers(0, 1000, (200, 200))
    assert len(set(table.reshape(-1).tolist())) < _MAX_UNITS < table.size
    assert lookup_units(FeatureFunction((x, y), table), tuple(range(1000))) is None


def test_few_rules_are_those_up_to_the_limit():
    fused = operation("larger", range(5), range(5))
    assert len(decision_rules(fused, 15) or ()) == 15 and decision_rules(fused, 14) is None
    most, more = (operation("larger", range(n), range(n)) for n in (19, 20))
    assert len(decision_rules(most, 999) or ()) <= _MOST_FUSED_RULES
    assert len(decision_rules(more, 999) or ()) > _MOST_FUSED_RULES
    assert has_few_rules(most) and not has_few_rules(more) and not has_few_rules(None)


writer = pytest.fixture(
    lambda: FeatureWriter(validate(program({"u": 0}, {"u": var("u")}, name="mine"), 4))
)


def test_a_function_is_held_by_the_first_layer_that_can_write_it(writer):
    x = Feature("x", (0, 1, 2), layer=3)
    squares = FeatureFunction((x,), np.array([0, 1, 4]))
    feature = writer.store(squares, "x * x")
    assert (feature.layer, feature.values, feature.role) == (4, (0, 1, 4), "scratch")
    assert writer.written == [feature]
    wider = writer.store(squares, "v", role="variable", values=(0, 1, 3, 4))
    assert (wider.values, wider.role) == ((0, 1, 3, 4), "variable")


def test_what_no_layer_can_look_up_is_refused_with_its_sizes(writer):
    x, y = Feature("x", tuple(range(200))), Feature("y", tuple(range(210)))
    table = np.random.default_rng(0).integers(0, 1000, (200, 210))
    with pytest.raises(InputError) as caught:
        writer.store(FeatureFunction((x, y), table), "noise")
    assert caught.value.what.startswith("noise of ")


def test_a_section_has_no_more_layers_than_it_may_have(writer):
    feature = Feature("x", (0, 1))
    for _ in range(_MAX_LAYERS):
        feature = writer.store(of_feature(feature), "next")
    assert feature.layer == _MAX_LAYERS - 1
    with pytest.raises(InputError) as caught:
        writer.store(of_feature(feature), "last")
    assert caught.value.what.startswith("last of ")
