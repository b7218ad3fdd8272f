"""Mazes: the path that is asked, batches of several sizes, pictures, and what is refused."""

from __future__ import annotations

import pytest
import torch

from loopinterp.errors import InputError
from loopinterp.tasks import IGNORE, Maze
from loopinterp.tasks.maze import GOAL, PAD, START
from tests.tasks.answers import maze_path

TASK = Maze()
RING = "#####/#S..#/#.#.#/#..G#/#####"


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("kind", TASK.distributions)
def test_in_a_batch_of_several_sizes_each_maze_lies_in_its_corner(kind: str) -> None:
    n = torch.tensor([1, 2, 3, 5, 7] * 4)
    batch = TASK.sample(n, generator=rng(), distribution=kind)
    inputs, targets = (x.view(-1, 7, 7) for x in (batch.inputs, batch.targets))
    for row, (size, line) in enumerate(zip(n.tolist(), TASK.decode(batch))):
        inside = torch.zeros(7, 7, dtype=torch.bool)
        inside[:size, :size] = True
        assert torch.equal(inputs[row] != PAD, inside)
        assert torch.equal(targets[row] != IGNORE, inside)
        path = maze_path(line.split(" = ")[0])
        assert sorted(map(tuple, (targets[row] == 1).nonzero().tolist())) == sorted(path)
        assert len(path) <= TASK.n_loops(size) == batch.n_loops[row]
    assert torch.equal(TASK.targets(batch.inputs), batch.targets)
    assert (TASK.n_rounds(batch) <= batch.n_loops).all()


def test_far_goals_are_as_far_as_can_be() -> None:
    near, far = (
        (TASK.sample(5, batch_size=200, generator=rng(), distribution=kind).targets == 1).sum(1)
        for kind in TASK.distributions
    )
    assert far.double().mean() > 1.8 * near.double().mean()
    # With the ends of the longest path, all other dead ends are short of it.
    batch = TASK.sample(5, batch_size=50, generator=rng(1), distribution="far")
    assert (2 * TASK.n_rounds(batch) < (batch.targets == 1).sum(1)).all()


def test_start_and_goal_are_two_cells_anywhere() -> None:
    batch = TASK.sample(3, batch_size=1800, generator=rng())
    for mark in (START, GOAL):
        where = ((batch.inputs & mark) > 0).double()
        assert (where.sum(1) == 1).all()
        assert (where.mean(0) - 1 / 9).abs().max() < 0.04  # five standard errors
    assert not (batch.inputs >= START + GOAL).any()


def test_pictures_are_read_and_said() -> None:
    pictures = ["#####/#S..#/###.#/#G..#/#####", "###/#*#/###"]
    batch = TASK.encode([pictures[0].replace("/", "\n") + "\n", pictures[1]])
    assert batch.n.tolist() == [2, 1]
    assert TASK.decode(batch) == [f"{pictures[0]} = 11/11", f"{pictures[1]} = 1"]
    wrong = batch.targets.clone()
    wrong[0, 0] = 7
    assert TASK.decode(batch, wrong)[0].endswith("= ?1/11")


@pytest.mark.parametrize(
    ("picture", "message"),
    [
        ("", "2 n \\+ 1 rows"),
        ("####/#SG#/####", "2 n \\+ 1 rows"),
        ("#####/#S..#/###.#/#G..#/####", "2 n \\+ 1 rows"),
        ("#####/#S..#/###.#/#G...#####", "2 n \\+ 1 rows"),
        ("#####/#S..#/#...#/#G..#/#####", "2 n \\+ 1 rows"),
        ("#####/#S..#/###.#/#G.x#/#####", "2 n \\+ 1 rows"),
        ("#####/#S..#/###.#/#G###/#####", "no wall at cells"),
        ("#####/#SG.#/###.#/#...#/#####", "no wall at cells"),
        (RING, "one path between any two cells"),
        ("#####/#S..#/#####/#G..#/#####", "one path between any two cells"),
        ("#####/#S..#/###.#/#...#/#####", "one start, one goal"),
        ("#####/#S.S#/###.#/#G..#/#####", "one start, one goal"),
        ("###/#.#/###", "one start, one goal"),
    ],
)
def test_what_is_no_maze_is_refused(picture: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        TASK.encode(["###/#*#/###", picture])


def test_tokens_that_are_no_maze_are_refused() -> None:
    (good,) = TASK.encode(["#####/#S..#/###.#/#G..#/#####"]).inputs
    assert (TASK.targets(good[None]) == 1).all()
    out, one_way, beside, ring = good.clone(), good.clone(), good.clone(), good.clone()
    out[0] += 1  # a way out at the top
    one_way[1] -= 4  # no way down where one leads up
    beside[3] = PAD  # a hole in the corner
    ring[0] += 4
    ring[2] += 1
    for wrong in (out, one_way, beside, ring, torch.full((4,), PAD)):
        with pytest.raises(InputError, match="something else in row 1"):
            TASK.targets(torch.stack([good, wrong]))
    with pytest.raises(InputError, match="square grids of cells, got 3 of them"):
        TASK.targets(good[None, :3])
    with pytest.raises(InputError, match="at least one picture"):
        TASK.encode([])


def test_a_ring_beside_an_island_is_not_taken_for_a_tree() -> None:
    """Of 9 cells, 8 passages, but a ring of 8 cells and one alone."""
    picture = "#######/#S....#/#.###.#/#.#.#.#/#.###.#/#....G#/#######"
    with pytest.raises(InputError, match="one path between any two cells"):
        TASK.encode([picture])
