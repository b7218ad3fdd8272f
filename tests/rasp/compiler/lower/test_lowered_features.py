"""Features, reads and units."""

from __future__ import annotations

import numpy as np
import pytest

from loopinterp.rasp.compiler.lower.lowered_features import (
    Feature,
    LoweredHead,
    Read,
    Writes,
    at_least,
    one_if_all,
    one_if_any,
    read_any,
)

bit, flag = Feature("bit", (0, 1)), Feature("flag", (0, 1), one_direction=True)


def clipped(unit, amounts: dict[Feature, list[float]]) -> float:
    """What a unit says where features have these amounts along their directions."""
    total = unit.bias
    for read in unit.reads:
        total += float(np.dot(read.weights, amounts[read.feature])) + read.constant
    return min(max(total, 0.0), 1.0)


def test_a_value_has_a_direction_of_its_own_but_flags_and_counts_share_one():
    assert bit.width == 2 and flag.width == 1
    assert Feature("count", tuple(range(9)), one_direction=True).width == 1


@pytest.mark.parametrize("chosen", [[0, 0], [0, 1], [1, 0], [1, 1]])
def test_whether_a_feature_has_one_of_some_values_is_one_linear_read(chosen):
    for value in (0, 1):
        one_hot = [float(value == 0), float(value == 1)]
        for feature, amounts in ((bit, one_hot), (flag, [float(value)])):
            read = read_any(feature, np.array(chosen, dtype=bool))
            got = float(np.dot(read.weights, amounts)) + read.constant
            assert got == chosen[value]


def test_units_of_all_and_of_any_are_flat_at_both_ends():
    yes = np.array([False, True])
    reads = (read_any(bit, yes), read_any(flag, yes))
    both, either = one_if_all(reads, ()), one_if_any(reads, ())
    for x in (0, 1):
        for y in (0, 1):
            for error in (-0.05, 0.0, 0.05):
                amounts = {bit: [1 - x - error, x + error], flag: [y + error]}
                assert clipped(both, amounts) == float(x and y)
                assert clipped(either, amounts) == float(x or y)


def test_a_threshold_leaves_half_of_the_gap_to_spare():
    x = Feature("x", (0,), one_direction=True)
    unit = at_least((Read(x, np.array([1.0])),), 10.0, 4.0, ())
    for amount, says in ((8.0, 0.0), (9.0, 0.0), (10.0, 0.5), (11.0, 1.0), (12.0, 1.0)):
        assert clipped(unit, {x: [amount]}) == says


def test_attention_comes_before_the_mlp_of_its_layer():
    assert bit.for_attention == bit.for_mlp == 0
    by_mlp = Feature("m", (0, 1), layer=2, writes=Writes("rules", (bit,)))
    assert (by_mlp.for_attention, by_mlp.for_mlp) == (3, 3)
    by_head = Feature("h", (0, 1), layer=2, head=LoweredHead(None, ()))  # type: ignore[arg-type]
    assert (by_head.for_attention, by_head.for_mlp) == (3, 2)
    assert Writes("rules", (by_mlp, by_head)).layer == 3
    assert Writes("constant", ()).layer == 0
