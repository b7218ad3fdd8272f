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
    ("attempt", "message"),
    [
        (lambda: reduce(operator.add, itertools.repeat(tokens, MILLION)), "depth of at most"),
        (lambda: reduce(lambda x, _: cumsum(x), range(MILLION), tokens), "depth of at most"),
        (lambda: tok_map(tokens, TABLE), "at most 65,536 entries, got 1,000,000"),
        (lambda: select(tokens, tokens, PAIRS), r"at most 4,096 \(key, query\) pairs"),
        (lambda: select(tokens, tokens, tuple(PAIRS)), "at most 4,096"),
        (lambda: select(tokens, tokens, zip(*[itertools.count()] * 2)), "at most 4,096"),
        (lambda: alphabet(map(str, range(MILLION))), "1 to 65,536 input tokens, got more"),
        (lambda: alphabet(map(str, itertools.count())), "1 to 65,536 input tokens, got more"),
        (lambda: alphabet(()), "1 to 65,536 input tokens, got none"),
        (lambda: evaluate(cumsum(tokens), torch.zeros(1, MILLION).long()), "at most 16,384 pos"),
        (lambda: get_program("ripple").trace(torch.zeros(9, 99).long(), 2 * MILLION), "at most 1,"),
        (lambda: full(10**MILLION), "64 bits, got one of 3321929 bits"),
        (lambda: tok_map(tokens, {2**63: 0}), "64 bits"),
        (lambda: tokens + 2**63, "64 bits"),
    ],
)
def test_a_million_of_anything_is_refused_at_once(attempt, message):
    with at_most(calls=1_000_000), pytest.raises(InputError, match=message):
        attempt()


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
    with pytest.raises(InputError, match=r"none for -5, only for \[0, 1, 2, .*\.\.\.\]") as error:
        evaluate(table, torch.tensor([[-5]]))
    assert len(str(error.value)) < 5_000
    named = tok_map(tokens, dict.fromkeys(range(MAX_TABLE), 0), name="zero")
    program = LoopProgram("large", "any", ("0",), {"x": named}, {"x": var("x")}, var("x"), Linear())
    assert "zero: a table of 65,536 entries" in str(program)
