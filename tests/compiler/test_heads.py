"""Selections as queries and keys: the products of their codes are the relation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loopinterp.compiler import compile_program
from loopinterp.compiler.features import Feature, FeatureFunction, constant, of_feature
from loopinterp.compiler.heads import AttentionRelation, causal_codes, classes
from loopinterp.programs import (
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
from loopinterp.programs.expressions import Select
from loopinterp.programs.selection import PREDICATES
from tests.compiler.compiled_properties import agrees
from tests.compiler.small_programs import every_input, program
from tests.programs.reference import PREDICATES as DEFINITIONS

pytestmark = pytest.mark.usefixtures("quick")

a, b = Feature("a", (-1, 0, 2, 5)), Feature("b", (0, 1, 2))
places = Feature("indices", tuple(range(4)), "indices")


def pick(k, q, predicate) -> Select:
    selection = select(k, q, predicate)
    assert isinstance(selection, Select)
    return selection


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
    selection = pick(tokens, indices, predicate)
    relation = AttentionRelation.from_functions(selection, key, of_feature(b))
    for i, k in enumerate(key.table.tolist()):
        for j, q in enumerate(b.values):
            if isinstance(predicate, str):
                assert relation.holds[i, j] == DEFINITIONS[predicate](k, q)
            else:
                assert relation.holds[i, j] == ((k, q) in predicate)


@settings(max_examples=80, deadline=None, derandomize=True, database=None)
@given(RELATIONS)
def test_products_of_codes_are_the_relation_in_as_few_dimensions_as_it_has_classes(holds):
    key, query = related(holds).codes()
    assert np.array_equal(key.matrix @ query.matrix.T, holds)
    rows, columns = (
        {r.tobytes() for r in holds if r.any()},
        {c.tobytes() for c in holds.T if c.any()},
    )
    assert key.matrix.shape[1] == query.matrix.shape[1] == min(len(rows), len(columns))


@settings(max_examples=80, deadline=None, derandomize=True, database=None)
@given(RELATIONS)
def test_queries_that_ask_the_same_are_of_one_class(holds):
    relation, kind = classes(holds)
    for query, column in enumerate(holds.T):
        if column.any():
            assert np.array_equal(relation[:, kind[query]], column)
        else:
            assert kind[query] == -1
    assert len({c.tobytes() for c in relation.T}) == relation.shape[1]


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(RELATIONS)
def test_within_reach_are_the_queries_that_select_something_before_them(holds):
    relation = related(
        holds, key=of_feature(Feature("indices", tuple(range(len(holds))), "indices"))
    )
    for place in range(len(holds)):
        for query in range(holds.shape[1]):
            assert relation.within_reach[query, place] == holds[: place + 1, query].any()


def test_constant_keys_and_queries_are_told_by_no_feature():
    key, query = AttentionRelation.from_functions(
        pick(0, tokens, "<"), constant(0), of_feature(b)
    ).codes()
    assert key.feature is None and query.feature is b
    assert (key.matrix @ query.matrix.T).tolist() == [[0, 1, 1]]


def test_it_is_known_where_every_position_selects_itself():
    assert AttentionRelation.from_functions(
        pick(tokens, tokens, "<="), of_feature(a), of_feature(a)
    ).sees_itself
    assert not AttentionRelation.from_functions(
        pick(tokens, tokens, "<"), of_feature(a), of_feature(a)
    ).sees_itself
    assert AttentionRelation.from_functions(
        pick(tokens, 0, "true"), of_feature(a), constant(0)
    ).sees_itself
    # Alike, but of different features: nothing is known.
    twin = Feature("twin", a.values)
    assert not AttentionRelation.from_functions(
        pick(tokens, tokens, "<="), of_feature(a), of_feature(twin)
    ).sees_itself


def test_it_is_known_where_all_selected_keys_have_one_value():
    by_place = AttentionRelation.from_functions(
        pick(indices, tokens, "=="), of_feature(places), of_feature(b)
    )
    assert by_place.one_value(of_feature(a))
    before = AttentionRelation.from_functions(
        pick(indices, tokens, "<"), of_feature(places), of_feature(b)
    )
    assert not before.one_value(of_feature(a))
    same = AttentionRelation.from_functions(
        pick(tokens, tokens, "=="), of_feature(a), of_feature(b)
    )
    assert same.one_value(of_feature(a)) and same.one_value(constant(3))
    signs = AttentionRelation.from_functions(
        pick(tokens, tokens, "<"), of_feature(a), of_feature(b)
    )
    assert not signs.one_value(of_feature(a))
    assert signs.one_value(FeatureFunction((a,), np.array([7, 7, 8, 9])))


@pytest.mark.parametrize("length", [1, 2, 9])
def test_causal_codes_take_off_more_the_further_ahead_a_key_is(length):
    key, query = causal_codes(Feature("indices", tuple(range(length)), "indices"))
    k, q = np.indices((length, length))
    assert np.array_equal(key.matrix @ query.matrix.T, -2.0 * np.maximum(k - q, 0))


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


KINDS, DEFAULTS = ("mean", "max", "min"), (-4, 0, 9)


# Each kind meets each default: which one is for nothing has no part in what is selected.
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("predicate", "kind", "default"),
    [
        (predicate, kind, DEFAULTS[(p + k) % 3])
        for p, predicate in enumerate(["<", "!=", ">", [(0, 1), (2, 1), (2, 2)]])
        for k, kind in enumerate(KINDS)
    ],
)
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
    for shift in (-4, -3, -1, 0, 3):
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
