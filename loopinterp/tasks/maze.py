"""The path through a maze, answered at every cell at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from loopinterp.core.settings import settings
from loopinterp.tasks.sampling import Sampler, check_tokens, need_form, uniform
from loopinterp.tasks.task import IGNORE, Batch, or_text, spell, spell_grid

if TYPE_CHECKING:
    from jaxtyping import Bool, Int
    from torch import Tensor

WAYS = ((-1, 0), (0, 1), (1, 0), (0, -1))
"""(rows down, columns right) of up, right, down, left."""

# A token is the sum of the passages of a cell, one for each way, and of start and goal.
_PASSAGES = (1, 2, 4, 8)
START, GOAL, PAD = 16, 32, 64
_OPEN, _WALL = ".SG*", "#"


@settings
class Maze(Sampler):
    """Whether each cell of a maze of n x n cells is on the path from start to goal.

    Tokens: one a cell, row by row, without BOS: the sum of 1, 2, 4 and 8 for passages up, right,
    down and left, 16 at the start and 32 at the goal; 64 is PAD. Output 1 at the cells of the path,
    its ends included, else 0. Smaller mazes lie in the upper left corner. Models need
    ``positions="grid"``, and should not be causal.

    T(n) = n^2, the number of cells: no path and no dead end is longer.

    Distributions: a random walk that returns from dead ends grows the mazes. Start and goal are any
    two cells (``"uniform"``), or the ends of the longest path (``"far"``).

    Source: arXiv 2108.06011 and 2604.15259.

    Example:
        >>> batch = Maze().encode(["#####/#S..#/###.#/#G..#/#####"])
        >>> batch.inputs.tolist(), batch.targets.tolist()
        ([[18, 12, 34, 9]], [[1, 1, 1, 1]])
        >>> Maze().show(batch)
        #####/#S..#/###.#/#G..#/##### = 11/11
    """

    name = "maze"
    goal = "find the path through a maze"
    about = "Which cells are on the path from start to goal in a maze of n x n cells."
    distributions = ("uniform", "far")
    d_vocab = PAD + 1
    d_vocab_out = 2

    def _n_loops(self, n: int) -> int:
        return n**2

    def _n_positions(self, n: int) -> int:
        return n**2

    def unpadded(self, row: Sequence[Any], n: int | None) -> Sequence[Any]:
        width = math.isqrt(len(row))
        return [row[i * width + j] for i in range(n or width) for j in range(n or width)]

    def say(self, row: Sequence[int], answer: Sequence[int] | None) -> str:
        inside = [at for at, token in enumerate(row) if token != PAD]
        size, width = math.isqrt(len(inside)), math.isqrt(len(row))
        picture = [[_WALL] * (2 * size + 1) for _ in range(2 * size + 1)]
        for at in inside:
            i, j, token = 2 * (at // width) + 1, 2 * (at % width) + 1, row[at]
            picture[i][j] = _OPEN[token // START]
            for (down, right), bit in zip(WAYS, _PASSAGES):
                if token & bit:
                    picture[i + down][j + right] = _OPEN[0]
        maze = "/".join(map("".join, picture)) + " ="
        if answer is None:
            return maze
        return f"{maze} {spell_grid(spell([answer[at] for at in inside], '01'), size)}"

    @or_text
    def encode(self, pictures: Sequence[str]) -> Batch:
        """The batch of given pictures, of any sizes: rows of ``#`` (wall), ``.``, ``S`` and ``G``.

        Rows are separated by ``/`` or line ends; cells are at odd rows and columns (counted from
        0), passages between them. ``*`` is start and goal at once.
        """
        mazes = [self._read(picture) for picture in pictures]
        need_form(mazes, self.name, "at least one picture", "none")
        width = max(map(len, mazes))
        tokens = torch.full((len(mazes), width, width), PAD)
        for row, cells in enumerate(mazes):
            tokens[row, : len(cells), : len(cells)] = torch.tensor(cells)
        return self._batch(tokens.flatten(1), self.targets(tokens.flatten(1)))

    def _read(self, picture: str) -> list[list[int]]:
        rows = picture.strip().replace("\n", "/").split("/")
        size = len(rows) // 2
        posts = [row[::2] for row in rows[::2]]
        # Pixels between four cells, and those at the edge, are walls.
        around = [rows[0], rows[-1], *(row[:1] + row[-1:] for row in rows)]
        square = size > 0 and len(rows) % 2 == 1 and {len(row) for row in rows} == {len(rows)}
        known = set("".join(rows)) <= {*_OPEN, _WALL}
        expected = "2 n + 1 rows of as many signs # . S G *, walls around and between corners"
        fits = square and known and set("".join(posts + around)) == {_WALL}
        need_form(fits, self.name, expected, repr(picture))
        cells = [[0] * size for _ in range(size)]
        for i in range(size):
            for j in range(size):
                at = rows[2 * i + 1][2 * j + 1]
                ways = [rows[2 * i + 1 + down][2 * j + 1 + right] for down, right in WAYS]
                fits = at != _WALL and set(ways) <= {_OPEN[0], _WALL}
                expected = "S, G and no wall at cells, and at no passages"
                need_form(fits, self.name, expected, picture)
                opened = sum(bit for way, bit in zip(ways, _PASSAGES) if way != _WALL)
                cells[i][j] = opened + START * _OPEN.index(at)
        return cells

    def targets(self, inputs: Batch | Tensor) -> Int[Tensor, "batch pos"]:
        """1 on the path, 0 off it, ``IGNORE`` at PAD."""
        passages, there, ends = self._parse(inputs)
        path, _ = fill_dead_ends(passages, ends)
        return path.long().masked_fill(~there, IGNORE).flatten(1)

    def n_rounds(self, inputs: Batch | Tensor) -> Int[Tensor, " batch"]:
        """Rounds of filling all dead ends by one cell until only the path is left."""
        passages, _, ends = self._parse(inputs)
        return fill_dead_ends(passages, ends)[1]

    def _parse(self, inputs: Batch | Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Passages [batch, way, row, column], existing cells, start and goal."""
        tokens = check_tokens(inputs, self.d_vocab)
        width = math.isqrt(tokens.shape[1])
        n_cells = tokens.shape[1]
        need_form(0 < width**2 == n_cells, self.name, "square grids of cells", f"{n_cells} of them")
        cells = tokens.view(-1, width, width)
        there = cells != PAD
        size = there[:, 0].sum(1)
        square = (there == _corner(size, width)).flatten(1).all(1) & (size > 0)
        bits = torch.tensor(_PASSAGES, device=tokens.device)[:, None, None]
        passages = (cells[:, None] & bits > 0) & there[:, None]
        start, goal = ((cells & mark > 0) & there for mark in (START, GOAL))
        # [batch]: one of each
        ends = [(mark.flatten(1).sum(1) == 1) for mark in (start, goal)]
        # A tree has one passage less than cells, and is all dead ends but for one cell. What a way
        # out of the grid would lead to on the other side of it has no way back.
        back = torch.stack([_next_to(passages[:, way - 2])[:, way] for way in range(4)], 1)
        edge = torch.zeros_like(passages)
        edge[:, 0, 0] = edge[:, 1, :, -1] = edge[:, 2, -1] = edge[:, 3, :, 0] = True
        mutual = ((passages == back) & ~(passages & edge)).flatten(1).all(1)
        few = passages.flatten(1).sum(1) == 2 * (size**2 - 1)
        left, _ = fill_dead_ends(passages, start)
        fine = square & ends[0] & ends[1] & mutual & few & (left == start).flatten(1).all(1)
        expected = "in each row a maze with one path between any two cells, one start, one goal"
        row = str(*(~fine).nonzero().flatten().tolist()[:1])  # the first of the others
        need_form(fine.all(), self.name, expected, f"something else in row {row}")
        return passages, there, start | goal

    def _batch(self, tokens: Tensor, answer: Tensor) -> Batch:
        n = (tokens != PAD).sum(1).double().sqrt().long()
        return Batch(tokens, answer, n, n**2, self)

    def _draw(self, kind: str, n: Tensor, generator: torch.Generator) -> Batch:
        passages = grow(n, generator)
        there = _corner(n, passages.shape[-1])  # cells of the maze, [batch, row, column]
        luck = uniform(there.shape, generator).masked_fill(~there, -1).flatten(1)
        # The two cells with the most luck; of a maze of one cell that one twice.
        order = luck.argsort(1, descending=True)
        last = (luck >= 0).sum(1).clamp(max=2) - 1
        start, goal = (
            torch.zeros_like(luck, dtype=torch.bool).scatter_(1, at, True).view_as(there)
            for at in (order[:, :1], order.gather(1, last[:, None]))
        )
        if kind == "far":
            goal = farthest(passages, start)
            start = farthest(passages, goal)
        bits = torch.tensor(_PASSAGES, device=n.device)[:, None, None]
        # One token for each cell, [batch, row, column]
        cells = (passages * bits).sum(1) + START * start + GOAL * goal
        tokens = cells.masked_fill(~there, PAD).flatten(1)
        path, _ = fill_dead_ends(passages, start | goal)
        return self._batch(tokens, path.long().masked_fill(~there, IGNORE).flatten(1))


