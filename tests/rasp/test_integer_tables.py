"""Tables and relations looked up for whole tensors, whatever the span of their keys."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loopinterp.rasp.integer_tables import Relation, look_up, smallest_integers

pytestmark = pytest.mark.usefixtures("quick")

WIDE = st.integers(-5, 5) | st.sampled_from([-(2**63), 2**63 - 1, 2**62, -(10**9), 10**9])


@settings(max_examples=300, deadline=None)
@given(
    st.dictionaries(WIDE, st.integers(-9, 9), max_size=6),
    st.lists(WIDE, min_size=1, max_size=8),
    st.integers(-99, 99),
)
def test_a_table_of_near_or_far_keys_is_looked_up_exactly(table, values, default):
    keys = torch.tensor(sorted(table), dtype=torch.int64)
    new = torch.tensor([table[key] for key in sorted(table)], dtype=torch.int64)
    found = look_up(torch.tensor([values]), keys, new, default)
    assert found.tolist() == [[table.get(value, default) for value in values]]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(WIDE, WIDE), max_size=8, unique=True),
    st.lists(st.tuples(WIDE, WIDE), min_size=1, max_size=8),
)
def test_a_relation_holds_for_its_pairs_and_no_others(pairs, asked):
    relation = Relation(pairs, torch.device("cpu"))
    k, q = torch.tensor(asked).T
    holds = relation.holds(relation.keys(k)[None, None, :], relation.queries(q)[None, :, None])
    assert holds[0].tolist() == [[(a, b) in pairs for a, _ in asked] for _, b in asked]


@pytest.mark.parametrize("queries", [1, 7, 8, 15, 16, 31, 32, 63, 64, 100])
def test_a_relation_of_few_or_many_queries_holds_for_its_pairs_and_no_others(queries):
    pairs = [(key, key * key % queries - 5) for key in range(2 * queries)]
    pairs += [(-1, query - 5) for query in range(queries)]
    relation = Relation(pairs, torch.device("cpu"))
    k, q = torch.arange(-3, 2 * queries + 3), torch.arange(-8, queries)
    holds = relation.holds(relation.keys(k)[None, :], relation.queries(q)[:, None])
    assert holds.tolist() == [[(a, b) in pairs for a in k.tolist()] for b in q.tolist()]


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64])
def test_the_smallest_integers_hold_their_ends_and_nothing_beyond(dtype):
    low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    assert smallest_integers(low, high) == dtype
    assert smallest_integers(0, high) == smallest_integers(low, 0) == dtype
    if dtype != torch.int64:
        assert smallest_integers(low - 1, 0) != dtype
        assert smallest_integers(0, high + 1) != dtype
