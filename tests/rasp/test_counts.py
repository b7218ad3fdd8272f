"""T(n) as data."""

from __future__ import annotations

import math

from loopinterp.rasp import CeilLog2, Linear


def test_a_logarithm_is_the_rounded_up_one():
    for inside in (-1, 0, 2):
        for n in range(1, 300):
            expected = math.ceil(math.log2(n + inside)) if n + inside >= 1 else 0
            assert CeilLog2(inside=inside)(n) == expected


def test_a_line_never_goes_below_zero():
    assert [Linear(slope=2, offset=-3)(n) for n in (1, 2, 3)] == [0, 1, 3]


def test_counts_print_as_formulas_and_compare():
    assert [repr(c) for c in (Linear(), Linear(offset=1), Linear(slope=2, offset=-3))] == [
        "n",
        "n + 1",
        "2 n - 3",
    ]
    assert repr(Linear(slope=0, offset=1)) == "1"
    assert repr(CeilLog2()) == "ceil(log2(n))"
    assert Linear(offset=1) == Linear(offset=1) != Linear()
