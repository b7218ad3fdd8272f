"""Sudoku: one solution each, what is asked, how hard it is, and what is refused."""

from __future__ import annotations

import pytest
import torch

from loopinterp.errors import ConfigError, InputError
from loopinterp.tasks import IGNORE, Sudoku
from loopinterp.tasks.sudoku_search import search
from tests.tasks.answers import small_solutions

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
        asked = [y if x == 0 else IGNORE for x, y in zip(cells, solution)]
        assert batch.targets[row].tolist() == asked
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
        batch = task.sample(50, batch_size=24, generator=rng(3), distribution=kind)
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
        whole = [x or y for x, y in zip(cells, answer)]
        assert search(cells, 3)[0] == [whole]
        rows = [whole[k : k + 9] for k in range(0, 81, 9)]
        corners = [(i, j) for i in (0, 3, 6) for j in (0, 3, 6)]
        boxes = [[rows[i + k // 3][j + k % 3] for k in range(9)] for i, j in corners]
        assert all(sorted(unit) == list(range(1, 10)) for unit in [*rows, *zip(*rows), *boxes])
    assert torch.equal(task.targets(batch.inputs), batch.targets)
    again = task.encode([line.split(" = ")[0] for line in task.decode(batch)])
    assert torch.equal(again.inputs, batch.inputs)
    with pytest.raises(InputError, match="at most 54 blanks with box=3, got 55"):
        task.sample(55, batch_size=1, generator=rng())


def test_puzzles_that_are_none_are_refused() -> None:
    task = TASK
    with pytest.raises(InputError, match="one solution, not two, got such at row 1"):
        task.encode(["1.../..3./.4../...2", "1.../..../..../...2"])
    with pytest.raises(InputError, match="one solution, not none, got such at row 0"):
        task.encode(["11../..../..../...2"])
    with pytest.raises(InputError, match="at least one blank"):
        task.encode(["1324/4231/2413/3142"])
    with pytest.raises(InputError, match=r"of 16 cells each: digits 1\.\.4, dots, got '1\.\.\.5"):
        task.encode(["1...5.../.4../...2"])
    with pytest.raises(InputError, match="at least one"):
        task.encode([])
    with pytest.raises(InputError, match="16 cells of a 4 x 4 sudoku each, got 9"):
        task.targets(torch.zeros(1, 9, dtype=torch.int64))
    with pytest.raises(InputError, match="at most 12 blanks"):
        task.sample(13, batch_size=1, generator=rng())


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize("box", [1, 4, "2", 2.5])
def test_a_bad_box_is_refused(box: object) -> None:
    with pytest.raises(ConfigError, match=r"^box: expected an integer in 2\.\.3"):
        Sudoku(box=box)  # type: ignore[arg-type]
