"""Sudoku with one solution, all blanks answered at once."""

from __future__ import annotations

import random
import reprlib
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Annotated

import torch
import torch.nn.functional as F
from pydantic import Field

from loopinterp.core.errors import need
from loopinterp.core.settings import settings
from loopinterp.tasks.sampling import Sampler, check_tokens, coins, need_form, uniform
from loopinterp.tasks.task import IGNORE, Batch, or_text, spell_grid

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

_MOST_BLANKS = {2: 12, 3: 54}  # of the sampler's puzzles, by size of the boxes
_CANDIDATES = 4  # puzzles among which ``easy`` and ``hard`` choose one


@settings
class Sudoku(Sampler):
    """Fill the n blanks of a sudoku with one solution, of box x box boxes of as many digits.

    Tokens: 0 for a blank, and the digits, row by row, without BOS or padding; in and out. Targets
    are the digits at the blanks, ``IGNORE`` at the givens. Models should not be causal. The setting
    ``box`` is 2 (4 x 4 cells) or 3 (9 x 9 cells).

    T(n) is the most blanks that are drawn, 12 of 16 cells or 54 of 81. Singles need no more rounds
    (:meth:`n_rounds`), as each fills a blank.

    Distributions: ``"uniform"`` (n blanks of a random puzzle of a pool, with rows, columns, bands,
    stacks, digits and axes permuted), ``"easy"`` and ``"hard"`` (of four such, the one in which
    naked singles leave the fewest or most blanks, then take the fewest or most rounds). With
    ``box=2`` naked singles solve every puzzle.

    Source: arXiv 2604.15259.

    Example:
        >>> batch = Sudoku().encode(["1.../..3./.4../...2"])
        >>> Sudoku().show(batch)
        1.../..3./.4../...2 = 1324/4231/2413/3142
        >>> [Sudoku().n_rounds(batch, hidden=hidden).tolist() for hidden in (True, False)]
        [[1], [2]]
    """

    name = "sudoku"
    goal = "solve sudokus"
    about = "The n blanks of a {self.side} x {self.side} sudoku with one solution."
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

    def _n_loops(self, n: int) -> int:
        return _MOST_BLANKS[self.box]

    def longest(self, n: int) -> int:
        return min(n, _MOST_BLANKS[self.box])

    def _n_positions(self, n: int) -> int:
        return self.side**2

    def say(self, row: Sequence[int], answer: Sequence[int] | None) -> str:
        puzzle = f"{self._spell(row)} ="
        if answer is None:
            return puzzle
        filled = [cell or (digit if digit > 0 else -1) for cell, digit in zip(row, answer)]
        return f"{puzzle} {self._spell(filled)}"

    def _spell(self, cells: Sequence[int]) -> str:
        words = ["?" if x < 0 else "." if x == 0 else str(x) for x in cells]
        return spell_grid(words, self.side)

    @or_text
    def encode(self, puzzles: Sequence[str]) -> Batch:
        """The batch of puzzles, row by row; a dot or 0 is a blank, other signs do not count."""
        rows = [[0 if x in ".0" else int(x) for x in p if x in ".0123456789"] for p in puzzles]
        fits = [len(row) == self.side**2 and max(row) <= self.side for row in rows]
        wrong = next((p for p, fit in zip(puzzles, fits) if not fit), [])
        expected = f"one or more, of {self.side**2} cells: digits 1..{self.side} and dots"
        fix = "Pass e.g. ['1.../..3./.4../...2'], or set box."
        need(rows and all(fits), "puzzles", expected, reprlib.repr(wrong), fix)
        return self.from_cells(torch.tensor(rows))

    def from_cells(self, cells: Int[Tensor, "batch cell"]) -> Batch:
        """The batch of puzzles, 0 for a blank, each with one solution."""
        answer = self.targets(cells)
        n = (cells == 0).sum(1)
        row = str(*(n == 0).nonzero().flatten().tolist()[:1])
        need_form(n.all(), self.name, "a blank", f"none in row {row}")
        return self._batch(cells, answer)

    def targets(self, inputs: Batch | Tensor) -> Int[Tensor, "batch cell"]:
        """The digits at the blanks, ``IGNORE`` elsewhere."""
        cells = self._cells(inputs)
        # Singles, which every solution shares, and then search.
        solved, _ = fill_singles(cells, self.box)
        for row in (~is_solved(solved, self.box)).nonzero().flatten().tolist():
            solutions, _ = search(cells[row].tolist(), self.box)
            got = f"{'two' if solutions else 'none'} in row {row}"
            need_form(len(solutions) == 1, self.name, "one solution", got)
            solved[row] = torch.tensor(solutions[0], device=cells.device)
        return solved.masked_fill(cells > 0, IGNORE)

    def n_rounds(self, inputs: Batch | Tensor, *, hidden: bool = True) -> Int[Tensor, " batch"]:
        """Rounds of filling all singles that solve each puzzle; -1 if they do not.

        Naked singles are the one digit for a cell, ``hidden`` ones the one cell for a digit.
        """
        cells, rounds = fill_singles(self._cells(inputs), self.box, hidden=hidden)
        return rounds.masked_fill((cells == 0).any(1), -1)

    def n_guesses(self, inputs: Batch | Tensor) -> Int[Tensor, " batch"]:
        """Guesses of a backtracking solver with naked singles, to exclude other solutions."""
        cells = self._cells(inputs)
        guesses = [search(row, self.box)[1] for row in cells.tolist()]
        return torch.tensor(guesses, device=cells.device)

    def _cells(self, inputs: Batch | Tensor) -> Tensor:
        cells = check_tokens(inputs, self.d_vocab)
        got = str(cells.shape[1])
        need_form(got == str(self.side**2), self.name, f"{self.side**2} cells each", got)
        return cells

    def _batch(self, cells: Tensor, answer: Tensor) -> Batch:
        n = (cells == 0).sum(1)
        return Batch(cells, answer, n, torch.full_like(n, _MOST_BLANKS[self.box]), self)

    def _draw(self, kind: str, n: Tensor, generator: torch.Generator) -> Batch:
        longest, most = int(n.max()), _MOST_BLANKS[self.box]
        fix = "Ask for fewer; puzzles of your own may have more (encode)."
        expected = f"at most {most} blanks with box={self.box}"
        need(longest <= most, "n", expected, str(longest), fix)
        if kind == "uniform":
            return self._batch(*self._puzzles(n, generator))
        cells, answer = self._puzzles(n.repeat_interleave(_CANDIDATES), generator)
        filled, rounds = fill_singles(cells, self.box, hidden=False)
        # Blanks that singles leave; among equals the rounds, which are fewer than cells.
        effort = (filled == 0).sum(1) * self.side**2 + rounds
        each = (effort if kind == "hard" else -effort).view(-1, _CANDIDATES)
        chosen = each.argmax(1) + torch.arange(len(n), device=n.device) * _CANDIDATES
        return self._batch(cells[chosen], answer[chosen])

    def _puzzles(self, n: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        puzzles, solutions = torch.tensor(pool(self.box), device=n.device).unbind(1)
        blanks = (puzzles == 0).sum(1)  # the most first
        enough = (blanks >= n[:, None]).sum(1)  # puzzles with as many blanks, [batch]
        which = (uniform((len(n),), generator) * enough).long()
        # [batch, cell]: the puzzle's blanks in a random order, of which the first n stay blank
        order = uniform((len(n), self.side**2), generator)
        order = order.masked_fill(puzzles[which] > 0, 2).argsort(1).argsort(1)
        blank, cells = order < n[:, None], self._places(len(n), generator)
        digits = _shuffled(self.side, len(n), generator) + 1
        # With digits and cells exchanged, [batch, cell]
        solution = digits.gather(1, solutions[which].gather(1, cells) - 1)
        blank = blank.gather(1, cells)
        return solution.masked_fill(blank, 0), solution.masked_fill(~blank, IGNORE)

    def _places(self, batch: int, generator: torch.Generator) -> Int[Tensor, "batch cell"]:
        """The origin of each cell, with rows, bands, columns and stacks shuffled."""
        lines = []
        for _ in range(2):
            band = _shuffled(self.box, batch, generator)[:, :, None] * self.box
            inner = _shuffled(self.box, batch * self.box, generator)
            lines.append((band + inner.view(batch, self.box, self.box)).flatten(1))
        rows, columns = lines
        turn = coins(0.5, (batch, 1, 1), generator)
        # [batch, row, column], and the two axes exchanged in half of the examples
        places = rows[:, :, None] * self.side + columns[:, None]
        return torch.where(turn, places.transpose(1, 2), places).flatten(1)


def _shuffled(n: int, batch: int, generator: torch.Generator) -> Int[Tensor, "batch n"]:
    return uniform((batch, n), generator).argsort(1)


@cache
def units(box: int) -> tuple[tuple[int, ...], ...]:
    """The cells of each row, column and box."""
    side, corners = box**2, range(0, box**2, box)
    rows = [tuple(range(row * side, row * side + side)) for row in range(side)]
    boxes = [
        tuple(rows[row + i][column + j] for i in range(box) for j in range(box))
        for row in corners
        for column in corners
    ]
    return (*rows, *zip(*rows), *boxes)


@cache
def peers(box: int) -> tuple[tuple[int, ...], ...]:
    """The other cells of each cell's units."""
    return tuple(
        tuple(sorted({other for unit in units(box) if cell in unit for other in unit} - {cell}))
        for cell in range(box**4)
    )


def search(
    puzzle: Sequence[int],
    box: int,
    *,
    most: int = 2,
    shuffle: random.Random | None = None,
) -> tuple[list[list[int]], int]:
    """Solutions of a puzzle, and the guesses made to find them.

    Naked singles (cells with one candidate) are filled first; then each candidate of a cell with
    the fewest is guessed.

    Args:
        puzzle: Digits from 1 on, 0 for a blank, row by row.
        most: Solutions after which it stops; 2 also excludes a second one.
        shuffle: Guesses candidates in random order.
    """
    every = (1 << box**2) - 1
    masks = [1 << (digit - 1) if digit else every for digit in puzzle]  # candidates as bits
    givens = [cell for cell, digit in enumerate(puzzle) if digit]
    stack = [masks] if _spread(masks, givens, box) else []
    solutions: list[list[int]] = []
    guesses = 0
    while stack and len(solutions) < most:
        masks = stack.pop()
        # Cells with several candidates: a mask that is a power of 2 has one.
        left = [(mask.bit_count(), cell) for cell, mask in enumerate(masks) if mask & (mask - 1)]
        if not left:
            solutions.append([mask.bit_length() for mask in masks])
            continue
        _, cell = min(left)
        bits = [1 << k for k in range(box**2) if masks[cell] >> k & 1]
        if shuffle is not None:
            shuffle.shuffle(bits)
        guesses += len(bits)
        fix = "Give more of its digits; it probably has no solution, or very many."
        # A few thousand show that there is one solution.
        need(guesses <= 10**5, "puzzle", "one decided within 100,000 guesses", "another one", fix)
        for bit in bits:
            guessed = masks.copy()
            guessed[cell] = bit
            if _spread(guessed, [cell], box):
                stack.append(guessed)
    return solutions, guesses


def _spread(masks: list[int], cells: list[int], box: int) -> bool:
    """Remove the digits of filled cells from their peers' candidates; False: none left."""
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
    """Puzzles with one solution and no spare givens, with it; most blanks first."""
    source, puzzles = random.Random(0), []
    for _ in range({2: 128, 3: 48}[box]):
        (solution,), _ = search([0] * box**4, box, most=1, shuffle=source)
        puzzle = list(solution)
        # Cells are emptied in random order where one solution is left.
        for cell in source.sample(range(box**4), box**4):
            digit, puzzle[cell] = puzzle[cell], 0
            if _is_single(puzzle, cell, digit, box):
                continue
            taken = {digit, *(puzzle[other] for other in peers(box)[cell])}
            free = [other for other in range(1, box**2 + 1) if other not in taken]
            filled = ([*puzzle[:cell], other, *puzzle[cell + 1 :]] for other in free)
            if any(search(cells, box, most=1)[0] for cells in filled):
                puzzle[cell] = digit
        puzzles.append((puzzle, solution))
    return sorted(puzzles, key=lambda one: one[0].count(0), reverse=True)


def _is_single(puzzle: list[int], cell: int, digit: int, box: int) -> bool:
    others = peers(box)  # peers with other digits leave no other candidate
    if len({puzzle[other] for other in others[cell]} - {0}) == box**2 - 1:
        return True
    return any(
        all(puzzle[c] or any(puzzle[o] == digit for o in others[c]) for c in unit if c != cell)
        for unit in units(box)
        if cell in unit
    )


@cache
def _units(box: int, device: torch.device) -> Float[Tensor, "cell unit"]:
    """1 where a cell is in a unit."""
    within = torch.zeros(box**4, 3 * box**2, dtype=torch.float32)
    for unit, cells in enumerate(units(box)):
        within[list(cells), unit] = 1
    return within.to(device)


def _written(cells: Int[Tensor, "batch cell"], box: int) -> Float[Tensor, "batch digit cell"]:
    """1 at each cell's digit."""
    # The class of blanks is dropped
    return F.one_hot(cells, box**2 + 1)[..., 1:].transpose(1, 2).float()


def is_solved(cells: Int[Tensor, "batch cell"], box: int) -> Bool[Tensor, " batch"]:
    """Whether every unit has every digit once."""
    return (_written(cells, box) @ _units(box, cells.device) == 1).flatten(1).all(1)


def fill_singles(
    cells: Int[Tensor, "batch cell"], box: int, *, hidden: bool = True
) -> tuple[Int[Tensor, "batch cell"], Int[Tensor, " batch"]]:
    """Fill all singles (see :meth:`Sudoku.n_rounds`), round by round; count the rounds."""
    cells, rounds = cells.clone(), torch.zeros_like(cells[:, 0])
    within = _units(box, cells.device)
    digit = torch.arange(1, box**2 + 1, device=cells.device)[:, None]
    going = torch.arange(len(cells), device=cells.device)
    while len(going):
        now = cells[going]
        # [batch, digit, cell]: the digits that the units of a blank lack
        seen = (_written(now, box) @ within) @ within.T
        candidate = (seen == 0) & (now == 0)[:, None]
        single = candidate & (candidate.sum(1, keepdim=True) == 1)
        if hidden:
            # [batch, digit, unit] the one cell for a digit, back at its cells
            lone = (candidate.float() @ within == 1).float() @ within.T > 0
            single = single | (candidate & lone)
        filled = (single * digit).amax(1)  # 0 where nothing is filled
        cells[going] += filled
        going = going[(filled > 0).any(1)]
        rounds[going] += 1
    return cells, rounds
