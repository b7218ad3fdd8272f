"""Functions of features as tables."""

from __future__ import annotations

import itertools
import operator

import numpy as np
import pytest

from loopinterp.rasp.compiler.lower.feature_functions import (
    CLOSE,
    FeatureFunction,
    constant,
    distinct,
    fuse,
    of_feature,
)
from loopinterp.rasp.compiler.lower.lowered_features import RAW, Feature

a, b, c = Feature("a", (-1, 0, 2)), Feature("b", (0, 5)), Feature("c", (1, 2, 3, 4))


def value(function, held):
    """The value of a function where features hold these values."""
    return int(function.table[tuple(f.values.index(held[f]) for f in function.features)])


def everywhere(*features):
    for values in itertools.product(*(f.values for f in features)):
        yield dict(zip(features, values))


@pytest.mark.parametrize("op", [operator.add, operator.mul, np.maximum, np.less])
def test_an_operation_is_tabled_over_the_features_of_all_its_arguments(op):
    x = fuse(lambda x: x[0] - x[1], [of_feature(a), of_feature(b)])
    y = fuse(lambda x: x[0] * x[1], [of_feature(c), of_feature(a)])
    assert x is not None and y is not None
    both = fuse(lambda x: op(x[0], x[1]), [x, y])
    assert both is not None and both.features == (a, b, c)
    for held in everywhere(a, b, c):
        assert value(both, held) == op(held[a] - held[b], held[c] * held[a])


def test_features_that_make_no_difference_are_dropped():
    x = fuse(lambda x: x[0] * 0 + x[1], [of_feature(a), of_feature(b)])
    assert x is not None and x.features == (b,) and x.table.tolist() == [0, 5]
    none = fuse(lambda x: x[0] - x[0], [of_feature(c)])
    assert none is not None and none.features == () and none.values == (0,)


def test_a_table_that_would_be_too_large_is_not_made():
    assert fuse(lambda x: x[0] + x[1], [of_feature(a), of_feature(b)], most=6) is not None

    def never(x):
        raise AssertionError

    assert fuse(never, [of_feature(a), of_feature(b)], most=5) is None


def test_how_an_operation_is_made_is_remembered_where_its_parts_can_be_read():
    parts = [of_feature(a), of_feature(b)]
    both = fuse(lambda x: x[0] + x[1], parts, "add")
    assert both is not None and both.parts == ("add", tuple(parts))
    deeper = fuse(lambda x: x[0] + x[1], [both, of_feature(c)], "add")
    assert deeper is not None and deeper.parts is None


def test_values_that_never_occur_make_way_for_others():
    x = FeatureFunction((c,), np.array([0, 3, 7, 9]))
    assert x.within(np.array([0, 3, 7, 9])) is x
    assert x.within(np.array([0, 7])).table.tolist() == [0, 7, 7, 7]
    assert x.within(np.array([0, 7])).values == (0, 7)


def test_a_head_reads_functions_of_one_feature_that_is_plainly_there():
    raw = Feature("raw", (0, 1), order=RAW)
    both = fuse(lambda x: x[0] + x[1], [of_feature(a), of_feature(b)])
    assert both is not None and not both.for_attention
    assert constant(3).for_attention and of_feature(a).for_attention
    assert not of_feature(raw).for_attention


@pytest.mark.parametrize("far", [1, CLOSE, CLOSE + 1, 2**40])
def test_distinct_integers_come_in_order(far):
    table = np.array([[far, -3, 7], [7, -3, -(2**62)]])
    assert distinct(table).tolist() == np.unique(table).tolist()
    assert distinct(table[:, 1:2]).tolist() == [-3]
