"""Sudoku by search: an exact solver in plain Python, and puzzles that have one solution."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache

from loopinterp.errors import InputError

POOL = {2: 128, 3: 48}
"""Puzzles without a needless given that the sampler makes others of, by size of the boxes."""


MOST_GUESSES = 100_000
"""Guesses after which a search is given up: puzzles of one solution take a few thousand at most,
and one without any can take more than anybody waits for."""


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
        tuple(rows[row][column] for row in side for column in side if of(row, column) == which)
        for which in side
        for of in [lambda row, column: row // box * box + column // box]
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
        InputError: More than :data:`MOST_GUESSES` guesses do not decide it.

    Example:
        >>> search([1, 0, 0, 0, 0, 0, 3, 0, 0, 4, 0, 0, 0, 0, 0, 2], 2)
        ([[1, 3, 2, 4, 4, 2, 3, 1, 2, 4, 1, 3, 3, 1, 4, 2]], 0)
    """
    every = (1 << box**2) - 1
    masks = [1 << (digit - 1) if digit else every for digit in puzzle]
    given = [cell for cell, digit in enumerate(puzzle) if digit]
    stack = [masks] if _spread(masks, given, box) else []
    found: list[list[int]] = []
    guesses = 0
    while stack and len(found) < most:
        masks = stack.pop()
        left = [(mask.bit_count(), cell) for cell, mask in enumerate(masks) if mask & (mask - 1)]
        if not left:
            found.append([mask.bit_length() for mask in masks])
            continue
        _, cell = min(left)
        bits = [1 << k for k in range(box**2) if masks[cell] >> k & 1]
        if shuffle is not None:
            shuffle.shuffle(bits)
        guesses += len(bits)
        if guesses > MOST_GUESSES:
            raise InputError(
                "puzzle",
                expected=f"one that is decided within {MOST_GUESSES:,} guesses",
                given="one of which so many do not show how many solutions it has",
                fix="Give more of its digits; it probably has no solution, or very many.",
            )
        for bit in bits:
            guessed = masks.copy()
            guessed[cell] = bit
            if _spread(guessed, [cell], box):
                stack.append(guessed)
    return found, guesses


def _spread(masks: list[int], cells: list[int], box: int) -> bool:
    """Take the digits of filled cells from their peers' candidates, and so on; False: none left."""
    others = peers(box)
    while cells:
        cell = cells.pop()
        digit = masks[cell]
        for other in others[cell]:
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
    made = [_dig(box, source) for _ in range(POOL[box])]
    return sorted(made, key=lambda one: one[0].count(0), reverse=True)


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
    others = peers(box)
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
