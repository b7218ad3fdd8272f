"""Growing mazes and walking through them, against networkx."""

from __future__ import annotations

import networkx as nx
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from loopinterp.tasks.maze_walks import WAYS, farthest, fill_dead_ends, grow, one_of


def graph_of(passages: Tensor) -> nx.Graph:
    """The passages of one maze [4, row, column] between cells that have any, both ways alike."""
    found = nx.DiGraph()
    for way, i, j in passages.nonzero().tolist():
        found.add_edge((i, j), (i + WAYS[way][0], j + WAYS[way][1]))
    assert all(found.has_edge(b, a) for a, b in found.edges)
    return found.to_undirected()


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


def test_the_first_of_some_cells() -> None:
    cells = torch.tensor([[[False, True], [True, True]], [[False, False], [False, False]]])
    assert one_of(cells).int().tolist() == [[[0, 1], [0, 0]], [[0, 0], [0, 0]]]


def test_all_ways_to_join_four_cells_are_grown() -> None:
    """A tree on a ring of four cells leaves out one of its four passages, each as likely."""
    passages = grow(torch.full((2000,), 2), torch.Generator().manual_seed(0))
    right, down = passages[:, 1, :, 0], passages[:, 2, 0]
    joined = torch.cat([right, down], 1)
    assert (joined.sum(1) == 3).all()
    assert (joined.double().mean(0) - 0.75).abs().max() < 0.05  # five standard errors
