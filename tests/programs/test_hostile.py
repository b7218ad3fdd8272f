"""Hostile sizes end in a message, at once: nothing large is ever built."""

from __future__ import annotations

import itertools
import operator
from functools import reduce

import pytest
import torch

from loopinterp.core.errors import InputError
from loopinterp.programs import (
    Linear,
    LoopProgram,
    cumsum,
    evaluate,
    full,
    get_program,
    indices,
    select,
    tok_map,
    tokens,
    var,
)
from loopinterp.programs.expressions import MAX_RELATION, MAX_TABLE
from tests.work import at_most

pytestmark = pytest.mark.usefixtures("quick")

MILLION = 10**6
TABLE = dict.fromkeys(range(MILLION), 0)
PAIRS = [(i, i) for i in range(MILLION)]


def alphabet(inputs) -> LoopProgram:
    x = {"x": tokens}
    return LoopProgram("large", "any", inputs, x, {"x": var("x")}, var("x"), Linear())


@pytest.mark.parametrize(
    ("attempt", "what"),
    [
        (lambda: reduce(operator.add, itertools.repeat(tokens, MILLION)), "expression"),
        (lambda: reduce(lambda x, _: cumsum(x), range(MILLION), tokens), "expression"),
        (lambda: tok_map(tokens, TABLE), "table of tok_map"),
        (lambda: select(tokens, tokens, PAIRS), "predicate of select"),
        (lambda: select(tokens, tokens, tuple(PAIRS)), "predicate of select"),
        (lambda: select(tokens, tokens, zip(*[itertools.count()] * 2)), "predicate of select"),
        (lambda: alphabet(map(str, range(MILLION))), "inputs of program large"),
        (lambda: alphabet(map(str, itertools.count())), "inputs of program large"),
        (lambda: alphabet(()), "inputs of program large"),
        (lambda: evaluate(cumsum(tokens), torch.zeros(1, MILLION).long()), "sequence"),
        (
            lambda: get_program("ripple").trace(torch.zeros(9, 99).long(), 2 * MILLION),
            "trace of program ripple",
        ),
        (lambda: full(10**MILLION), "value of full"),
        (lambda: tok_map(tokens, {2**63: 0}), "entry in the table of tok_map"),
        (lambda: tokens + 2**63, "value of full"),
    ],
)
def test_a_million_of_anything_is_refused_at_once(attempt, what):
    with at_most(calls=1_000_000), pytest.raises(InputError) as caught:
        attempt()
    assert caught.value.what == what


def test_the_largest_sizes_that_are_allowed_work():
    x = torch.tensor([[5, MAX_TABLE - 1, MAX_TABLE]])
    table = tok_map(tokens, {key: key // 2 for key in range(MAX_TABLE)}, default=-1)
    assert evaluate(table, x).tolist() == [[2, (MAX_TABLE - 1) // 2, -1]]
    relation = select(tokens, tokens, [(key, key) for key in range(MAX_RELATION)])
    assert evaluate(relation, x).tolist() == [[[True, False, False]] + [[False] * 3] * 2]


def test_a_deep_expression_of_many_sequences_needs_the_memory_of_a_few_nodes():
    x = reduce(lambda x, _: (x + indices) % 7, range(1_000), tokens)
    y = torch.ones(4096, 64, dtype=torch.int64)
    assert evaluate(x, y)[0, :3].tolist() == [1, 1001 % 7, 2001 % 7]


def test_a_long_table_is_named_and_not_listed():
    table = tok_map(tokens, dict.fromkeys(range(MAX_TABLE), 0))
    with pytest.raises(InputError) as caught:
        evaluate(table, torch.tensor([[-5]]))
    assert "-5" in caught.value.given and len(str(caught.value)) < 5_000
    named = tok_map(tokens, dict.fromkeys(range(MAX_TABLE), 0), name="zero")
    program = LoopProgram("large", "any", ("0",), {"x": named}, {"x": var("x")}, var("x"), Linear())
    text = str(program)
    assert "zero: a table" in text and "65,536 entries" in text and len(text) < 5_000
