"""Selections reduced in parts, in narrow integers, against plain lists of Python integers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loopinterp.core.errors import InputError
from loopinterp.programs import selection
from loopinterp.programs.selection import _MAX_POSITIONS, Selection
from tests.programs.reference import PREDICATES

pytestmark = pytest.mark.usefixtures("quick")

EDGES = [sign * 2**bits + off for bits in (7, 8, 15, 31, 53) for sign in (-1, 1) for off in (-1, 0)]
NEAR = st.integers(-3, 9)
WIDE = NEAR | st.sampled_from(EDGES)
INTEGERS = WIDE | st.sampled_from([-(2**63), -(2**63) + 1, 2**63 - 2, 2**63 - 1])
RELATIONS = [[(1, 1), (-1, 2), (2**31, 0)], [(i, 3 * i - 5) for i in range(70)]]

Rows = list[list[int]]


@st.composite
def rows(draw: st.DrawFn, values: st.SearchStrategy[int], batch: int, pos: int) -> Rows:
    """Values [batch, pos], or [1, pos] for all examples alike."""
    row = st.lists(values, min_size=pos, max_size=pos)
    batch = draw(st.sampled_from([1, batch]))
    return draw(st.lists(row, min_size=batch, max_size=batch))


@st.composite
def selections(draw: st.DrawFn, values: st.SearchStrategy[int]) -> tuple:
    """Keys, queries, values, predicate, and whether it is causal."""
    batch, pos = draw(st.integers(1, 5)), draw(st.integers(1, 8))
    of_one_kind = st.sampled_from([NEAR, WIDE, INTEGERS])
    k, q = (draw(rows(draw(of_one_kind), batch, pos)) for _ in range(2))
    value = draw(rows(values, batch, pos))
    predicate = draw(st.sampled_from([*PREDICATES, *RELATIONS]))
    return k, q, value, predicate, draw(st.booleans())


def selected(k: Rows, q: Rows, predicate, causal: bool) -> list[list[list[bool]]]:
    """Whether each query of each example looks at each key."""
    holds = PREDICATES[predicate] if isinstance(predicate, str) else lambda *pair: pair in predicate
    batch, places = max(len(k), len(q)), range(len(k[0]))
    return [
        [
            [holds(k[b % len(k)][j], q[b % len(q)][i]) and (j <= i or not causal) for j in places]
            for i in places
        ]
        for b in range(batch)
    ]


def reduced(chosen: list[list[list[bool]]], value: Rows, mode: str, default: int) -> Rows:
    """What each query gets of the values."""
    out = []
    for b in range(max(len(chosen), len(value))):
        row = value[b % len(value)]
        seen = [[x for x, on in zip(row, q) if on] for q in chosen[b % len(chosen)]]
        out.append([_reduce(xs, mode) if xs else default for xs in seen])
    return out


def _reduce(xs: list[int], mode: str) -> int:
    if mode == "mean":
        return abs(sum(xs)) // len(xs) * (1 if sum(xs) >= 0 else -1)
    return max(xs) if mode == "max" else min(xs)


def built(case: tuple) -> tuple[Selection, torch.Tensor, list[list[list[bool]]]]:
    k, q, value, predicate, causal = case
    given_as = predicate if isinstance(predicate, str) else tuple(predicate)
    mine = Selection(torch.tensor(k), torch.tensor(q), given_as, causal)
    return mine, torch.tensor(value), selected(k, q, predicate, causal)


@contextmanager
def in_parts(chunk: int, step: int) -> Iterator[None]:
    """Few elements at a time, so that a small batch falls into many parts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection, "_CHUNK_ELEMENTS", chunk)
        patch.setattr(selection, "_STEP_ELEMENTS", step)
        yield


PARTS = st.sampled_from([(2**18, 2**16), (2**18, 1), (2**18, 60), (100, 100), (20, 40), (1, 1)])


@settings(max_examples=60, deadline=None)
@given(selections(NEAR), PARTS)
def test_a_selection_and_how_many_keys_it_has(case, parts):
    with in_parts(*parts):
        mine, _, chosen = built(case)
        assert mine.matrix().tolist() == chosen
        assert mine.width().tolist() == [[sum(row) for row in rows] for rows in chosen]


