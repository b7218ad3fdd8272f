"""Sudoku with one solution, its blanks answered all at once."""

from __future__ import annotations

import random
import reprlib
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Annotated

import torch
import torch.nn.functional as F
from pydantic import Field

from loopinterp.core.errors import InputError
from loopinterp.core.settings import settings
from loopinterp.tasks.sampling import Sampler, check_length, check_tokens, coins, uniform
from loopinterp.tasks.task import IGNORE, Batch

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

_MOST_BLANKS = {2: 12, 3: 54}
"""Blanks that the sampler's puzzles have at most, by size of the boxes."""

_CANDIDATES = 4
"""Puzzles among which ``easy`` and ``hard`` choose one."""


@settings
class Sudoku(Sampler):
    """Fill the n blanks of a sudoku that has one solution: box x box boxes of as many digits.

    Tokens: 0 for a blank, and the digits, row by row; each example is the whole grid, without BOS
    or padding. Output classes are the same, and 0 is never right. Targets are the digits at the
    blanks and ``IGNORE`` at the givens, which stand in the input: to ask for them would only raise
    the share of right cells. Any blank may decide any other: models should not be causal.

    T(n) is the most blanks that are drawn, 12 of 16 cells (``box=2``) or 54 of 81, whatever n is,
    as all examples take as many positions. A puzzle that gives way to singles needs no more rounds,
    as each fills a blank; :meth:`n_rounds` says how many each one needs.

    Distributions: ``"uniform"`` (n blanks of a random one of a pool's puzzles, the rest filled in;
    rows, columns, bands, stacks, digits and the two axes permuted), ``"easy"`` and ``"hard"`` (of
    four such the one in which naked singles leave the fewest or most blanks, where guesses begin,
    and of these take the fewest or most rounds). With ``box=2`` naked singles solve every puzzle,
    so that rounds alone tell them apart. The pool is made by this module, once a process:
    for ``box=3`` that takes a second or two.

    Args:
        box: Rows and columns of a box: 2 (4 x 4 cells) or 3 (9 x 9 cells).

    Raises:
        ConfigError: ``box`` is neither 2 nor 3.

    Source: the sudoku of arXiv 2604.15259.

    Example:
        >>> batch = Sudoku().encode(["1.../..3./.4../...2"])
        >>> batch.inputs.tolist()
        [[1, 0, 0, 0, 0, 0, 3, 0, 0, 4, 0, 0, 0, 0, 0, 2]]
        >>> Sudoku().show(batch)
        1.../..3./.4../...2 = 1324/4231/2413/3142
        >>> [Sudoku().n_rounds(batch, hidden=hidden).tolist() for hidden in (True, False)]
        [[1], [2]]
    """

    name = "sudoku"
    distributions = ("uniform", "easy", "hard")

    box: Annotated[int, Field(ge=2, le=3)] = 2

    @property
    def side(self) -> int:
        """Rows, columns and digits."""
        return self.box**2

    @property
    def d_vocab(self) -> int:
        return self.side + 1

    @property
    def d_vocab_out(self) -> int:
        return self.side + 1

    def n_loops(self, n: int) -> int:
        """The most blanks that are drawn, whatever n is."""
        check_length(n)
        return _MOST_BLANKS[self.box]

    def longest(self, n: int) -> int:
        """The most blanks that are drawn, or n if that is fewer."""
        return min(check_length(n), _MOST_BLANKS[self.box])

    def n_positions(self, n: int) -> int:
        """All cells, whatever n is."""
        check_length(n)
        return self.side**2

    def describe(self) -> str:
        return f"The n blanks of a {self.side} x {self.side} sudoku with one solution."

    def say(self, row: Sequence[int], answer: Sequence[int] | None) -> str:
        puzzle = f"{self._spell(row)} ="
        if answer is None:
            return puzzle
        filled = [cell or (digit if digit > 0 else -1) for cell, digit in zip(row, answer)]
        return f"{puzzle} {self._spell(filled)}"

    def _spell(self, cells: Sequence[int]) -> str:
        words = ["?" if x < 0 else "." if x == 0 else str(x) for x in cells]
        rows = (words[k : k + self.side] for k in range(0, len(words), self.side))
        return "/".join("".join(row) for row in rows)

    def encode(self, puzzles: Sequence[str]) -> Batch:
        """The batch of given puzzles, row by row; a dot or 0 for a blank, what is no sign is space.

        Raises:
            InputError: not as many cells or other digits, or not one solution; the first is named.
        """
        rows = [[0 if x in ".0" else int(x) for x in p if x in ".0123456789"] for p in puzzles]
        fits = [len(row) == self.side**2 and max(row) <= self.side for row in rows]
        if not rows or not all(fits):
            wrong = next((p for p, fit in zip(puzzles, fits) if not fit), [])
            raise InputError(
                "puzzles",
                expected=f"at least one, of {self.side**2} cells each: digits 1..{self.side}, dots",
                given=reprlib.repr(wrong),
                fix="Pass e.g. ['1.../..3./.4../...2'], or set box.",
            )
        return self.from_cells(torch.tensor(rows))

    def from_cells(self, cells: Int[Tensor, "batch cell"]) -> Batch:
        """The batch of given puzzles, 0 for a blank.

        Raises:
            InputError: no such cells, no blank, or not one solution.
        """
        answer = self.targets(cells)
        n = (cells == 0).sum(1)
        if not bool((n > 0).all()):
            raise self._refused("at least one blank", int((n == 0).nonzero()[0]))
        return self._batch(cells, answer)

    def targets(self, inputs: Batch | Tensor) -> Int[Tensor, "batch cell"]:
        """The exact answer to given inputs: the digits at the blanks, ``IGNORE`` elsewhere.

        Raises:
            InputError: the inputs are no puzzles of this size, or have not one solution.
        """
        cells = self._check(inputs)
        return self._solve(cells).masked_fill(cells > 0, IGNORE)

    def n_rounds(self, inputs: Batch | Tensor, *, hidden: bool = True) -> Int[Tensor, " batch"]:
        """Rounds until each is solved, all its singles being filled at once; -1: there are too few.

        What a model that finds all singles of a state in a loop needs: a depth of each example.

        Args:
            inputs: Puzzles.
            hidden: Whether hidden singles (the one cell of a row, column or box for a digit) count,
                beside naked ones (the one digit for a cell).
        """
        cells, rounds = fill_singles(self._check(inputs), self.box, hidden=hidden)
        return rounds.masked_fill((cells == 0).any(1), -1)

    def n_guesses(self, inputs: Batch | Tensor) -> Int[Tensor, " batch"]:
        """Guesses of a backtracking solver with naked singles, until no other solution is left."""
        cells = self._check(inputs)
        guesses = [search(row, self.box)[1] for row in cells.tolist()]
        return torch.tensor(guesses, device=cells.device)

    def _check(self, inputs: Batch | Tensor) -> Tensor:
        cells = check_tokens(inputs, self.d_vocab)
        if cells.shape[1] != self.side**2:
            raise InputError(
                "inputs",
                expected=f"{self.side**2} cells of a {self.side} x {self.side} sudoku each",
                given=f"{cells.shape[1]}",
                fix="Pass whole grids, or set box.",
            )
        return cells

    def _solve(self, cells: Tensor) -> Tensor:
        """All cells of the solutions: singles, which every solution shares, and then search."""
        solved, _ = fill_singles(cells, self.box)
        for row in (~is_solved(solved, self.box)).nonzero().flatten().tolist():
            solutions, _ = search(cells[row].tolist(), self.box)
            if len(solutions) != 1:
                raise self._refused(f"one solution, not {'two' if solutions else 'none'}", row)
            solved[row] = torch.tensor(solutions[0], device=cells.device)
        return solved

    def _refused(self, expected: str, row: int) -> InputError:
        fix = "Draw puzzles with sample, or mend that one."
        return InputError("puzzles", expected=expected, given=f"such at row {row}", fix=fix)

    def _batch(self, cells: Tensor, answer: Tensor) -> Batch:
        n = (cells == 0).sum(1)
        return Batch(cells, answer, n, torch.full_like(n, self.n_loops(1)), self)

    def _draw(self, kind: str, n: Tensor, generator: torch.Generator) -> Batch:
        longest, most = int(n.max()), _MOST_BLANKS[self.box]
        if longest > most:
            raise InputError(
                "n",
                expected=f"at most {most} blanks with box={self.box}",
                given=str(longest),
                fix="Ask for fewer; puzzles of your own may have more (encode).",
            )
        if kind == "uniform":
            return self._batch(*self._puzzles(n, generator))
        cells, answer = self._puzzles(n.repeat_interleave(_CANDIDATES), generator)
        filled, rounds = fill_singles(cells, self.box, hidden=False)
        effort = (filled == 0).sum(1) * self.side**2 + rounds
        each = (effort if kind == "hard" else -effort).view(-1, _CANDIDATES)
        chosen = each.argmax(1) + torch.arange(len(n), device=n.device) * _CANDIDATES
        return self._batch(cells[chosen], answer[chosen])

    def _puzzles(self, n: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Puzzles with so many blanks, and the digits there."""
        puzzles, solutions = torch.tensor(pool(self.box), device=n.device).unbind(1)
        blanks = (puzzles == 0).sum(1)  # the most first
        enough = (blanks >= n[:, None]).sum(1)
        which = (uniform((len(n),), generator) * enough).long()
        # [batch, cell]: the puzzle's blanks in a random order, of which the first n stay blank
        order = uniform((len(n), self.side**2), generator)
        order = order.masked_fill(puzzles[which] > 0, 2).argsort(1).argsort(1)
        blank, cells = order < n[:, None], self._places(len(n), generator)
        digits = self._shuffled(self.side, len(n), generator) + 1
        solution = digits.gather(1, solutions[which].gather(1, cells) - 1)
        blank = blank.gather(1, cells)
        return solution.masked_fill(blank, 0), solution.masked_fill(~blank, IGNORE)

    def _places(self, batch: int, generator: torch.Generator) -> Int[Tensor, "batch cell"]:
        """Where each cell comes from: rows within bands and bands shuffled, and so the columns."""
        lines = []
        for _ in range(2):
            band = self._shuffled(self.box, batch, generator)[:, :, None] * self.box
            inner = self._shuffled(self.box, batch * self.box, generator)
            lines.append((band + inner.view(batch, self.box, self.box)).flatten(1))
        rows, columns = lines
        turn = coins(0.5, (batch, 1, 1), generator)
        places = rows[:, :, None] * self.side + columns[:, None]
        return torch.where(turn, places.transpose(1, 2), places).flatten(1)

    @staticmethod
    def _shuffled(n: int, batch: int, generator: torch.Generator) -> Int[Tensor, "batch n"]:
        return uniform((batch, n), generator).argsort(1)


_POOL = {2: 128, 3: 48}
"""Minimal puzzles that the sampler's puzzles are made of, by size of the boxes."""

_MOST_GUESSES = 100_000
"""Guesses after which a search is given up: puzzles of one solution take a few thousand at most."""


@cache
def units(box: int) -> tuple[tuple[int, ...], ...]:
    """The cells of each row, each column and each box.

    Example:
        >>> units(2)[0], units(2)[4], units(2)[8]
        ((0, 1, 2, 3), (0, 4, 8, 12), (0, 1, 4, 5))
    """
    side = range(box**2)
    rows = [tuple(row * box**2 + column for column in side) for row in side]
    columns = list(zip(*rows))
    boxes = [
        tuple(rows[row + i][column + j] for i in range(box) for j in range(box))
        for row in range(0, box**2, box)
        for column in range(0, box**2, box)
    ]
    return (*rows, *columns, *boxes)


@cache
def peers(box: int) -> tuple[tuple[int, ...], ...]:
    """The other cells of each cell's units, which have other digits."""
    return tuple(
        tuple(sorted({other for unit in units(box) if cell in unit for other in unit} - {cell}))
        for cell in range(box**4)
    )


def search(
    puzzle: Sequence[int], box: int, *, most: int = 2, shuffle: random.Random | None = None
) -> tuple[list[list[int]], int]:
    """Solutions of a puzzle, and the guesses made to find them.

    Cells with one candidate are filled (naked singles) until none is left; then each candidate of
    a cell with the fewest is guessed in turn, and so on. With ``most=2`` the guesses are those that
    show that there is no second solution.

    Args:
        puzzle: Digits from 1 on, 0 for a blank, row by row.
        box: Rows and columns of a box.
        most: Solutions after which it stops.
        shuffle: Guesses candidates in random order.

    Raises:
        InputError: More than 100,000 guesses do not decide it.

    Example:
        >>> search([1, 0, 0, 0, 0, 0, 3, 0, 0, 4, 0, 0, 0, 0, 0, 2], 2)
        ([[1, 3, 2, 4, 4, 2, 3, 1, 2, 4, 1, 3, 3, 1, 4, 2]], 0)
    """
    every = (1 << box**2) - 1
    masks = [1 << (digit - 1) if digit else every for digit in puzzle]
    givens = [cell for cell, digit in enumerate(puzzle) if digit]
    stack = [masks] if _spread(masks, givens, box) else []
    solutions: list[list[int]] = []
    guesses = 0
    while stack and len(solutions) < most:
        masks = stack.pop()
        left = [(mask.bit_count(), cell) for cell, mask in enumerate(masks) if mask & (mask - 1)]
        if not left:
            solutions.append([mask.bit_length() for mask in masks])
            continue
        _, cell = min(left)
        bits = [1 << k for k in range(box**2) if masks[cell] >> k & 1]
        if shuffle is not None:
            shuffle.shuffle(bits)
        guesses += len(bits)
        if guesses > _MOST_GUESSES:
            raise InputError(
                "puzzle",
                expected=f"one that is decided within {_MOST_GUESSES:,} guesses",
                given="one of which so many do not show how many solutions it has",
                fix="Give more of its digits; it probably has no solution, or very many.",
            )
        for bit in bits:
            guessed = masks.copy()
            guessed[cell] = bit
            if _spread(guessed, [cell], box):
                stack.append(guessed)
    return solutions, guesses


def _spread(masks: list[int], cells: list[int], box: int) -> bool:
    """Take the digits of filled cells from their peers' candidates, and so on; False: none left."""
    while cells:
        cell = cells.pop()
        digit = masks[cell]
        for other in peers(box)[cell]:
            if masks[other] & digit:
                masks[other] &= ~digit
                if not masks[other]:
                    return False
                if not masks[other] & (masks[other] - 1):
                    cells.append(other)
    return True


@cache
def pool(box: int) -> list[tuple[list[int], list[int]]]:
    """Puzzles of one solution that have two without any one of their givens; and the solutions.

    Those with the most blanks come first. To fill some blanks of one gives a puzzle of one solution
    again, and every such puzzle is one of these with some blanks filled.
    """
    source = random.Random(0)
    puzzles = [_dig(box, source) for _ in range(_POOL[box])]
    return sorted(puzzles, key=lambda one: one[0].count(0), reverse=True)


def _dig(box: int, source: random.Random) -> tuple[list[int], list[int]]:
    """A random solution, whose cells were emptied in random order where one solution was left."""
    (solution,), _ = search([0] * box**4, box, most=1, shuffle=source)
    puzzle = list(solution)
    for cell in source.sample(range(box**4), box**4):
        digit, puzzle[cell] = puzzle[cell], 0
        if not _is_single(puzzle, cell, digit, box):
            ways = [d for d in range(1, box**2 + 1) if d != digit]
            if any(_leads_on(puzzle, cell, other, box) for other in ways):
                puzzle[cell] = digit
    return puzzle, solution


def _is_single(puzzle: list[int], cell: int, digit: int, box: int) -> bool:
    """Whether a glance shows that a digit is the one for a cell, or the cell the one for it."""
    others = peers(box)  # peers with other digits leave no other candidate
    if len({puzzle[other] for other in others[cell]} - {0}) == box**2 - 1:
        return True
    return any(
        all(puzzle[c] or any(puzzle[o] == digit for o in others[c]) for c in unit if c != cell)
        for unit in units(box)
        if cell in unit
    )


def _leads_on(puzzle: list[int], cell: int, digit: int, box: int) -> bool:
    """Whether there is a solution with that digit in that cell."""
    if any(puzzle[other] == digit for other in peers(box)[cell]):
        return False
    tried = puzzle.copy()
    tried[cell] = digit
    return bool(search(tried, box, most=1)[0])


@cache
def _units(box: int, device: torch.device) -> Float[Tensor, "cell unit"]:
    """1 where a cell is in a unit."""
    within = torch.zeros(box**4, 3 * box**2, dtype=torch.float32)
    for unit, cells in enumerate(units(box)):
        within[list(cells), unit] = 1
    return within.to(device)


def _written(cells: Int[Tensor, "batch cell"], box: int) -> Float[Tensor, "batch digit cell"]:
    """1 where a digit stands."""
    return F.one_hot(cells, box**2 + 1)[..., 1:].transpose(1, 2).float()


def is_solved(cells: Int[Tensor, "batch cell"], box: int) -> Bool[Tensor, " batch"]:
    """Whether every unit has every digit once."""
    return (_written(cells, box) @ _units(box, cells.device) == 1).flatten(1).all(1)


def fill_singles(
    cells: Int[Tensor, "batch cell"], box: int, *, hidden: bool = True
) -> tuple[Int[Tensor, "batch cell"], Int[Tensor, " batch"]]:
    """Fill all singles at once, again and again; how many rounds that took until none was left.

    A naked single is a cell with one candidate, a hidden single the one cell of a unit that has a
    candidate. What is filled holds of every solution there may be.

    Args:
        cells: Digits from 1 on, 0 for a blank.
        box: Rows and columns of a box.
        hidden: Whether hidden singles count too.

    Example:
        >>> cells, rounds = fill_singles(torch.tensor([[1, 2, 3, 0, 3, 4, 0, 0, *[0] * 8]]), 2)
        >>> cells[0, :8].tolist(), rounds.tolist()
        ([1, 2, 3, 4, 3, 4, 0, 0], [1])
    """
    cells, rounds = cells.clone(), torch.zeros_like(cells[:, 0])
    going = torch.arange(len(cells), device=cells.device)
    while len(going):
        digit, new = _singles(cells[going], box, hidden=hidden)
        cells[going] += digit  # 0 where nothing is filled
        going = going[new]
        rounds[going] += 1
    return cells, rounds


def _singles(
    cells: Int[Tensor, "batch cell"], box: int, *, hidden: bool
) -> tuple[Int[Tensor, "batch cell"], Bool[Tensor, " batch"]]:
    """The digits of all singles, 0 elsewhere; and where there are any."""
    within = _units(box, cells.device)
    # [batch, digit, cell]: the digits that the units of a blank lack
    seen = (_written(cells, box) @ within) @ within.T
    candidate = (seen == 0) & (cells == 0)[:, None]
    single = candidate & (candidate.sum(1, keepdim=True) == 1)
    if hidden:
        lone = (candidate.float() @ within == 1).float() @ within.T > 0
        single = single | (candidate & lone)
    digit = torch.arange(1, box**2 + 1, device=cells.device)[:, None]
    digits = (single * digit).amax(1)
    return digits, (digits > 0).any(1)
