"""What a section has its layers write."""

from __future__ import annotations

import numpy as np
import pytest

from loopinterp.errors import InputError
from loopinterp.rasp import var
from loopinterp.rasp.compiler.lower.feature_functions import FeatureFunction, of_feature
from loopinterp.rasp.compiler.lower.feature_writer import MAX_LAYERS, FeatureWriter
from loopinterp.rasp.compiler.lower.lowered_features import Feature
from loopinterp.rasp.compiler.validate import validate
from tests.rasp.compiler.small_programs import program

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
    with pytest.raises(InputError, match=r"noise of program mine.*200 values and 210 values"):
        writer.store(FeatureFunction((x, y), table), "noise")


def test_a_section_has_no_more_layers_than_it_may_have(writer):
    feature = Feature("x", (0, 1))
    for _ in range(MAX_LAYERS):
        feature = writer.store(of_feature(feature), "next")
    assert feature.layer == MAX_LAYERS - 1
    with pytest.raises(InputError, match="last of program mine: expected what at most 128 layers"):
        writer.store(of_feature(feature), "last")
