"""AggregateHeads and widths, in every case of how it is known that a key was found."""

from __future__ import annotations

import pytest

from loopinterp.rasp import (
    aggregate,
    argmax,
    cumsum,
    eq,
    firsts,
    full,
    has_seen,
    index_select,
    indices,
    kqv,
    lasts,
    maximum,
    minimum,
    mode,
    num_prev,
    sel_width,
    select,
    shift_right,
    smaller,
    tok_map,
    tokens,
    var,
    where,
)
from loopinterp.rasp.compiler import compile_program
from tests.rasp.compiler.compiled_properties import agrees
from tests.rasp.compiler.small_programs import every_input, program

pytestmark = pytest.mark.usefixtures("quick")

u = var("u")
signed = tok_map(tokens, {0: -5, 1: 2, 2: 3})
LENGTH = 5


def check(prepare, step=u, *, max_length=LENGTH):
    """An expression in prepare, and another in step, on all inputs."""
    compiled = compile_program(program({"u": prepare}, {"u": step}), max_length=max_length)
    for n in range(1, max_length + 1):
        agrees(compiled, every_input(compiled.program, n), n_loops=2)
    return compiled


def hows(compiled) -> set[str]:
    return {group.how for group in compiled.circuit.neurons}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("default", [-4, 0, 9])
@pytest.mark.parametrize("kind", ["mean", "max", "min"])
@pytest.mark.parametrize("predicate", ["<", "!=", ">", [(0, 1), (2, 1), (2, 2)]])
def test_aggregates_of_negative_values_and_of_nothing(predicate, kind, default, causal):
    selector = select(tokens, tokens, predicate, causal=causal)
    compiled = check(aggregate(selector, signed, kind, default))
    assert kind in hows(compiled)


@pytest.mark.parametrize(
    "x",
    [
        # found everywhere
        aggregate(select(tokens, tokens, "=="), indices, "max"),
        aggregate(select(0, 0, "true"), signed),
        # found nowhere
        aggregate(select(tokens, 7, "=="), signed, default=4),
        sel_width(select(tokens, 7, "==")),
        # by where the query stands, alone or with what it asks
        shift_right(signed, 2, default=-1),
        aggregate(select(indices, 2, "=="), signed, default=8),
        index_select(signed, tokens + 1, default=-2),
        aggregate(select(indices, tokens, ">="), signed, "min", -2),
        # by what the query asks: all keys, or none
        aggregate(select(1, tokens, "<"), signed, "max", 6),
        sel_width(select(1, tokens, "<")),
        # by what the head sees: one thing that can be asked, or several
        has_seen(tokens, 1),
        firsts(tokens, 2),
        lasts(tokens, tokens - 1, default=-3),
        kqv(tokens, indices, 1, "==", default=0),
        num_prev(tokens, tokens - 1),
    ],
    ids=repr,
)
def test_what_is_found_is_known_however_a_selection_asks(x):
    check(x)
    ahead = compile_program(  # the same in a model that can look ahead
        program({"u": x, "v": sel_width(select(tokens, tokens, "==", causal=False))}, {"u": u}),
        max_length=4,
    )
    for n in (1, 3, 4):
        agrees(ahead, every_input(ahead.program, n), n_loops=1)


@pytest.mark.parametrize(
    "step",
    [
        where(eq(u, 0), shift_right(u, default=2), minimum(u)),
        aggregate(select(u, u, "<"), u, "max", 1),
        aggregate(select(tokens, u, "=="), tokens, default=2),
        smaller(cumsum(u), 2),
        index_select(u, u, default=1),
        mode(u),
        argmax(u) % 3,
        has_seen(u, tokens) + has_seen(shift_right(u), 1),
        aggregate(select(u, maximum(u), "==", causal=False), tokens, "min", 2),
    ],
    ids=repr,
)
def test_selections_by_what_changes_from_loop_to_loop(step):
    check(tokens, step)


def test_an_integer_mean_is_truncated_towards_0():
    every = select(0, 0, "true")
    for shift in range(-4, 5):
        check(aggregate(every, tokens * 2 + shift))


@pytest.mark.parametrize("start", [10**6, 10**12, -(10**12)])
def test_means_of_large_numbers_are_as_exact_as_those_of_small_ones(start):
    table = tok_map(tokens, {0: start, 1: start + 1, 2: start + 3})
    check(kqv(0, 0, table, "true", default=start), kqv(u, u, u, "<=", default=start))


def test_a_mean_of_wide_numbers_over_many_keys_is_exact():
    wide = tok_map(tokens, {0: -60, 1: 0, 2: 67})
    check(kqv(0, 0, wide, "true", causal=False), max_length=6)


def test_one_head_carries_all_that_one_selector_reads():
    selector = select(tokens, tokens, "==")
    both = aggregate(selector, indices, "max") + aggregate(selector, indices, "min")
    compiled = check(both + sel_width(selector))
    assert len(compiled.circuit.heads) == 1


def test_one_key_value_is_no_flag_of_having_found_it():
    # A key that can have but one value is written as a single 1, as a flag is.
    ahead = select(indices, u, "==", causal=False)
    compiled = compile_program(
        program({"u": full(1)}, {"u": full(0)}, sel_width(ahead), n_tokens=1), max_length=1
    )
    agrees(compiled, every_input(compiled.program, 1), n_loops=2)


@pytest.mark.parametrize("causal", [True, False])
def test_models_for_a_single_position_and_a_single_token(causal):
    selector = select(tokens, indices, "==", causal=causal)
    x = aggregate(selector, indices + 3, "mean", -1) + sel_width(selector)
    compiled = compile_program(program({"u": x}, {"u": shift_right(u)}, n_tokens=1), max_length=1)
    agrees(compiled, every_input(compiled.program, 1), n_loops=2)
