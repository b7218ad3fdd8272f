"""Rules of a table: disjoint, complete, few, and in an order that means something."""

from __future__ import annotations

import functools
import itertools
import operator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loopinterp.rasp.compiler.lower.decision_rules import decision_rules
from loopinterp.rasp.compiler.lower.feature_functions import FeatureFunction
from loopinterp.rasp.compiler.lower.lowered_features import PLAIN, RAW, WITNESS, Feature
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


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(tables())
def test_of_the_rules_exactly_one_holds_and_it_is_right(table):
    found = decision_rules(function(table), table.size)
    assert found is not None and len(found) >= len(np.unique(table))
    for place in np.ndindex(table.shape):
        assert [rule.value for rule in found if holds(rule, place)] == [table[place]]
    assert decision_rules(function(table), len(found)) is not None
    assert decision_rules(function(table), len(found) - 1) is None


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
    found = decision_rules(table, 10_000)
    assert found is not None and len(found) == fewest


@pytest.mark.parametrize("orders", list(itertools.permutations([PLAIN, WITNESS, RAW])))
def test_what_a_head_wrote_is_asked_for_only_where_it_found_a_key(orders):
    # if asked and found: what was read, else the default
    plain, witness, raw = (orders.index(kind) for kind in (PLAIN, WITNESS, RAW))
    table = np.zeros((2, 2, 2), dtype=int)
    for place in np.ndindex(2, 2, 2):
        table[place] = 1 + place[raw] if place[plain] and place[witness] else 0
    found = decision_rules(function(table, orders), 100)
    assert found is not None
    for rule in found:
        asked = {axis: chosen for axis, chosen in rule.conditions if not chosen.all()}
        assert raw not in asked or asked[witness].tolist() == [False, True]
        assert witness not in asked or asked[plain].tolist() == [False, True]


@pytest.mark.parametrize(
    "f", [all, any, lambda x: sum(x) % 2, lambda x: sum(x) > 9, operator.itemgetter(3)]
)
def test_functions_of_many_bits_are_searched_soon(f):
    table = of_bits(f, 16)
    with at_most(calls=2_000_000):
        found = decision_rules(table, 192)
    assert found is None or len(found) in (2, 17)


def test_a_search_cut_short_still_finds_right_rules(monkeypatch):
    table = np.random.default_rng(0).integers(0, 2, (3, 2, 3, 2, 3, 2))
    all_of_it = decision_rules(function(table), 1_000)
    monkeypatch.setattr("loopinterp.rasp.compiler.lower.decision_rules.MOST_WORK", 0)
    found = decision_rules(function(table), 1_000)
    assert found is not None and all_of_it is not None and len(all_of_it) <= len(found)
    for place in np.ndindex(table.shape):
        assert [rule.value for rule in found if holds(rule, place)] == [table[place]]


def test_chains_of_choices_take_a_rule_for_each_choice():
    # where(x0, 0, where(x1, 1, where(x2, 2, ...)))
    first = of_bits(
        lambda x: functools.reduce(lambda rest, k: k if x[k] else rest, range(9, -1, -1), 10), 10
    )
    found = decision_rules(first, 192)
    assert found is not None and len(found) == 11
