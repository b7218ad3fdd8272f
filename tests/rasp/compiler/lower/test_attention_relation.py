"""Selections as queries and keys: the products of their codes are the relation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loopinterp.rasp import indices, select, tokens
from loopinterp.rasp.compiler.lower.attention_relation import AttentionRelation, causal_codes
from loopinterp.rasp.compiler.lower.feature_functions import FeatureFunction, constant, of_feature
from loopinterp.rasp.compiler.lower.lowered_features import Feature
from loopinterp.rasp.expr import Select
from loopinterp.rasp.ops import PREDICATES
from tests.rasp.reference import PREDICATES as DEFINITIONS

pytestmark = pytest.mark.usefixtures("quick")

a, b = Feature("a", (-1, 0, 2, 5)), Feature("b", (0, 1, 2))
places = Feature("indices", tuple(range(4)), "indices")


def pick(k, q, predicate) -> Select:
    made = select(k, q, predicate)
    assert isinstance(made, Select)
    return made


def related(holds, key=None, query=None) -> AttentionRelation:
    """A selection that is this relation."""
    holds = np.array(holds, dtype=bool)
    key = of_feature(Feature("k", tuple(range(len(holds))))) if key is None else key
    query = of_feature(Feature("q", tuple(range(holds.shape[1])))) if query is None else query
    return AttentionRelation(pick(tokens, indices, "=="), key, query, holds)


RELATIONS = st.builds(
    lambda seed, k, q, dense: np.random.default_rng(seed).random((k, q)) < dense,
    st.integers(0, 2**32 - 1),
    st.integers(1, 7),
    st.integers(1, 7),
    st.sampled_from([0.0, 0.2, 0.5, 1.0]),
)


@pytest.mark.parametrize("predicate", [*PREDICATES, [(0, 0), (2, 1), (5, 0), (9, 9)]])
def test_a_predicate_becomes_a_relation_of_values(predicate):
    key = FeatureFunction((a,), np.array([5, 0, 2, 2]))
    made = pick(tokens, indices, predicate)
    found = AttentionRelation.of(made, key, of_feature(b))
    for i, k in enumerate(key.table.tolist()):
        for j, q in enumerate(b.values):
            if isinstance(predicate, str):
                assert found.holds[i, j] == DEFINITIONS[predicate](k, q)
            else:
                assert found.holds[i, j] == ((k, q) in predicate)


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(RELATIONS)
def test_products_of_codes_are_the_relation_in_as_few_dimensions_as_it_has_classes(holds):
    key, query = related(holds).codes()
    assert np.array_equal(key.matrix @ query.matrix.T, holds)
    rows, columns = (
        {r.tobytes() for r in holds if r.any()},
        {c.tobytes() for c in holds.T if c.any()},
    )
    assert key.matrix.shape[1] == query.matrix.shape[1] == min(len(rows), len(columns))


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(RELATIONS)
def test_queries_that_ask_the_same_are_of_one_class(holds):
    relation, kind = related(holds).classes()
    for query, column in enumerate(holds.T):
        if column.any():
            assert np.array_equal(relation[:, kind[query]], column)
        else:
            assert kind[query] == -1
    assert len({c.tobytes() for c in relation.T}) == relation.shape[1]


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(RELATIONS)
def test_within_reach_are_the_queries_that_select_something_before_them(holds):
    found = related(holds, key=of_feature(Feature("indices", tuple(range(len(holds))), "indices")))
    for place in range(len(holds)):
        for query in range(holds.shape[1]):
            assert found.within_reach[query, place] == holds[: place + 1, query].any()


def test_constant_keys_and_queries_are_told_by_no_feature():
    key, query = AttentionRelation.of(pick(0, tokens, "<"), constant(0), of_feature(b)).codes()
    assert key.feature is None and query.feature is b
    assert (key.matrix @ query.matrix.T).tolist() == [[0, 1, 1]]


def test_it_is_known_where_every_position_selects_itself():
    assert AttentionRelation.of(
        pick(tokens, tokens, "<="), of_feature(a), of_feature(a)
    ).sees_itself
    assert not AttentionRelation.of(
        pick(tokens, tokens, "<"), of_feature(a), of_feature(a)
    ).sees_itself
    assert AttentionRelation.of(pick(tokens, 0, "true"), of_feature(a), constant(0)).sees_itself
    # Alike, but of different features: nothing is known.
    twin = Feature("twin", a.values)
    assert not AttentionRelation.of(
        pick(tokens, tokens, "<="), of_feature(a), of_feature(twin)
    ).sees_itself


def test_it_is_known_where_all_selected_keys_have_one_value():
    by_place = AttentionRelation.of(pick(indices, tokens, "=="), of_feature(places), of_feature(b))
    assert by_place.one_key and by_place.one_value(of_feature(a))
    before = AttentionRelation.of(pick(indices, tokens, "<"), of_feature(places), of_feature(b))
    assert not before.one_key and not before.one_value(of_feature(a))
    same = AttentionRelation.of(pick(tokens, tokens, "=="), of_feature(a), of_feature(b))
    assert not same.one_key and same.one_value(of_feature(a)) and same.one_value(constant(3))
    signs = AttentionRelation.of(pick(tokens, tokens, "<"), of_feature(a), of_feature(b))
    assert not signs.one_value(of_feature(a))
    assert signs.one_value(FeatureFunction((a,), np.array([7, 7, 8, 9])))


@pytest.mark.parametrize("length", [1, 2, 9])
def test_causal_codes_take_off_more_the_further_ahead_a_key_is(length):
    key, query = causal_codes(Feature("indices", tuple(range(length)), "indices"))
    k, q = np.indices((length, length))
    assert np.array_equal(key.matrix @ query.matrix.T, -2.0 * np.maximum(k - q, 0))
