"""The tasks, and right answers in plain Python: of full-output prompts, of sudoku and mazes."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from loopinterp.tasks import FullOutput

PUZZLES = str(Path(__file__).with_name("rook_mates.csv"))
"""Three chess puzzles of each hundred from 100 to 1600: a rook mates on the last rank."""

SETTINGS: list[tuple[str, dict[str, object]]] = [
    ("addition", {}),
    ("addition", {"format": "features"}),
    ("parity", {}),
    ("prefix_sum", {}),
    ("prefix_sum", {"modulus": 7}),
    ("regular_language", {}),
    ("regular_language", {"language": "dyck_3"}),
    ("p_hop", {}),
    ("p_hop", {"n_symbols": 6, "most_hops": 3}),
    ("copy", {}),
    ("binary_sum", {}),
    ("unique_set", {}),
    ("unique_set", {"n_symbols": 3}),
    ("token_addition", {}),
    ("multiplication", {}),
    ("multiplication", {"m": 3}),
    ("abacus_addition", {}),
    ("abacus_sum", {}),
    ("abacus_sum", {"n_operands": 12}),
    ("abacus_multiplication", {}),
    ("abacus_sorting", {}),
    ("abacus_sorting", {"n_digits": 1}),
    ("next_token", {}),
    ("next_token", {"of": "multiplication", "of_settings": {"m": 3}, "n_pause": 3}),
    ("sudoku", {}),
    ("maze", {}),
    ("chess_puzzles", {"csv": PUZZLES}),
]
"""Every task of the library, with settings."""
ONE_EACH = dict(reversed(SETTINGS))
"""The first settings of each."""


def copied(prompt: str) -> str:
    return prompt


def counted(prompt: str) -> str:
    return format(prompt.count("1"), "b")[::-1]


def parity(prompt: str) -> str:
    return str(prompt.count("1") % 2)


def added(prompt: str) -> str:
    a, b = prompt.split("+")
    return format(int(a, 2) + int(b, 2), f"0{len(a) + 1}b")


def multiplied(prompt: str) -> str:
    a, b = prompt.split("*")
    return format(int(a[::-1], 2) * int(b[::-1], 2), f"0{len(a) + len(b)}b")[::-1]


def distinct(prompt: str) -> str:
    return "".join(dict.fromkeys(prompt))


ANSWERS: dict[str, Callable[[str], str]] = {
    "copy": copied,
    "binary_sum": counted,
    "parity": parity,
    "token_addition": added,
    "multiplication": multiplied,
    "unique_set": distinct,
}


def balanced(text: str, depth: int) -> bool:
    """Whether brackets are balanced, and nested at most so deep."""
    open_at = list(itertools.accumulate(1 if x == "(" else -1 for x in text))
    return open_at[-1:] in ([], [0]) and all(0 <= x <= depth for x in open_at)


def odd_ones_before_odd_zeros(text: str) -> bool:
    """Whether an odd run of 1s has an odd run of 0s directly after it."""
    runs = [(symbol, len(list(run))) for symbol, run in itertools.groupby(text)]
    return any(a[0] == "1" and a[1] % 2 and b[1] % 2 for a, b in itertools.pairwise(runs))


IN_LANGUAGE: dict[str, Callable[[str], bool]] = {
    "tomita1": lambda text: re.fullmatch("1*", text) is not None,
    "tomita2": lambda text: re.fullmatch("(10)*", text) is not None,
    "tomita3": lambda text: not odd_ones_before_odd_zeros(text),
    "tomita4": lambda text: "000" not in text,
    "tomita5": lambda text: text.count("0") % 2 == text.count("1") % 2 == 0,
    "tomita6": lambda text: (text.count("0") - text.count("1")) % 3 == 0,
    "tomita7": lambda text: re.fullmatch("0*1*0*1*", text) is not None,
    "dyck_2": lambda text: balanced(text, 2),
    "dyck_3": lambda text: balanced(text, 3),
}
"""Membership of each regular language by its definition, without an automaton."""


def hop_back(text: str, hops: int) -> str:
    """Where so many hops of induction lead from each letter, by their definition; "-" is nowhere.

    Letters are numbered from 1, and 0 is nowhere.
    """

    def find(i: int) -> int:
        return max((j for j in range(2, i + 1) if text[j - 2] == text[i - 1]), default=0)

    ends = range(1, len(text) + 1)
    for _ in range(hops):
        ends = [find(i) for i in ends]
    return "".join(text[i - 1] if i else "-" for i in ends)


LETTERS = [chr(ord("A") + i) for i in range(60)]


@cache
def spelled(task: FullOutput) -> list[str]:
    """One character for each prompt symbol, then '=', EOS and BOS."""
    symbols = LETTERS[: len(task.symbols)] if task.name == "unique_set" else list(task.symbols)
    return [*symbols, "=", ".", "^"]


@cache
def small_grids() -> list[tuple[int, ...]]:
    """All 288 sudoku grids of 4 x 4 cells: of all pairs of two bands, those whose columns fit."""
    rows = itertools.permutations((1, 2, 3, 4))
    bands = [
        (*a, *b)
        for a, b in itertools.product(list(rows), repeat=2)
        if len({*a[:2], *b[:2]}) == len({*a[2:], *b[2:]}) == 4
    ]
    return [
        (*upper, *lower)
        for upper, lower in itertools.product(bands, repeat=2)
        if all(len({*upper[k::4], *lower[k::4]}) == 4 for k in range(4))
    ]


def small_solutions(puzzle: Sequence[int]) -> list[tuple[int, ...]]:
    """The solutions of a sudoku of 4 x 4 cells: the grids that have its givens."""
    return [g for g in small_grids() if all(x in (0, y) for x, y in zip(puzzle, g))]


def maze_path(picture: str) -> list[tuple[int, int]]:
    """The cells of the shortest path through a maze, by a search on its picture."""
    rows = picture.split("/")
    pixels = {(i, j): x for i, row in enumerate(rows) for j, x in enumerate(row) if x != "#"}
    start = next(at for at, x in pixels.items() if x in "S*")
    before = {start: start}
    queue = [start]
    for i, j in queue:
        for there in ((i - 1, j), (i, j + 1), (i + 1, j), (i, j - 1)):
            if there in pixels and there not in before:
                before[there] = (i, j)
                queue.append(there)
    at = next(at for at, x in pixels.items() if x in "G*")
    path = [at]
    while at != start:
        at = before[at]
        path.append(at)
    return [(i // 2, j // 2) for i, j in path if i % 2 == j % 2 == 1]
