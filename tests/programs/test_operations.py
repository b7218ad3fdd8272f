"""Every primitive against its definition, one sequence at a time in Python integers."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loopinterp.programs import (
    aggregate,
    full,
    indices,
    kqv,
    sel_width,
    select,
    seq_map,
    tok_map,
    tokens,
    var,
    where,
)
from loopinterp.programs.selection import Lookup, _by_pairs, _smallest_integers
from tests.programs.batches import Row, agree, batches
from tests.programs.reference import OPERATIONS, PREDICATES

pytestmark = pytest.mark.usefixtures("quick")

u, v = var("u"), var("v")
RELATION = [(0, 1), (1, 1), (-1, 0), (3, -4), (2, 2)]
HOLDS = {**PREDICATES, "relation": lambda k, q: (k, q) in RELATION}
TABLE = {-4: 7, -1: 0, 0: 3, 1: 1, 900: -2}


def selected(name: str, k: Row, q: Row, causal: bool) -> list[list[bool]]:
    """Whether each query (row) looks at each key."""
    return [
        [HOLDS[name](k[j], q[i]) and (j <= i or not causal) for j in range(len(k))]
        for i in range(len(q))
    ]


def reduced(rows: list[list[bool]], value: Row, mode: str, default: int) -> Row:
    """Mean (truncated), largest or smallest of what each row selects."""
    out = []
    for row in rows:
        seen = list(itertools.compress(value, row))
        if not seen:
            out.append(default)
        elif mode == "mean":
            quotient = abs(sum(seen)) // len(seen)
            out.append(quotient if sum(seen) >= 0 else -quotient)
        else:
            out.append(max(seen) if mode == "max" else min(seen))
    return out


def predicate(name: str):
    return RELATION if name == "relation" else name


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", HOLDS)
@settings(max_examples=20, deadline=None)
@given(data=batches())
def test_select(name, causal, data):
    expr = select(tokens, u, predicate(name), causal=causal)
    agree(expr, lambda x, u, v: selected(name, x, u, causal), data)


@pytest.mark.parametrize("name", ["==", "<", "!=", "relation"])
@settings(max_examples=20, deadline=None)
@given(data=batches())
def test_sel_width(name, data):
    expr = sel_width(select(tokens, u, predicate(name)))
    agree(expr, lambda x, u, v: [sum(row) for row in selected(name, x, u, True)], data)


@pytest.mark.parametrize("name", ["==", "<", "relation"])
@pytest.mark.parametrize("mode", ["mean", "max", "min"])
@settings(max_examples=20, deadline=None)
@given(data=batches(), default=st.integers(-9, 9))
def test_aggregate_and_kqv(mode, name, data, default):
    expr = aggregate(select(tokens, u, predicate(name)), v, mode, default)
    assert kqv(tokens, u, v, predicate(name), mode=mode, default=default) is expr
    agree(expr, lambda x, u, v: reduced(selected(name, x, u, True), v, mode, default), data)


@pytest.mark.parametrize("mode", ["mean", "max", "min"])
@settings(max_examples=20, deadline=None)
@given(data=batches(), causal=st.booleans())
def test_aggregate_where_all_examples_share_the_selection(mode, data, causal):
    expr = aggregate(select(indices, indices - 1, "<", causal=causal), tokens, mode, 5)

    def definition(x: Row, u: Row, v: Row) -> Row:
        places = list(range(len(x)))
        return reduced(selected("<", places, [i - 1 for i in places], causal), x, mode, 5)

    agree(expr, definition, data)


@pytest.mark.parametrize("op", OPERATIONS)
@settings(max_examples=20, deadline=None)
@given(data=batches())
def test_seq_map(op, data):
    by_hand = OPERATIONS[op]
    count = {"not": 1, "neg": 1, "abs": 1, "where": 3}.get(op, 2)
    if op in ("floordiv", "mod"):  # a divisor that is never 0
        expr = seq_map(op, tokens, where(u, u, 2))
        agree(expr, lambda x, u, v: [by_hand(a, b or 2) for a, b in zip(x, u)], data)
    else:
        expr = seq_map(op, *(tokens, u, v)[:count])
        agree(expr, lambda *rows: [by_hand(*values) for values in zip(*rows[:count])], data)


@settings(max_examples=20, deadline=None)
@given(data=batches(), default=st.integers(-9, 9))
def test_tok_map(data, default):
    expr = tok_map(tokens, TABLE, default=default)
    agree(expr, lambda x, u, v: [TABLE.get(value, default) for value in x], data)


@settings(max_examples=20, deadline=None)
@given(data=batches(), value=st.integers(-(2**40), 2**40))
def test_full_and_indices(data, value):
    agree(full(value), lambda x, u, v: [value] * len(x), data)
    agree(indices, lambda x, u, v: list(range(len(x))), data)


WIDE = st.integers(-5, 5) | st.sampled_from([-(2**63), 2**63 - 1, 2**62, -(10**9), 10**9])


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(WIDE, st.integers(-9, 9), max_size=6),
    st.lists(WIDE, min_size=1, max_size=8),
    st.integers(-99, 99),
)
def test_a_table_of_near_or_far_keys_is_looked_up_exactly(table, values, default):
    keys = torch.tensor(sorted(table), dtype=torch.int64)
    new = torch.tensor([table[key] for key in sorted(table)], dtype=torch.int64)
    read = Lookup(keys, new, default)(torch.tensor([values]))
    assert read.tolist() == [[table.get(value, default) for value in values]]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(WIDE, WIDE), max_size=8, unique=True),
    st.lists(st.tuples(WIDE, WIDE), min_size=1, max_size=8),
)
def test_a_relation_holds_for_its_pairs_and_no_others(pairs, asked):
    rows, columns, holds = _by_pairs(pairs, *torch.tensor(asked).T)
    table = holds(rows[None, None, :], columns[None, :, None])
    assert table[0].tolist() == [[(a, b) in pairs for a, _ in asked] for _, b in asked]


@pytest.mark.parametrize("queries", [1, 7, 8, 15, 16, 31, 32, 63, 64, 100])
def test_a_relation_of_few_or_many_queries_holds_for_its_pairs_and_no_others(queries):
    pairs = [(key, key * key % queries - 5) for key in range(2 * queries)]
    pairs += [(-1, query - 5) for query in range(queries)]
    k, q = torch.arange(-3, 2 * queries + 3), torch.arange(-8, queries)
    rows, columns, holds = _by_pairs(pairs, k, q)
    assert holds(rows[None, :], columns[:, None]).tolist() == [
        [(a, b) in pairs for a in k.tolist()] for b in q.tolist()
    ]


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64])
def test_the_smallest_integers_hold_their_ends_and_nothing_beyond(dtype):
    low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    assert _smallest_integers(low, high) == dtype
    assert _smallest_integers(0, high) == _smallest_integers(low, 0) == dtype
    if dtype != torch.int64:
        assert _smallest_integers(low - 1, 0) != dtype
        assert _smallest_integers(0, high + 1) != dtype
