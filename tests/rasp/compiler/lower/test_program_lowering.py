"""What is computed where: once before the loops, in every loop, or at the readout."""

from __future__ import annotations

import pytest

from loopinterp.rasp import (
    eq,
    firsts,
    get_program,
    has_seen,
    indices,
    list_programs,
    shift_right,
    tokens,
    var,
    where,
)
from loopinterp.rasp.compiler.lower.program_lowering import (
    LoweredProgram,
    live,
    lower_program,
)
from loopinterp.rasp.compiler.validate import validate
from loopinterp.rasp.compiler.value_domains import infer_domains
from tests.rasp.compiler.small_programs import program

pytestmark = pytest.mark.usefixtures("quick")

u, v = var("u"), var("v")


def planned(program, max_length=6) -> LoweredProgram:
    source = validate(program, max_length)
    return lower_program(source, infer_domains(source))


def held(made: LoweredProgram) -> dict[str, str]:
    return {feature.name: feature.role for feature in made.persistent}


def test_the_ripple_takes_two_layers_a_loop_and_one_to_read_out():
    made = planned("ripple")
    assert [s.n_layers for s in made.sections] == [0, 2, 1]
    assert held(made) == {"tokens": "tokens", "indices": "indices", "carry": "variable"}
    carries, shares, becomes = made.block.live
    assert carries.name == "generate | (propagate & carry)" and carries.layer == 0
    assert shares.head is not None and shares.layer == 1
    assert {f: target.name for f, target in made.block.targets.items()} == {becomes: "carry"}
    assert becomes.layer == 1
    assert [f.name for f in made.answer.features] == ["answer: propagate ^ carry"]


def test_what_heads_compute_without_variables_is_computed_once():
    x = firsts(tokens, tokens)
    made = planned(program({"u": 0}, {"u": where(eq(x, indices), 1, u)}, has_seen(tokens, 1) & u))
    fixed = [name for name, role in held(made).items() if role == "fixed"]
    assert len(fixed) == 2 and all(name.startswith(("eq(", "aggregate(")) for name in fixed)
    assert not any(feature.head for feature in (*made.block.live, *made.coda.live))


def test_what_needs_no_head_is_computed_where_it_is_needed():
    made = planned(program({"u": 0}, {"u": (u + tokens * indices) % 3}))
    assert held(made) == {"tokens": "tokens", "indices": "indices", "u": "variable"}


def test_first_values_come_from_the_embedding_where_it_can_give_them():
    made = planned(program({"u": tokens % 2, "v": indices}, {"u": u}))
    assert {f.name for f in made.embedded} == {"u", "v"} and made.prelude.n_layers == 0
    made = planned(program({"u": tokens + indices, "v": shift_right(tokens)}, {"u": u}))
    assert not made.embedded
    assert {f.name for f in made.prelude.targets.values()} == {"u", "v"}


def test_an_answer_that_stands_there_already_takes_no_readout():
    assert planned(program({"u": 0}, {"u": u}, u)).coda.n_layers == 0
    assert planned(program({"u": 0}, {"u": u}, u % 2)).coda.n_layers == 0
    assert planned(program({"u": 0}, {"u": u}, 3)).answer.features == ()
    assert planned(program({"u": tokens}, {"u": u}, u + tokens)).coda.n_layers == 1


def test_a_step_that_changes_nothing_still_takes_a_layer():
    made = planned(program({"u": tokens}, {"u": u}))
    assert made.block.n_layers == 1 and made.block.live == [*made.block.targets]


def test_what_nothing_needs_is_not_written():
    # u is always 0, so that what v was at the position before makes no difference.
    finish = where(u, shift_right(v), 1)
    made = planned(program({"u": 0, "v": tokens}, {"v": (v + 1) % 3}, finish))
    assert made.coda.live == [] and made.answer.features == ()


@pytest.mark.parametrize("name", list_programs())
def test_sections_write_what_is_needed_and_read_what_is_there_by_then(name):
    made = planned(get_program(name), max_length=9)
    for section in made.sections:
        there = set(made.persistent)
        for feature in sorted(section.live, key=lambda f: f.layer):
            assert feature.layer < section.n_layers
            for read in feature.inputs:
                assert read in there
                in_time = read.for_mlp if feature.writes is not None else read.for_attention
                assert read in made.persistent or in_time <= feature.layer
            there.add(feature)
        roots = [*section.targets, *(made.answer.features if section is made.coda else ())]
        assert set(section.live) <= live(roots)
