"""The solver and the pool against all grids there are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopinterp.errors import InputError
from loopinterp.tasks import Sudoku
from loopinterp.tasks.sudoku_search import peers, pool, search, units
from tests.tasks.answers import small_grids, small_solutions

PUZZLES = st.tuples(st.integers(0, 287), st.lists(st.booleans(), min_size=16, max_size=16))


def test_there_are_288_grids_and_the_solver_finds_them_all() -> None:
    found, guesses = search([0] * 16, 2, most=1000)
    assert len(small_grids()) == len(found) == 288
    assert {tuple(grid) for grid in found} == set(small_grids())
    assert guesses > 288


@given(PUZZLES, st.integers(1, 4), st.integers(0, 15))
def test_solutions_are_those_of_an_exhaustive_search(puzzle, most, changed) -> None:
    which, given_ = puzzle
    cells = [digit if there else 0 for digit, there in zip(small_grids()[which], given_)]
    cells[changed] = cells[changed] % 4 + 1  # so that some have no solution
    every = small_solutions(cells)
    found, guesses = search(cells, 2, most=most)
    assert len(found) == min(most, len(every))
    assert {tuple(grid) for grid in found} <= set(every)
    assert guesses > 0 or len(every) <= 1


def test_puzzles_of_the_pool_have_one_solution_and_no_needless_given() -> None:
    made = pool(2)
    assert [p.count(0) for p, _ in made] == sorted((p.count(0) for p, _ in made), reverse=True)
    for puzzle, solution in made:
        assert small_solutions(puzzle) == [tuple(solution)]
        for cell in range(16):
            if puzzle[cell]:
                without = [0 if k == cell else x for k, x in enumerate(puzzle)]
                assert len(small_solutions(without)) > 1
    assert len({tuple(puzzle) for puzzle, _ in made}) > 100


def test_a_cell_of_nine_by_nine_has_three_units_and_twenty_peers() -> None:
    assert len(units(3)) == 27
    assert {len(others) for others in peers(3)} == {20}
    assert units(3)[18 + 4] == (30, 31, 32, 39, 40, 41, 48, 49, 50)


def test_a_puzzle_that_no_search_decides_is_refused_in_time() -> None:
    # Norvig's: without a solution, which no single shows; his solver takes 20 minutes to say so.
    puzzle = ".....5.8....6.1.43..........1.5........1.6...3.......553.....61........4........."
    assert len(puzzle) == 81
    with pytest.raises(InputError) as refused:
        Sudoku(box=3).encode([puzzle])
    assert refused.value.what == "puzzle"
