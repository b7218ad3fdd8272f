"""Features, reads and units."""

from __future__ import annotations

import itertools
import operator

import numpy as np
import pytest
import torch

from loopinterp.compiler import Compiled, compile_program, distract, rotate
from loopinterp.compiler.circuit import orthonormal
from loopinterp.compiler.disguises import weights_of
from loopinterp.compiler.features import (
    RAW,
    Feature,
    FeatureFunction,
    LoweredHead,
    Read,
    StreamFeatures,
    Writes,
    at_least,
    constant,
    fuse,
    of_feature,
    one_if_all,
    one_if_any,
    read_any,
)
from loopinterp.compiler.superposition import unlisted_directions
from tests.compiler.small_models import cached, section_of, small_model

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
    for amount, share in ((8.0, 0.0), (9.0, 0.0), (10.0, 0.5), (11.0, 1.0), (12.0, 1.0)):
        assert clipped(unit, {x: [amount]}) == share


def test_attention_comes_before_the_mlp_of_its_layer():
    assert bit.for_attention == bit.for_mlp == 0
    by_mlp = Feature("m", (0, 1), layer=2, writes=Writes("rules", (bit,)))
    assert (by_mlp.for_attention, by_mlp.for_mlp) == (3, 3)
    by_head = Feature("h", (0, 1), layer=2, head=LoweredHead(None, ()))  # type: ignore[arg-type]
    assert (by_head.for_attention, by_head.for_mlp) == (3, 2)
    assert Writes("rules", (by_mlp, by_head)).layer == 3
    assert Writes("constant", ()).layer == 0


a, b, c = Feature("a", (-1, 0, 2)), Feature("b", (0, 5)), Feature("c", (1, 2, 3, 4))


def value(function, assignment):
    """The value of a function where features hold these values."""
    return int(function.table[tuple(f.values.index(assignment[f]) for f in function.features)])


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
    for values in everywhere(a, b, c):
        assert value(both, values) == op(values[a] - values[b], values[c] * values[a])


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


LOOPS = 3


def contents(compiled: Compiled, inputs: torch.Tensor) -> dict[tuple[str, int], torch.Tensor]:
    """Everything that stands at each site in a run [vector, d_model]."""
    recorded: dict[tuple[str, int], list[torch.Tensor]] = {}
    for sublayer, hook in enumerate(("hook_resid_pre", "hook_resid_mid")):
        for number, x in cached(compiled, inputs, LOOPS, hook).items():
            section, layer = section_of(compiled, number, LOOPS)
            recorded.setdefault((section, 2 * layer + sublayer), []).append(x.flatten(0, 1))
    return {site: torch.cat(x).double() for site, x in recorded.items()}


@pytest.mark.parametrize("program", ["one_shot", "unique_set", "binary_sum", "abacus_ripple"])
def test_nothing_else_stands_anywhere(program):
    plain = small_model(program)
    turned = rotate(plain.compiled, seed=0)
    features = StreamFeatures(turned.circuit)
    for (section, sublayer), x in contents(turned, plain.inputs).items():
        basis = orthonormal(features.at(section, sublayer).span)
        assert (x - x @ basis.mT @ basis).abs().max() < 1e-4, (section, sublayer)


def test_all_of_it_does():
    compiled = compile_program("ripple", max_length=5)
    tokens = torch.tensor([[4, *bits] for bits in itertools.product(range(6), repeat=4)])
    features = StreamFeatures(compiled.circuit)
    for (section, sublayer), x in contents(compiled, tokens).items():
        assert len(orthonormal(x)) == len(orthonormal(features.at(section, sublayer).span))


def test_bounds_hold_for_what_stands_there():
    plain = small_model("one_shot")
    rows = torch.randn(
        20, plain.compiled.model.config.d_model, generator=torch.Generator().manual_seed(0)
    ).double()
    features = StreamFeatures(plain.compiled.circuit)
    for (section, sublayer), x in contents(plain.compiled, plain.inputs).items():
        low, high = features.at(section, sublayer).extremes(rows)
        read = x @ rows.mT
        assert (read > low - 1e-5).all() and (read < high + 1e-5).all()


def test_directions_of_distractors_are_found_behind_a_rotation():
    plain = small_model("one_shot").compiled
    for seed, width in ((0, 1), (1, 5)):
        turned = rotate(distract(plain, width=width, seed=seed), seed=seed)
        assert len(unlisted_directions(weights_of(turned), turned.circuit)) == width
    assert len(unlisted_directions(weights_of(plain), plain.circuit)) == 0
