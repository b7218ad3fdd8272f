"""Sudoku with one solution, its blanks answered all at once."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import torch
from pydantic import Field

from loopinterp.errors import InputError
from loopinterp.settings import settings
from loopinterp.tasks.sampling import Sampler, check_length, check_tokens, coins
from loopinterp.tasks.sudoku_search import pool, search
from loopinterp.tasks.sudoku_singles import fill_singles, is_solved
from loopinterp.tasks.task import IGNORE, Batch

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor

MOST_BLANKS = {2: 12, 3: 54}
"""Blanks that the sampler's puzzles have at most, by size of the boxes."""

_CANDIDATES = 4
"""Puzzles of which ``easy`` and ``hard`` take one."""


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
        return MOST_BLANKS[self.box]

    def longest(self, n: int) -> int:
        """The most blanks that are drawn, or n if that is fewer."""
        return min(check_length(n), MOST_BLANKS[self.box])

    def n_positions(self, n: int) -> int:
        """All cells, whatever n is."""
        check_length(n)
        return self.side**2

    def describe(self) -> str:
        return f"The n blanks of a {self.side} x {self.side} sudoku with one solution."

    def say(self, row: Sequence[int], answer: Sequence[int] | None) -> str:
        said = f"{self._spell(row)} ="
        if answer is None:
            return said
        filled = [given or (digit if digit > 0 else -1) for given, digit in zip(row, answer)]
        return f"{said} {self._spell(filled)}"

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
        return self._asked(cells, answer)

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
        """All cells of the solutions. What singles fill is so in every solution; else search."""
        solved, _ = fill_singles(cells, self.box)
        for row in (~is_solved(solved, self.box)).nonzero().flatten().tolist():
            found, _ = search(cells[row].tolist(), self.box)
            if len(found) != 1:
                raise self._refused(f"one solution, not {'two' if found else 'none'}", row)
            solved[row] = torch.tensor(found[0], device=cells.device)
        return solved

    def _refused(self, expected: str, row: int) -> InputError:
        fix = "Draw puzzles with sample, or mend that one."
        return InputError("puzzles", expected=expected, given=f"such at row {row}", fix=fix)

    def _asked(self, cells: Tensor, answer: Tensor) -> Batch:
        n = (cells == 0).sum(1)
        return Batch(cells, answer, n, torch.full_like(n, self.n_loops(1)), self)

    def _draw(self, kind: str, n: Tensor, generator: torch.Generator) -> Batch:
        longest, most = int(n.max()), MOST_BLANKS[self.box]
        if longest > most:
            raise InputError(
                "n",
                expected=f"at most {most} blanks with box={self.box}",
                given=str(longest),
                fix="Ask for fewer; puzzles of your own may have more (encode).",
            )
        if kind == "uniform":
            return self._asked(*self._puzzles(n, generator))
        cells, answer = self._puzzles(n.repeat_interleave(_CANDIDATES), generator)
        filled, rounds = fill_singles(cells, self.box, hidden=False)
        effort = (filled == 0).sum(1) * self.side**2 + rounds
        each = (effort if kind == "hard" else -effort).view(-1, _CANDIDATES)
        chosen = each.argmax(1) + torch.arange(len(n), device=n.device) * _CANDIDATES
        return self._asked(cells[chosen], answer[chosen])

    def _puzzles(self, n: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Puzzles with so many blanks, and what stands there."""
        made = pool(self.box)
        puzzles, solutions = torch.tensor(made, device=n.device).unbind(1)
        blanks = (puzzles == 0).sum(1)  # the most first
        enough = (blanks >= n[:, None]).sum(1)
        which = (
            torch.rand(len(n), generator=generator, device=n.device, dtype=torch.float32) * enough
        ).long()
        order = torch.rand(
            (len(n), self.side**2), generator=generator, device=n.device, dtype=torch.float32
        )
        # Of the blanks of the puzzle those that come first in a random order.
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
        shape = (batch, n)
        return torch.rand(
            shape, generator=generator, device=generator.device, dtype=torch.float32
        ).argsort(1)