def _corner(n: Int[Tensor, " batch"], width: int) -> Bool[Tensor, "batch row column"]:
    """The ``n x n`` cells of each maze in a grid."""
    line = torch.arange(width, device=n.device) < n[:, None]
    return line[:, :, None] & line[:, None]


def _next_to(marks: Bool[Tensor, "batch row column"]) -> Bool[Tensor, "batch 4 row column"]:
    """Whether the neighbour in each way is marked, borders joined."""
    return torch.stack([marks.roll((-down, -right), (1, 2)) for down, right in WAYS], 1)


def grow(
    n: Int[Tensor, " batch"], generator: torch.Generator
) -> Bool[Tensor, "batch 4 row column"]:
    """Random mazes of ``n x n`` cells, as trees, by a random walk."""
    width, rows, device = int(n.max()), torch.arange(len(n), device=n.device), n.device
    step = torch.tensor([down * width + right for down, right in WAYS], device=device)
    line = torch.arange(width, device=device)
    stays = {by: (line + by >= 0) & (line + by < width) for by in (-1, 0, 1)}
    # [cell, way]: whether the way stays inside
    inside = torch.stack([stays[down][:, None] & stays[right] for down, right in WAYS], 2)
    inside = inside.flatten(0, 1)
    visited = ~_corner(n, width).flatten(1)
    passages = torch.zeros((len(n), width**2, 4), dtype=torch.bool, device=device)
    row, column = (uniform((2, len(n)), generator) * n).long()
    here = row * width + column
    visited[rows, here] = True
    # [batch, step]: the cells that lead to the present one, to which a dead end goes back
    stack, depth = torch.zeros((len(n), width**2), dtype=torch.long, device=device), here * 0
    # Each cell but the first is entered once, and left once for good.
    for _ in range(2 * (width**2 - 1)):
        there = here[:, None] + step
        # [batch, way]: neighbours inside the maze that were not visited
        free = inside[here] & ~visited.gather(1, there.clamp(0, width**2 - 1))
        luck = uniform(free.shape, generator)  # the free way with the most luck is taken
        way = luck.masked_fill(~free, -1).argmax(1)
        goes = free.any(1)
        there = there[rows, way]
        on = rows[goes]
        passages[on, here[on], way[on]] = True  # open from both sides: way + 2 is the opposite one
        passages[on, there[on], (way[on] + 2) % 4] = True
        visited[on, there[on]] = True
        stack[rows, depth] = here
        back = stack[rows, (depth - 1).clamp(min=0)]
        depth = torch.where(goes, depth + 1, depth - 1).clamp(min=0)
        here = torch.where(goes, there, back)
    return passages.view(len(n), width, width, 4).permute(0, 3, 1, 2).contiguous()


