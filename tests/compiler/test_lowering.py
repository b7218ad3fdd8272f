"""What is computed where: once before the loops, in every loop, or at the readout."""

from __future__ import annotations

import functools
import operator

import pytest

from loopinterp.compiler import compile_program
from loopinterp.compiler.features import Feature, of_feature
from loopinterp.compiler.lowering import LoweredProgram, SectionLowering, lower_program
from loopinterp.compiler.validation import validate
from loopinterp.core.errors import InputError
from loopinterp.programs import (
    aggregate,
    eq,
    firsts,
    get_program,
    has_seen,
    indices,
    list_programs,
    select,
    shift_right,
    tok_map,
    tokens,
    var,
    where,
)
from loopinterp.programs.expressions import Indices, Tokens
from tests.compiler.compiled_properties import agrees
from tests.compiler.small_programs import every_input, program

pytestmark = pytest.mark.usefixtures("quick")

u, v = var("u"), var("v")


def planned(program, max_length=6) -> LoweredProgram:
    return lower_program(validate(program, max_length))


def roles_of(lowered: LoweredProgram) -> dict[str, str]:
    return {feature.name: feature.role for feature in lowered.persistent}


def test_the_ripple_takes_two_layers_a_loop_and_one_to_read_out():
    lowered = planned("ripple")
    assert [s.n_layers for s in lowered.sections] == [0, 2, 1]
    assert roles_of(lowered) == {"tokens": "tokens", "indices": "indices", "carry": "variable"}
    carries, shares, becomes = lowered.block.live
    rule = "generate | (propagate & carry)"
    assert (carries.name, carries.layer) == (rule, 0)
    assert shares.head is not None and shares.layer == 1
    assert {f: target.name for f, target in lowered.block.targets.items()} == {becomes: "carry"}
    assert becomes.layer == 1
    answer = "answer: propagate ^ carry"
    assert [f.name for f in lowered.answer.features] == [answer]


def test_what_heads_compute_without_variables_is_computed_once():
    x = firsts(tokens, tokens)
    lowered = planned(
        program({"u": 0}, {"u": where(eq(x, indices), 1, u)}, has_seen(tokens, 1) & u)
    )
    fixed = [name for name, role in roles_of(lowered).items() if role == "fixed"]
    assert len(fixed) == 2 and all(name.startswith(("eq(", "aggregate(")) for name in fixed)
    assert not any(feature.head for feature in (*lowered.block.live, *lowered.coda.live))


def test_what_needs_no_head_is_computed_where_it_is_needed():
    lowered = planned(program({"u": 0}, {"u": (u + tokens * indices) % 3}))
    assert roles_of(lowered) == {"tokens": "tokens", "indices": "indices", "u": "variable"}


def test_first_values_come_from_the_embedding_where_it_can_give_them():
    lowered = planned(program({"u": tokens % 2, "v": indices}, {"u": u}))
    assert {f.name for f in lowered.embedded} == {"u", "v"} and lowered.prelude.n_layers == 0
    lowered = planned(program({"u": tokens + indices, "v": shift_right(tokens)}, {"u": u}))
    assert not lowered.embedded
    assert {f.name for f in lowered.prelude.targets.values()} == {"u", "v"}


def test_an_answer_that_stands_there_already_takes_no_readout():
    assert planned(program({"u": 0}, {"u": u}, u)).coda.n_layers == 0
    assert planned(program({"u": 0}, {"u": u}, u % 2)).coda.n_layers == 0
    assert planned(program({"u": 0}, {"u": u}, 3)).answer.features == ()
    assert planned(program({"u": tokens}, {"u": u}, u + tokens)).coda.n_layers == 1


def test_a_step_that_changes_nothing_still_takes_a_layer():
    lowered = planned(program({"u": tokens}, {"u": u}))
    assert lowered.block.n_layers == 1 and lowered.block.live == [*lowered.block.targets]


def test_what_nothing_needs_is_not_written():
    # u is always 0, so that what v was at the position before makes no difference.
    finish = where(u, shift_right(v), 1)
    lowered = planned(program({"u": 0, "v": tokens}, {"v": (v + 1) % 3}, finish))
    assert lowered.coda.live == [] and lowered.answer.features == ()


@pytest.mark.parametrize("name", list_programs())
def test_sections_write_what_is_needed_and_read_what_is_there_by_then(name):
    lowered = planned(get_program(name), max_length=9)
    for section in lowered.sections:
        there = set(lowered.persistent)
        for feature in sorted(section.live, key=lambda f: f.layer):
            assert feature.layer < section.n_layers
            for read in feature.inputs:
                assert read in there
                in_time = read.for_mlp if feature.writes is not None else read.for_attention
                assert read in lowered.persistent or in_time <= feature.layer
            there.add(feature)
        roots = [*section.targets, *(lowered.answer.features if section is lowered.coda else ())]
        assert set(section.live) <= live(roots)


def live(features):
    """Some features, and all that they are made from."""
    features = set(features)
    inputs = {x for feature in features for x in feature.inputs}
    return features if inputs <= features else live(features | inputs)


def lowered(x, *, n_tokens=3, max_length=6):
    """A section after it has gone through one expression, and its function."""
    source = validate(program({"u": x}, {"u": u}, n_tokens=n_tokens), max_length)
    places = Feature("indices", tuple(range(max_length)), "indices")
    read = Feature("tokens", tuple(range(n_tokens)), "tokens")
    known = {Tokens(): of_feature(read), Indices(): of_feature(places)}
    section = SectionLowering("prelude", source, known, places)
    return section, section.function(source.prepare["u"])


def test_operations_need_no_feature_of_their_own():
    section, function = lowered((tokens * 2 + indices) % 3)
    assert section.writer.written == []
    assert [f.name for f in function.features] == ["tokens", "indices"]


def test_what_a_head_reads_is_held_if_it_is_no_function_of_one_feature():
    section, _ = lowered(aggregate(select(indices, tokens % 2, "=="), indices))
    assert all(feature.head is not None for feature in section.writer.written)
    section, _ = lowered(aggregate(select(tokens + indices, indices, "=="), indices))
    first = section.writer.written[0]
    assert first.name == "tokens + indices" and first.writes is not None and first.layer == 0


def test_a_head_reads_what_an_mlp_wrote_one_layer_later():
    section, _ = lowered(shift_right(shift_right(tokens)))
    heads = [feature for feature in section.writer.written if feature.head is not None]
    assert [feature.layer for feature in heads] == [0, 1]


def test_values_that_never_occur_are_left_out_of_tables():
    # tokens - tokens // 2 * 2 is 0 or 1, though apart they could give -4.
    _, function = lowered(tokens - tokens // 2 * 2, n_tokens=5)
    assert function.values == (0, 1)


def test_what_would_take_many_rules_is_held_on_the_way():
    terms = [shift_right(tokens, k) for k in range(1, 9)]
    parity = functools.reduce(operator.xor, (term % 2 for term in terms))
    compiled = compile_program(program({"u": parity}, {"u": u}, n_tokens=2), max_length=9)
    assert max(len(group.neurons) for group in compiled.circuit.neurons) < 2 * 256
    agrees(compiled, every_input(compiled.program, 9), n_loops=1)


def test_arguments_of_too_many_values_are_refused_by_name():
    tables = [tok_map(tokens, {k: k * p % 997 for k in range(900)}, default=0) for p in (3, 7)]
    left, right = (shift_right(table, n) for n, table in enumerate(tables, start=1))
    product = (left * right) % 5
    with pytest.raises(InputError) as caught:
        lowered(product, n_tokens=900)
    assert caught.value.what.startswith("aggregate(")
