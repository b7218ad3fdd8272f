"""Functions as units of one layer: what the units write, in all three ways."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loopinterp.rasp.compiler.lower.decision_rules import decision_rules
from loopinterp.rasp.compiler.lower.feature_functions import (
    FeatureFunction,
    constant,
    fuse,
    of_feature,
)
from loopinterp.rasp.compiler.lower.lowered_features import Feature
from loopinterp.rasp.compiler.lower.mlp_lookups import (
    MAX_UNITS,
    MOST_FUSED_RULES,
    has_few_rules,
    lookup_units,
)

pytestmark = pytest.mark.usefixtures("quick")

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
    made = fuse(lambda z: OPERATIONS[op](z[0], z[1]), [of_feature(x), of_feature(y)], op)
    assert made is not None
    return made


VALUES = st.lists(st.integers(-9, 9), min_size=1, max_size=5, unique=True).map(sorted)


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
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
    made = operation(op, range(start, start + 40), range(start - 7, start + 33))
    is_looked_up(made, how)
    writes = lookup_units(made, made.values)
    assert writes is not None and len(writes.units) < 90


@pytest.mark.parametrize("apart", [10**3, 10**4, 10**7, 10**10])
@pytest.mark.parametrize("op", ["ge", "eq", "sub"])
def test_sums_too_far_apart_for_32_bits_are_looked_up_by_rules(op, apart):
    # Numbers such as 3 * 10**10 + 1, whose units all count.
    some = sorted(k * apart + unit for k in range(-4, 4) for unit in (0, 1, 3))
    is_looked_up(operation(op, some, some), "rules")


def test_sums_of_numbers_that_are_not_exact_as_floats_are_right():
    is_looked_up(operation("lt", range(2**62, 2**62 + 70), range(2**62 - 3, 2**62 + 67, 2)))
    is_looked_up(operation("sub", range(-(2**61), -(2**61) + 30), range(20)))


def test_the_other_argument_may_come_first():
    x, y = Feature("x", tuple(range(30))), Feature("y", tuple(range(0, 90, 3)))
    inner = fuse(lambda z: z[0] % 7, [of_feature(y)])
    assert inner is not None
    made = fuse(lambda z: z[0] - z[1], [inner, of_feature(x)], "sub")
    assert made is not None
    swapped = FeatureFunction((x, y), made.table.T, made.parts)
    is_looked_up(made)
    is_looked_up(swapped)


def test_a_constant_takes_no_units():
    writes = lookup_units(constant(4), (3, 4))
    assert writes is not None and writes.units == ()
    assert written(writes, (), 2).tolist() == [0.0, 1.0]


def test_what_takes_too_many_units_is_not_looked_up():
    rng = np.random.default_rng(0)
    x, y = Feature("x", tuple(range(200))), Feature("y", tuple(range(200)))
    table = rng.integers(0, 1000, (200, 200))
    assert len(set(table.reshape(-1).tolist())) < MAX_UNITS < table.size
    assert lookup_units(FeatureFunction((x, y), table), tuple(range(1000))) is None


def test_few_rules_are_those_up_to_the_limit():
    made = operation("larger", range(5), range(5))
    assert len(decision_rules(made, 15) or ()) == 15 and decision_rules(made, 14) is None
    most, more = (operation("larger", range(n), range(n)) for n in (19, 20))
    assert len(decision_rules(most, 999) or ()) <= MOST_FUSED_RULES
    assert len(decision_rules(more, 999) or ()) > MOST_FUSED_RULES
    assert has_few_rules(most) and not has_few_rules(more) and not has_few_rules(None)
