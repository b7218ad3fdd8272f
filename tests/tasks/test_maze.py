"""Mazes: grown, measured, and asked for their path."""

from __future__ import annotations

import networkx as nx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from loopinterp.core.errors import InputError
from loopinterp.tasks import IGNORE, Maze
from loopinterp.tasks.maze import GOAL, PAD, START, WAYS, farthest, fill_dead_ends, grow
from tests.tasks.answers import maze_path


def graph_of(passages: Tensor) -> nx.Graph:
    """The passages of one maze [4, row, column] between cells that have any, both ways alike."""
    graph = nx.DiGraph()
    for way, i, j in passages.nonzero().tolist():
        graph.add_edge((i, j), (i + WAYS[way][0], j + WAYS[way][1]))
    assert all(graph.has_edge(b, a) for a, b in graph.edges)
    return graph.to_undirected()


def _grown(sizes: list[int], seed: int) -> tuple[list[int], Tensor]:
    return sizes, grow(torch.tensor(sizes), torch.Generator().manual_seed(seed))


GROWN = st.builds(
    _grown, st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(0, 2**32 - 1)
)


@settings(max_examples=15)
@given(GROWN)
def test_mazes_are_trees_of_their_size(grown) -> None:
    for n, passages in zip(*grown):
        maze = graph_of(passages)
        assert set(maze) == {(i, j) for i in range(n) for j in range(n) if n > 1}
        assert n == 1 or nx.is_tree(maze)


@settings(max_examples=20)
@given(GROWN, st.data())
def test_the_farthest_cell_is_that_and_what_is_no_dead_end_is_the_path(grown, data) -> None:
    sizes, passages = grown
    starts = [data.draw(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1))) for n in sizes]
    start = torch.zeros_like(passages[:, 0])
    for row, (i, j) in enumerate(starts):
        start[row, i, j] = True
    end = farthest(passages, start)
    left, rounds = fill_dead_ends(passages, start | end)
    for row in range(len(sizes)):
        ((i, j),) = end[row].nonzero().tolist()
        maze = graph_of(passages[row])
        maze.add_node(starts[row])
        steps = nx.single_source_shortest_path_length(maze, starts[row])
        assert steps[i, j] == max(steps.values())
        path = nx.shortest_path(maze, starts[row], (i, j))
        assert sorted(map(tuple, left[row].nonzero().tolist())) == sorted(path)
        # A cell is filled one round after the last of those behind it.
        from_path = nx.multi_source_dijkstra_path_length(maze, set(path))
        assert int(rounds[row]) == max(from_path.values())


def test_all_ways_to_join_four_cells_are_grown() -> None:
    """A tree on a ring of four cells leaves out one of its four passages, each as likely."""
    passages = grow(torch.full((2000,), 2), torch.Generator().manual_seed(0))
    right, down = passages[:, 1, :, 0], passages[:, 2, 0]
    joined = torch.cat([right, down], 1)
    assert (joined.sum(1) == 3).all()
    assert (joined.double().mean(0) - 0.75).abs().max() < 0.05  # five standard errors


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
    ("picture", "what"),
    [
        ("", "inputs"),
        ("####/#SG#/####", "inputs"),
        ("#####/#S..#/###.#/#G..#/####", "inputs"),
        ("#####/#S..#/###.#/#G...#####", "inputs"),
        ("#####/#S..#/#...#/#G..#/#####", "inputs"),
        ("#####/#S..#/###.#/#G.x#/#####", "inputs"),
        ("#####/#S..#/###.#/#G###/#####", "inputs"),
        ("#####/#SG.#/###.#/#...#/#####", "inputs"),
        (RING, "inputs"),
        ("#####/#S..#/#####/#G..#/#####", "inputs"),
        ("#####/#S..#/###.#/#...#/#####", "inputs"),
        ("#####/#S.S#/###.#/#G..#/#####", "inputs"),
        ("###/#.#/###", "inputs"),
    ],
)
def test_what_is_no_maze_is_refused(picture: str, what: str) -> None:
    with pytest.raises(InputError) as caught:
        TASK.encode(["###/#*#/###", picture])
    assert caught.value.what == what


def test_tokens_that_are_no_maze_are_refused() -> None:
    (good,) = TASK.encode(["#####/#S..#/###.#/#G..#/#####"]).inputs
    assert (TASK.targets(good[None]) == 1).all()
    out, one_way, beside, ring = good.clone(), good.clone(), good.clone(), good.clone()
    out[0] += 1  # a way out at the top
    one_way[1] -= 4  # no way down where one leads up
    beside[3] = PAD  # a hole in the corner
    ring[0] += 4
    ring[2] += 1
    stacks = [
        torch.stack([good, wrong]) for wrong in (out, one_way, beside, ring, torch.full((4,), PAD))
    ]
    for wrong in (*stacks, good[None, :3]):
        with pytest.raises(InputError) as caught:
            TASK.targets(wrong)
        assert caught.value.what == "inputs"
    with pytest.raises(InputError):
        TASK.encode([])


def test_a_ring_beside_an_island_is_not_taken_for_a_tree() -> None:
    """Of 9 cells, 8 passages, but a ring of 8 cells and one alone."""
    picture = "#######/#S....#/#.###.#/#.#.#.#/#.###.#/#....G#/#######"
    with pytest.raises(InputError) as caught:
        TASK.encode([picture])
    assert caught.value.what == "inputs"
