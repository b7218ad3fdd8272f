"""Hostile programs end in a message that names the expression and the fix, or they compile."""

from __future__ import annotations

import functools
import operator

import pytest
import torch

from loopinterp.compiler import compile_program
from loopinterp.core.errors import InputError
from loopinterp.programs import (
    cumsum,
    full,
    indices,
    sel_width,
    select,
    shift_right,
    tok_map,
    tokens,
    var,
    where,
)
from loopinterp.programs.expressions import MAX_DEPTH, MAX_RELATION
from tests.compiler.compiled_properties import agrees
from tests.compiler.small_programs import every_input, program
from tests.work import at_most

pytestmark = pytest.mark.usefixtures("quick")

u = var("u")
MILLION = 10**6
WIDE = tok_map(tokens, {k: k * 997 for k in range(1_000)}, default=0)


def deep(grow, times, x=u):
    return functools.reduce(lambda x, _: grow(x), range(times), x)


@pytest.fixture(scope="module", autouse=True)
def _warm():
    compile_program("ripple", max_length=4)


@pytest.mark.parametrize(
    ("prepare_and_step", "what"),
    [
        ((0, u + 1), "variable 'u' of program small"),
        ((0, shift_right(u) + 1), "variable 'u'"),
        ((0, where(u < MILLION, u + 1, u)), "variable 'u'"),
        ((0, cumsum(u) * u + u + tokens), " in step of program small"),
        ((WIDE, u * shift_right(u)), "var('u') * "),
        ((WIDE, u * shift_right(u) * shift_right(u, 2)), "var('u') * "),
        ((WIDE * WIDE + indices, u), " + indices in prepare"),
        ((0, tok_map(u, {k: (k * 7 + 1) % 16_384 for k in range(16_384)})), "variable 'u'"),
        ((indices, (u * indices) % 512), "var('u') * indices in step"),
    ],
    ids=[
        "counter",
        "moving counter",
        "counter with a far end",
        "growing sums",
        "product",
        "triple product",
        "large prepare",
        "large table",
        "product of positions",
    ],
)
def test_a_million_values_are_refused_at_once(prepare_and_step, what):
    prepare, step = prepare_and_step
    length = 512 if "indices in step" in what else 6
    hostile = program({"u": prepare}, {"u": step}, n_tokens=1_000)
    with at_most(calls=3_000_000), pytest.raises(InputError) as caught:
        compile_program(hostile, max_length=length)
    assert what in caught.value.what
    assert "1,024 values" in caught.value.expected


def test_so_many_tokens_are_refused_at_once():
    hostile = program({"u": tok_map(tokens, {1: 1}, default=0)}, {"u": u}, n_tokens=65_536)
    with at_most(calls=3_000_000), pytest.raises(InputError) as caught:
        compile_program(hostile, max_length=8)
    assert caught.value.what.startswith("tokens in prepare")


@pytest.mark.parametrize(
    "grow",
    [
        lambda x: where(tokens, x, (x + tokens + 1) % 3),
        lambda x: shift_right(x),
    ],
    ids=["choices of sums", "shifts"],
)
def test_the_deepest_expressions_compile(grow):
    times = (MAX_DEPTH - 5) // (grow(u).depth - 1)
    deepest = deep(grow, times)
    assert MAX_DEPTH - 10 < deepest.depth <= MAX_DEPTH
    hostile = program({"u": 0}, {"u": deepest}, u)
    agrees(compile_program(hostile, max_length=3), every_input(hostile, 2), n_loops=2)


def test_a_deep_expression_of_many_layers_is_refused_by_name():
    steps = deep(lambda x: (shift_right(x) + indices) % 7, 100)
    with pytest.raises(InputError) as caught:
        compile_program(program({"u": 0}, {"u": steps}), max_length=64)
    assert caught.value.what.endswith(" of program small")


@pytest.mark.parametrize("join", [operator.xor, operator.and_, operator.add])
def test_expressions_of_many_arguments_compile_soon(join):
    terms = [shift_right(u, k) for k in range(1, 20)]
    hostile = program({"u": tokens % 2}, {"u": functools.reduce(join, terms) % 2}, u, n_tokens=2)
    with at_most(calls=5_000_000):
        compiled = compile_program(hostile, max_length=22)
    inputs = every_input(hostile, 7).repeat(1, 3)
    agrees(compiled, inputs, n_loops=2)


def test_long_chains_of_choices_among_many_variables_compile_soon():
    names = [f"v{k}" for k in range(10)]
    chain = functools.reduce(
        lambda x, k: where(var(names[k]) > 1, x, var(names[7 * k % 10])), range(10), full(1)
    )
    hostile = program(dict.fromkeys(names, tokens), dict.fromkeys(names, chain), var("v0"))
    with at_most(calls=2_000_000):
        compiled = compile_program(hostile, max_length=3)
    agrees(compiled, every_input(hostile, 3), n_loops=2)


def test_a_relation_as_large_as_it_may_be_compiles_at_once():
    x = tok_map(tokens, {k: k * 7 % 64 for k in range(64)})
    pairs = [(k % 64, k // 64) for k in range(MAX_RELATION) if k % 3]
    hostile = program({"u": sel_width(select(x, tokens, pairs))}, {"u": u}, n_tokens=64)
    with at_most(calls=3_000_000):
        compiled = compile_program(hostile, max_length=8)
    inputs = torch.randint(64, (200, 8), generator=torch.Generator().manual_seed(0))
    agrees(compiled, inputs, n_loops=1)
