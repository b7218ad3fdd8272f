"""Every library function against its definition, one sequence at a time in Python integers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loopinterp.core.errors import InputError
from loopinterp.programs import (
    aggr,
    aggregate,
    argmax,
    argmin,
    binary_mode,
    cumsum,
    evaluate,
    first_true,
    firsts,
    has_seen,
    index_select,
    induct,
    induct_kqv,
    induct_prev,
    lasts,
    mask,
    maximum,
    minimum,
    mode,
    num_prev,
    shift_right,
    tokens,
    var,
    where,
)
from loopinterp.programs.expressions import Seq
from tests.programs.batches import Row, agree, batches

pytestmark = pytest.mark.usefixtures("quick")

u, v = var("u"), var("v")


def each(value_at: Callable[[Row, Row, Row, int], int]) -> Callable[[Row, Row, Row], Row]:
    """A definition from what it says of one position."""
    return lambda x, u, v: [value_at(x, u, v, i) for i in range(len(x))]


def places(k: Row, wanted: int, i: int) -> Row:
    """Where a value stands, up to position i."""
    return [j for j in range(i + 1) if k[j] == wanted]


def commonest(x: Row) -> int:
    """The value with the largest count; among equals, the one that reached it last."""
    count: Counter[int] = Counter()
    reached: dict[int, tuple[int, int]] = {}
    for i, value in enumerate(x):
        count[value] += 1
        reached[value] = (count[value], i)
    return max(reached, key=lambda value: reached[value])


def at(x: Row, j: int, i: int, default: int) -> int:
    return x[j] if 0 <= j <= i else default


def first_or(k: Row, wanted: int, i: int, default: int) -> int:
    return next(iter(places(k, wanted, i)), default)


def behind_first(k: Row, wanted: int, values: Row, i: int, offset: int, default: int) -> int:
    """The value ``offset`` behind the first key whose value is in sight."""
    seen = [j for j in places(k, wanted, i) if j + offset <= i]
    return values[seen[0] + offset] if seen else default


DEFINITIONS: dict[str, tuple[Seq, Callable[[Row, Row, Row], Row]]] = {
    "shift_right": (
        shift_right(tokens, 2, default=-7),
        each(lambda x, u, v, i: x[i - 2] if i >= 2 else -7),
    ),
    "cumsum": (cumsum(tokens), each(lambda x, u, v, i: sum(value != 0 for value in x[: i + 1]))),
    "where": (where(tokens, u, v), each(lambda x, u, v, i: u[i] if x[i] else v[i])),
    "mask": (mask(tokens, u), each(lambda x, u, v, i: x[i] if u[i] else 0)),
    "mask with a value": (mask(tokens, u, -3), each(lambda x, u, v, i: x[i] if u[i] else -3)),
    "maximum": (maximum(tokens), each(lambda x, u, v, i: max(x[: i + 1]))),
    "minimum": (minimum(tokens), each(lambda x, u, v, i: min(x[: i + 1]))),
    "argmax": (
        argmax(tokens),
        each(lambda x, u, v, i: max(range(i + 1), key=lambda j: (x[j], j))),
    ),
    "argmin": (
        argmin(tokens),
        each(lambda x, u, v, i: max(range(i + 1), key=lambda j: (-x[j], j))),
    ),
    "num_prev": (num_prev(tokens, u), each(lambda x, u, v, i: x[: i + 1].count(u[i]))),
    "has_seen": (has_seen(tokens, u), each(lambda x, u, v, i: int(u[i] in x[: i + 1]))),
    "firsts": (firsts(tokens, u), each(lambda x, u, v, i: first_or(x, u[i], i, -1))),
    "firsts with a default": (
        firsts(tokens, u, default=5),
        each(lambda x, u, v, i: first_or(x, u[i], i, 5)),
    ),
    "lasts": (lasts(tokens, u), each(lambda x, u, v, i: max(places(x, u[i], i), default=-1))),
    "lasts with a default": (
        lasts(tokens, u, default=-9),
        each(lambda x, u, v, i: max(places(x, u[i], i), default=-9)),
    ),
    "index_select": (index_select(tokens, u), each(lambda x, u, v, i: at(x, u[i], i, 0))),
    "index_select with a default": (
        index_select(tokens, u, default=8),
        each(lambda x, u, v, i: at(x, u[i], i, 8)),
    ),
    "first_true": (first_true(tokens), each(lambda x, u, v, i: first_or(x, 1, i, -1))),
    "mode": (mode(tokens), each(lambda x, u, v, i: commonest(x[: i + 1]))),
    "binary_mode": (
        binary_mode(tokens),
        each(lambda x, u, v, i: int(x[: i + 1].count(1) > x[: i + 1].count(0))),
    ),
    "induct": (induct(tokens, u, 1), each(lambda x, u, v, i: behind_first(x, u[i], x, i, 1, 0))),
    "induct further back": (
        induct(tokens, tokens, 3, default=-2),
        each(lambda x, u, v, i: behind_first(x, x[i], x, i, 3, -2)),
    ),
    "induct at no distance": (
        induct(tokens, u, 0),
        each(lambda x, u, v, i: behind_first(x, u[i], x, i, 0, 0)),
    ),
    "induct_kqv": (
        induct_kqv(tokens, u, v, 2, default=4, null_val=-5000),
        each(lambda x, u, v, i: behind_first(x, u[i], v, i, 2, 4)),
    ),
    "induct_prev": (
        induct_prev(tokens, u, -1, default=6),
        each(lambda x, u, v, i: at(x, first_or(x, u[i], i, -999) - 1, i, 6)),
    ),
    "induct_prev ahead": (
        induct_prev(tokens, u, 1),
        each(lambda x, u, v, i: at(x, first_or(x, u[i], i, -999) + 1, i, 0)),
    ),
}


@pytest.mark.parametrize("name", DEFINITIONS)
@settings(max_examples=20, deadline=None)
@given(data=batches())
def test_a_library_function_is_what_its_definition_says(name, data):
    expr, definition = DEFINITIONS[name]
    agree(expr, definition, data)


@pytest.mark.parametrize("name", DEFINITIONS)
@settings(max_examples=10, deadline=None)
@given(data=batches(), more=st.integers(1, 3))
def test_no_library_function_looks_ahead(name, data, more):
    expr, _ = DEFINITIONS[name]
    pos = data["tokens"].shape[1]
    longer = {key: torch.cat([x, x.flip(1)[:, :more]], dim=1) for key, x in data.items()}
    variables = [{key: x[key] for key in "uv"} for x in (data, longer)]
    short = evaluate(expr, data["tokens"], variables[0])
    assert torch.equal(evaluate(expr, longer["tokens"], variables[1])[:, :pos], short)


def test_the_running_values_of_one_sequence():
    x = torch.tensor([[2, -1, 5, 5, 3]])
    for expr, expected in [
        (maximum(tokens), [2, 2, 5, 5, 5]),
        (minimum(tokens), [2, -1, -1, -1, -1]),
        (argmax(tokens), [0, 0, 2, 3, 3]),
        (argmin(tokens), [0, 1, 1, 1, 1]),
        (mode(tokens), [2, -1, 5, 5, 5]),
    ]:
        assert evaluate(expr, x).tolist() == [expected]


def test_a_null_value_that_is_a_key_matches_by_accident_as_in_the_reference():
    x = torch.tensor([[9, 7, 9, 8]])
    assert evaluate(induct(tokens, tokens, 1), x).tolist() == [[0, 0, 7, 0]]
    assert evaluate(induct(tokens, tokens, 1, null_val=9), x).tolist() == [[9, 0, 9, 0]]


@pytest.mark.parametrize("offset", [-1, 0.5, True, "1"])
def test_an_offset_that_looks_ahead_or_is_no_integer_is_refused(offset):
    with pytest.raises(InputError, match="offset"):
        induct(tokens, tokens, offset)


def test_aggr_is_aggregate():
    assert aggr is aggregate
