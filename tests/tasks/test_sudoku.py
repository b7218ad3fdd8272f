"""Sudoku: search, singles, and the task."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loopinterp.core.errors import ConfigError, InputError
from loopinterp.tasks import IGNORE, Sudoku
from loopinterp.tasks.sudoku import fill_singles, is_solved, peers, pool, search, units
from tests.tasks.answers import small_grids, small_solutions

PUZZLES = st.tuples(st.integers(0, 287), st.lists(st.booleans(), min_size=16, max_size=16))


def test_there_are_288_grids_and_the_solver_finds_them_all() -> None:
    solutions, guesses = search([0] * 16, 2, most=1000)
    assert len(small_grids()) == len(solutions) == 288
    assert {tuple(grid) for grid in solutions} == set(small_grids())
    assert guesses > 288


@settings(max_examples=40)
@given(PUZZLES, st.integers(1, 4), st.integers(0, 15))
def test_solutions_are_those_of_an_exhaustive_search(puzzle, most, changed) -> None:
    which, given_ = puzzle
    cells = [digit if there else 0 for digit, there in zip(small_grids()[which], given_)]
    cells[changed] = cells[changed] % 4 + 1  # so that some have no solution
    every = small_solutions(cells)
    solutions, guesses = search(cells, 2, most=most)
    assert len(solutions) == min(most, len(every))
    assert {tuple(grid) for grid in solutions} <= set(every)
    assert guesses > 0 or len(every) <= 1


def test_puzzles_of_the_pool_have_one_solution_and_no_needless_given() -> None:
    puzzles = pool(2)
    assert [p.count(0) for p, _ in puzzles] == sorted(
        (p.count(0) for p, _ in puzzles), reverse=True
    )
    for puzzle, solution in puzzles:
        assert small_solutions(puzzle) == [tuple(solution)]
        for cell in range(16):
            if puzzle[cell]:
                without = [0 if k == cell else x for k, x in enumerate(puzzle)]
                assert len(small_solutions(without)) > 1
    assert len({tuple(puzzle) for puzzle, _ in puzzles}) > 100


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


@settings(max_examples=40)
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


TASK = Sudoku()


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("kind", TASK.distributions)
def test_every_puzzle_has_the_one_solution_that_is_asked_and_so_many_blanks(kind: str) -> None:
    n = torch.arange(1, 13).repeat(12)
    batch = TASK.sample(n, generator=rng(), distribution=kind)
    for row, blanks in enumerate(n.tolist()):
        cells = batch.inputs[row].tolist()
        assert cells.count(0) == blanks
        (solution,) = small_solutions(cells)
        expected = [y if x == 0 else IGNORE for x, y in zip(cells, solution)]
        assert batch.targets[row].tolist() == expected
    assert torch.equal(TASK.targets(batch.inputs), batch.targets)
    assert set(batch.n_loops.tolist()) == {12}


def test_easy_puzzles_are_easier_than_hard_ones() -> None:
    def mean_rounds(kind: str) -> float:
        batch = TASK.sample(10, batch_size=200, generator=rng(), distribution=kind)
        rounds = TASK.n_rounds(batch, hidden=False)
        assert (rounds > 0).all()  # naked singles solve what is so small
        assert (TASK.n_guesses(batch) == 0).all()
        assert (TASK.n_rounds(batch) <= rounds).all()
        return float(rounds.double().mean())

    assert mean_rounds("easy") + 0.3 < mean_rounds("uniform") < mean_rounds("hard") - 0.3


def test_where_naked_singles_are_enough_nothing_is_guessed() -> None:
    task = Sudoku(box=3)
    stuck = {}
    for kind in task.distributions:
        batch = task.sample(50, batch_size=12, generator=rng(3), distribution=kind)
        stuck[kind] = task.n_rounds(batch, hidden=False) < 0
        assert torch.equal(task.n_guesses(batch) > 0, stuck[kind])
        assert int(task.n_rounds(batch).max()) <= task.n_loops(50)
    assert stuck["easy"].sum() < stuck["uniform"].sum() < stuck["hard"].sum()


def test_examples_are_of_many_kinds() -> None:
    batch = TASK.sample(8, batch_size=600, generator=rng())
    assert len(set(map(tuple, batch.inputs.tolist()))) > 590
    blank = (batch.inputs == 0).double().mean(0)
    assert (blank - 0.5).abs().max() < 0.12  # 600 draws: five standard errors are 0.1
    digits = torch.bincount(batch.inputs[batch.inputs > 0], minlength=5)[1:] / (8 * 600)
    assert (digits - 0.25).abs().max() < 0.04


def test_nine_by_nine() -> None:
    task = Sudoku(box=3)
    n = torch.tensor([1, 20, 40, 54, 54, 54])
    batch = task.sample(n, generator=rng())
    assert (batch.inputs == 0).sum(1).tolist() == n.tolist()
    for cells, answer in zip(batch.inputs.tolist(), batch.targets.tolist()):
        filled = [x or y for x, y in zip(cells, answer)]
        assert search(cells, 3)[0] == [filled]
        rows = [filled[k : k + 9] for k in range(0, 81, 9)]
        corners = [(i, j) for i in (0, 3, 6) for j in (0, 3, 6)]
        boxes = [[rows[i + k // 3][j + k % 3] for k in range(9)] for i, j in corners]
        assert all(sorted(unit) == list(range(1, 10)) for unit in [*rows, *zip(*rows), *boxes])
    assert torch.equal(task.targets(batch.inputs), batch.targets)
    again = task.encode([line.split(" = ")[0] for line in task.decode(batch)])
    assert torch.equal(again.inputs, batch.inputs)
    with pytest.raises(InputError) as caught:
        task.sample(55, batch_size=1, generator=rng())
    assert (caught.value.what, caught.value.given) == ("n", "55")


def test_puzzles_that_are_none_are_refused() -> None:
    attempts = [
        (lambda: TASK.encode(["1.../..3./.4../...2", "1.../..../..../...2"]), "two in row 1"),
        (lambda: TASK.encode(["11../..../..../...2"]), "none in row 0"),
        (lambda: TASK.encode(["1324/4231/2413/3142"]), "none in row 0"),
        (lambda: TASK.encode(["1...5.../.4../...2"]), "'1...5.../.4../...2'"),
        (lambda: TASK.encode([]), "[]"),
        (lambda: TASK.targets(torch.zeros(1, 9, dtype=torch.int64)), "9"),
        (lambda: TASK.sample(13, batch_size=1, generator=rng()), "13"),
    ]
    for attempt, wrong in attempts:
        with pytest.raises(InputError) as caught:
            attempt()
        assert caught.value.given == wrong


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize("box", [1, 4, "2", 2.5])
def test_a_bad_box_is_refused(box: object) -> None:
    with pytest.raises(ConfigError) as caught:
        Sudoku(box=box)  # type: ignore[arg-type]
    assert caught.value.what == "box"
