"""Rows of different lengths, joined and cut."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from loopinterp.tasks.rows import cut, join, same

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
    whole = join([columns[0], plus, columns[1]], width=width, fill=-1)
    for got, (a, b) in zip(whole.tolist(), rows):
        assert got == [*a, 99, *b, *[-1] * (width - len(a) - len(b) - 1)]
    start = columns[0][1] + 1
    for got, (_, b) in zip(cut(whole, start, columns[1][1]).tolist(), rows):
        assert got == [*b, *[0] * (max(len(b) for _, b in rows) - len(b))]
