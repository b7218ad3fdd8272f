"""Expressions are data: interned, comparable, printable, and checked when built."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loopinterp import programs
from loopinterp.core.errors import InputError
from loopinterp.programs import (
    evaluate,
    expressions,
    full,
    indices,
    kqv,
    select,
    shift_right,
    tok_map,
    tokens,
    var,
    where,
)
from loopinterp.programs.expressions import ShiftRight
from tests.programs.reference import SELECTORS, SEQUENCES

pytestmark = pytest.mark.usefixtures("quick")

WORDS = {name: getattr(programs, name) for name in dir(programs)}


@settings(max_examples=120, deadline=None)
@given(SEQUENCES | SELECTORS)
def test_the_printed_code_makes_the_same_node(expressions):
    assert eval(repr(expressions), {**WORDS}) is expressions


@settings(max_examples=50, deadline=None)
@given(SEQUENCES | SELECTORS)
def test_copies_and_pickles_are_the_same_node(expressions):
    assert copy.copy(expressions) is expressions
    assert copy.deepcopy(expressions) is expressions
    assert pickle.loads(pickle.dumps(expressions)) is expressions


def test_equality_and_hash_are_those_of_structure():
    a, b = var("u") + tokens, var("u") + tokens
    assert a is b
    assert a == b
    assert hash(a) == hash(b)
    assert a != tokens + var("u")
    assert full(1) != full(2)
    assert len({a, b, tokens, programs.tokens}) == 2
    assert select(tokens, tokens, "==") != select(tokens, tokens, "==", causal=False)
    assert select(tokens, tokens, [(1, 0), (0, 1)]) is select(tokens, tokens, [(0, 1), (1, 0)])


def test_nodes_that_nobody_holds_are_forgotten():
    gc.collect()
    before = len(expressions._NODES)
    x = tokens
    for i in range(100):
        x = x + (12345 + i)
    assert len(expressions._NODES) >= before + 200
    del x
    gc.collect()
    assert len(expressions._NODES) == before


def test_operators_read_naturally():
    g, p, c = tok_map(tokens, {3: 1}, default=0, name="g"), var("p"), var("c")
    code_of = {
        g | (p & c): f"{g!r} | (var('p') & var('c'))",
        1 - c + 2: "(full(1) - var('c')) + 2",
        ~(-c): "~(-var('c'))",
        1 ^ c: "full(1) ^ var('c')",
        where(c >= 0, abs(c), -1): "where(var('c') >= 0, abs(var('c')), -1)",
        shift_right(c, 2, default=-1): "shift_right(var('c'), 2, default=-1)",
        3 * c % 2 // 1: "((full(3) * var('c')) % 2) // 1",
        2 + (0 | (1 & c)): "full(2) + (full(0) | (full(1) & var('c')))",
    }
    for expression, code in code_of.items():
        assert repr(expression) == code


def test_a_shift_stands_for_a_named_selection():
    shift = shift_right(var("c"), 3, default=5)
    assert isinstance(shift, ShiftRight)
    code = (
        "aggregate(select(indices, indices - 3, '==', name='shift_3'), var('c'), 'mean', default=5)"
    )
    assert repr(shift.expanded) == code


def test_shared_parts_are_counted_once_but_written_out_within_bounds():
    x = tokens
    for _ in range(200):
        x = x + x
    assert x.depth == 201
    assert "…" in repr(x)
    assert len(repr(x)) < 10_000


def test_code_of_the_greatest_length_is_written_and_of_one_more_left_out():
    around = len(repr(var("x"))) - 1
    longest, longer = (var("x" * (expressions.MAX_LENGTH - around + more)) for more in (0, 1))
    assert len(repr(longest)) == expressions.MAX_LENGTH
    assert eval(repr(longest), {**WORDS}) is longest
    assert repr(longer) == "…"


def test_an_expression_of_hostile_depth_is_refused_at_once():
    with pytest.raises(InputError, match=r"^expression:"):
        functools.reduce(lambda x, _: x + 1, range(10**6), tokens)


def test_an_expression_has_no_truth_value():
    with pytest.raises(InputError, match=r"^truth value"):
        bool(var("c") < 1)


# Untyped, for calls that the annotations forbid.
words: Any = programs
kinds: Any = expressions
SELECTOR = select(tokens, tokens, "==")


@pytest.mark.parametrize(
    ("build", "what"),
    [
        (lambda: words.tokens + SELECTOR, "operand"),
        (lambda: words.tokens + "1", "operand"),
        (lambda: words.tokens & 0.5, "operand"),
        (lambda: kinds.Aggregate(tokens, tokens), "selector of aggregate"),
        (lambda: kinds.Aggregate(SELECTOR, SELECTOR), "value of aggregate"),
        (lambda: kinds.Aggregate(SELECTOR, tokens, "median"), "mode of aggregate"),
        (lambda: kinds.Aggregate(SELECTOR, tokens, "mean", None), "default of aggregate"),
        (lambda: kinds.SelWidth(tokens), "selector of sel_width"),
        (lambda: kinds.Select(tokens, SELECTOR, "=="), "q of select"),
        (lambda: words.select(tokens, tokens, "="), "predicate of select"),
        (lambda: words.select(tokens, tokens, lambda k, q: k == q), "predicate of select"),
        (lambda: words.select(tokens, tokens, [1, 2]), "predicate of select"),
        (lambda: words.select(tokens, tokens, [(1, 2, 3)]), "predicate of select"),
        (lambda: words.select(tokens, tokens, [(1, "a")]), "token in the predicate of select"),
        (lambda: words.tok_map(tokens, lambda x: x), "table of tok_map"),
        (lambda: words.tok_map(tokens, {0: 0.5}), "entry in the table of tok_map"),
        (lambda: kinds.TokMap(tokens, ((0, True),)), "entry in the table of tok_map"),
        (lambda: words.tok_map(tokens, {0: 1}, default="x"), "default of tok_map"),
        (
            lambda: words.shift_right(tokens, -1),
            "n of shift_right",
        ),
        (lambda: words.shift_right(tokens, False), "n of shift_right"),
        (lambda: words.shift_right(tokens, indices), "n of shift_right"),
        (lambda: words.shift_right(tokens, 1, default=None), "default of shift_right"),
        (lambda: words.full("1"), "value of full"),
        (lambda: words.full(True), "value of full"),
        (lambda: words.var("two words"), "name of var"),
        (lambda: words.var(3), "name of var"),
        (lambda: kinds.Elementwise("plus", (tokens, tokens)), "operation"),
        (lambda: kinds.Elementwise("add", (tokens,)), "args of add"),
        (lambda: words.eq(tokens, None), "operand"),
    ],
)
def test_wrong_kinds_and_arguments_are_refused_when_built(build, what):
    with pytest.raises(InputError) as caught:
        build()
    assert caught.value.what == what


@given(st.integers(-100, 100))
def test_integers_become_constant_sequences(value):
    assert (tokens + value) is (tokens + full(value))


def test_a_shift_by_0_is_the_sequence_itself_and_what_the_error_advises_reads_ahead():
    assert shift_right(tokens, 0, default=3) is tokens
    assert shift_right(2, 0) is full(2)
    ahead = kqv(indices, indices - (-1), tokens, "==", causal=False)
    assert evaluate(ahead, torch.tensor([[5, 6, 7]])).tolist() == [[6, 7, 0]]
