"""Rows of different lengths, joined and cut."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from loopinterp.tasks.sampling import (
    carry_over,
    cut,
    join,
    lead,
    n_significant,
    operand_digits,
    pack,
    places,
    product_digits,
    put,
    same,
    split,
)

PARTS = st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=2, max_size=2)


@given(st.lists(PARTS, min_size=1, max_size=4), st.integers(0, 3))
def test_what_was_joined_can_be_cut_out_again(rows, more):
    columns = [
        (
            torch.tensor([row[k] + [7] * (4 - len(row[k])) for row in rows]),
            torch.tensor([len(row[k]) for row in rows]),
        )
        for k in (0, 1)
    ]
    plus = same(99, columns[0][1])
    width = max(len(a) + 1 + len(b) for a, b in rows) + more
    full = join([columns[0], plus, columns[1]], width=width, fill=-1)
    for got, (a, b) in zip(full.tolist(), rows):
        assert got == [*a, 99, *b, *[-1] * (width - len(a) - len(b) - 1)]
    start = columns[0][1] + 1
    for got, (_, b) in zip(cut(full, start, columns[1][1]).tolist(), rows):
        assert got == [*b, *[0] * (max(len(b) for _, b in rows) - len(b))]


def test_rows_are_packed_written_over_and_split() -> None:
    rows = torch.tensor([[1, 2, 3], [4, 5, 6]])
    assert pack(rows, rows % 2 == 0, width=3, fill=0).tolist() == [[2, 0, 0], [4, 6, 0]]
    start, length = torch.tensor([1, 3]), torch.tensor([1, 2])
    written = put(torch.zeros(2, 4, dtype=torch.int64), rows[:, :2], start, length)
    assert written.tolist() == [[0, 1, 0, 0], [0, 0, 0, 4]]
    marks = torch.tensor([[True, False, True], [False, True, False]])
    assert places(marks, 2).tolist() == [[0, 2], [1, 0]]
    parts, lengths = split(torch.tensor([[1, 2, 9, 3, 9]]), torch.tensor([[2, 4]]))
    assert parts.tolist() == [[[1, 2], [3, 0]]] and lengths.tolist() == [[2, 1]]


def test_digits_are_those_of_pythons_integers() -> None:
    a, b = operand_digits([(6, 1), (1, 0)], 3, 2)
    assert (a.tolist(), b.tolist()) == ([[0, 1, 1], [1, 0, 0]], [[1, 0], [0, 0]])
    assert carry_over(torch.tensor([[12, 9, 0]]), 10).tolist() == [[2, 0, 1]]
    product = product_digits(torch.tensor([[5, 2]]), torch.tensor([[4, 1]]), 10)
    assert product.tolist() == [[0, 5, 3, 0]]  # 25 * 14
    assert n_significant(torch.tensor([[3, 0, 1, 0], [0, 0, 0, 0]])).tolist() == [3, 0]
    digits, n_digits = torch.tensor([[4, 0, 9], [0, 9, 9]]), torch.tensor([2, 1])
    assert lead(digits, n_digits, torch.tensor([7, 7])).tolist() == [[4, 7, 9], [0, 9, 9]]
