"""Rounds of singles against candidates counted in plain Python."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from loopinterp.tasks.sudoku_search import peers, units
from loopinterp.tasks.sudoku_singles import fill_singles, is_solved
from tests.tasks.answers import small_grids


def one_by_one(cells: list[int], hidden: bool) -> tuple[list[int], int]:
    rounds = 0
    while True:
        may = {
            cell: {1, 2, 3, 4} - {cells[other] for other in peers(2)[cell]}
            for cell in range(16)
            if cells[cell] == 0
        }
        new = {cell: next(iter(digits)) for cell, digits in may.items() if len(digits) == 1}
        for unit in units(2) if hidden else ():
            for digit in (1, 2, 3, 4):
                places = [cell for cell in unit if digit in may.get(cell, ())]
                if len(places) == 1:
                    new[places[0]] = digit
        if not new:
            return cells, rounds
        cells = [new.get(cell, digit) for cell, digit in enumerate(cells)]
        rounds += 1


@given(
    st.lists(
        st.tuples(st.integers(0, 287), st.lists(st.booleans(), min_size=16, max_size=16)),
        min_size=1,
        max_size=5,
    ),
    st.booleans(),
)
def test_rounds_are_those_of_plain_python(puzzles, hidden: bool) -> None:
    rows = [
        [digit if there else 0 for digit, there in zip(small_grids()[which], given_)]
        for which, given_ in puzzles
    ]
    cells, rounds = fill_singles(torch.tensor(rows), 2, hidden=hidden)
    expected = [one_by_one(row, hidden) for row in rows]
    assert cells.tolist() == [row for row, _ in expected]
    assert rounds.tolist() == [n for _, n in expected]


def test_solved_is_every_digit_in_every_unit() -> None:
    grids = torch.tensor(small_grids())
    assert is_solved(grids, 2).all()
    for cell in range(16):
        wrong = grids.clone()
        wrong[:, cell] = wrong[:, cell] % 4 + 1
        assert not is_solved(wrong, 2).any()