def fill_dead_ends(
    passages: Bool[Tensor, "batch 4 row column"], keep: Bool[Tensor, "batch row column"]
) -> tuple[Bool[Tensor, "batch row column"], Int[Tensor, " batch"]]:
    """The cells left when all dead ends are filled, and the number of rounds.

    A dead end has at most one passage to an unfilled cell; cells to ``keep`` stay.
    """
    left = passages.any(1) | keep
    rounds = torch.zeros_like(left[:, 0, 0], dtype=torch.long)
    while True:
        dead = left & ~keep & ((passages & _next_to(left)).sum(1) <= 1)
        if not bool(dead.any()):
            return left, rounds
        left, rounds = left & ~dead, rounds + dead.flatten(1).any(1)


def farthest(
    passages: Bool[Tensor, "batch 4 row column"], start: Bool[Tensor, "batch row column"]
) -> Bool[Tensor, "batch row column"]:
    """A cell with the most steps from the start."""
    seen = last = start
    while bool(last.any()):
        new = (passages & _next_to(last)).any(1) & ~seen
        # A maze that has no further cell keeps those of the step before.
        more = new.flatten(1).any(1)[:, None, None]  # [batch, 1, 1]
        start, seen, last = torch.where(more, new, start), seen | new, new
    flat = start.flatten(1)
    return (flat & (flat.cumsum(1) == 1)).view_as(start)  # the first of them