def test_on_a_cpu_no_more_is_taken_at_a_time_than_was_said():
    k = torch.zeros(4, 6, dtype=torch.int64)
    for chunk, step, n_parts in [(1, 1, 4 * 6), (2 * 6, 1, 2 * 6), (2 * 6, 3 * 2 * 6, 2 * 2)]:
        with in_parts(chunk, step):
            assert len(list(Selection(k, k, "==", False)._steps(4))) == n_parts


@settings(max_examples=60, deadline=None)
@given(selections(WIDE), st.integers(-9, 9), PARTS)
def test_the_mean_of_what_is_selected(case, default, parts):
    with in_parts(*parts):
        mine, value, chosen = built(case)
        expected = reduced(chosen, value.tolist(), "mean", default)
        assert mine.mean(value, default).tolist() == expected


@pytest.mark.parametrize("mode", ["max", "min"])
@settings(max_examples=60, deadline=None)
@given(selections(INTEGERS), st.integers(-9, 9), PARTS)
def test_the_largest_and_the_smallest_of_what_is_selected(mode, case, default, parts):
    with in_parts(*parts):
        mine, value, chosen = built(case)
        expected = reduced(chosen, value.tolist(), mode, default)
        assert mine.extreme(value, mode, default).tolist() == expected


@pytest.mark.parametrize("step", [1, 2**16])
@pytest.mark.parametrize("pos", [127, 128, 129, 260])
@pytest.mark.parametrize("size", [1, 127, 128, 2**15, 2**24 + 1, 2**31, 2**54])
def test_sums_and_counts_outgrow_the_integers_they_are_made_of(size, pos, step):
    """A sum that wrapped around would show: the means of equal numbers are these numbers."""
    places = torch.arange(pos)[None]
    value = torch.tensor([[size], [-size], [0]]).expand(-1, pos)
    with in_parts(2**18, step):
        mine = Selection(places, places, "<=", causal=False)
        assert torch.equal(mine.width(), places + 1)
        assert torch.equal(mine.mean(value, 7), value)
        more = value + (places == 0)  # (size * pos + 1) / pos, truncated
        assert mine.mean(more, 7)[:, -1].tolist() == [size, 1 - size, 0]


@pytest.mark.parametrize("low", [0, -1, -(2**63)])
@pytest.mark.parametrize("apart", [2**bits - off for bits in (7, 15, 31, 63) for off in (2, 1, 0)])
def test_extremes_of_numbers_at_any_distance(low, apart):
    high = min(low + apart, 2**63 - 1)
    value, k, q = (
        torch.tensor([[low, high]]),
        torch.tensor([[1, 2]]),
        torch.tensor([[0, 1], [2, 3]]),
    )
    one, both = (Selection(k, q, predicate, causal=False) for predicate in ("==", "true"))
    for mode, best in (("max", high), ("min", low)):
        assert one.extreme(value, mode, 7).tolist() == [[7, low], [high, 7]]
        assert both.extreme(value, mode, 7).tolist() == [[best, best], [best, best]]


def test_no_examples_give_none():
    nothing = torch.zeros(0, 3, dtype=torch.int64)
    mine = Selection(nothing, nothing, "==", causal=True)
    assert mine.matrix().shape == (0, 3, 3)
    for out in (mine.width(), mine.mean(nothing, 1), mine.extreme(nothing, "max", 1)):
        assert out.shape == (0, 3)
        assert out.dtype == torch.int64


def test_what_is_reduced_lies_in_memory_as_the_tokens_do():
    x = torch.arange(12).reshape(3, 4)
    mine = Selection(x, x, "==", causal=True)
    for out in (mine.width(), mine.mean(x, 0), mine.extreme(x, "min", 0)):
        assert out.is_contiguous()


def test_sequences_beyond_the_longest_are_refused():
    long = torch.zeros(1, _MAX_POSITIONS + 1, dtype=torch.int64)
    with pytest.raises(InputError, match=r"^sequence:"):
        Selection(long, long, "==", causal=True)
