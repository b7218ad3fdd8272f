"""An example as a task shows or encodes it: the grid of a sudoku, a FEN, ``25 * 14 = 350``."""

from __future__ import annotations

import re
from functools import singledispatch
from typing import TYPE_CHECKING

import torch

from loopinterp.errors import InputError
from loopinterp.explorer.token_example import full_output, read_words
from loopinterp.tasks import Addition, Batch, FullOutput, Multiplication, TokenAddition
from loopinterp.tasks.abacus_sorting import SYMBOLS as SORTED
from loopinterp.tasks.abacus_sorting import AbacusSorting
from loopinterp.tasks.chess_positions import SYMBOLS as PIECES
from loopinterp.tasks.chess_positions import read_fen, square_of
from loopinterp.tasks.chess_puzzles import ChessPuzzles
from loopinterp.tasks.decimal_operands import DecimalOperands
from loopinterp.tasks.maze import Maze
from loopinterp.tasks.next_token import NextToken
from loopinterp.tasks.prefix_sum import PrefixSum
from loopinterp.tasks.regular_language import RegularLanguage
from loopinterp.tasks.sudoku import Sudoku
from loopinterp.tasks.task import IGNORE

if TYPE_CHECKING:
    from collections.abc import Sequence

_NUMBERS = re.compile(r"\s*(\d{1,300})\s*([+*])\s*(\d{1,300})\s*=?\s*")


@singledispatch
def shown_example(task: object, text: str) -> Batch | None:
    """The batch of an example that ``task.decode`` shows or ``task.encode`` takes, if it is one.

    What stands after the ``=`` is left out: the task knows it, but for the move of a chess puzzle.

    Args:
        task: The task.
        text: What is typed.

    Raises:
        InputError: text in such a form, of no example of the task.

    Example:
        >>> shown_example(Sudoku(), "1.../..3./.4../...2").inputs.tolist()
        [[1, 0, 0, 0, 0, 0, 3, 0, 0, 4, 0, 0, 0, 0, 0, 2]]
        >>> shown_example(Sudoku(), "no grid")
    """
    return None


@shown_example.register
def _(task: Sudoku, text: str) -> Batch | None:
    grid = text.partition("=")[0]
    if not re.fullmatch(r"[.\d/\s]+", grid):
        return None
    cells = [0 if sign == "." else int(sign) for sign in grid if sign in ".0123456789"]
    if len(cells) != task.side**2 or max(cells) > task.side:
        return task.encode([grid])  # which says what it should be
    inputs = torch.tensor([cells])
    unknown = torch.full_like(inputs, IGNORE)
    n = (inputs == 0).sum(1).clamp(min=1)
    try:
        return task.from_cells(inputs)
    except InputError:  # a grid without one solution can be looked at all the same
        return Batch(inputs, unknown, n, torch.full_like(n, task.n_loops(1)), task)


@shown_example.register
def _(task: Maze, text: str) -> Batch | None:
    return task.encode([text.partition("=")[0].strip()]) if "#" in text else None


@shown_example.register
def _(task: ChessPuzzles, text: str) -> Batch | None:
    board, _, move = (part.strip() for part in text.partition("="))
    if re.fullmatch(rf"([{re.escape(PIECES)}]{{8}}/){{7}}[{re.escape(PIECES)}]{{8}}", board):
        squares = [PIECES.index(sign) for sign in board.replace("/", "")]
    elif "/" in board:
        squares = read_fen(board).seen()
    else:
        return None
    targets = torch.full((1, 64), IGNORE)
    if re.fullmatch("([a-h][1-8]){2}", move):
        targets = torch.zeros_like(targets)
        targets[0, [square_of(move[:2]), square_of(move[2:])]] = torch.tensor([1, 2])
    one = torch.ones(1, dtype=torch.int64)
    return Batch(torch.tensor([squares]), targets, one, one * task.n_loops(1), task)


@shown_example.register
def _(task: Addition, text: str) -> Batch | None:
    bits = re.fullmatch(r"\s*([01]+) \+ ([01]+) = [01?]* mod 2\^(\d{1,4})\s*", text)
    if bits is None:
        return None
    return task.encode([(int(bits[1], 2), int(bits[2], 2))], n=int(bits[3]))


@shown_example.register
def _(task: FullOutput, text: str) -> Batch | None:
    """Of prompts that are shown turned around, or as a question."""
    before, _ = task.question.split("{}")
    turned = "prompt" in task.least_first
    form = re.fullmatch(rf"\s*{re.escape(before)}(.+?) =(?: .*)?", text)
    if form is None or re.search("BOS|EOS", text) or not (before or turned):
        return None
    prompt = form[1]
    if turned:
        operands = re.fullmatch(r"(\w+) ([+*]) (\w+)", prompt)
        if operands is None:
            return None
        prompt = f"{operands[1][::-1]}{operands[2]}{operands[3][::-1]}"
    return full_output(task, read_words(prompt, task.symbols))


@shown_example.register
def _(task: PrefixSum, text: str) -> Batch | None:
    form = re.fullmatch(r"\s*running (?:XOR|sum mod \d+) of ([\d ]+) =.*", text)
    if form is None:
        return None
    digits = form[1].split() if task.modulus > 10 else list(form[1].replace(" ", ""))
    return task.from_bits(torch.tensor([[int(d) for d in digits]]), torch.tensor([len(digits)]))


@shown_example.register
def _(task: RegularLanguage, text: str) -> Batch | None:
    """Of what ``decode`` shows, or of the string alone."""
    shown = rf"(?:in {re.escape(task.language)}, prefixes of )?"
    form = re.fullmatch(rf"\s*{shown}([{re.escape(task.automaton.alphabet)}\s]+)(?:=.*)?", text)
    return None if form is None else task.encode(["".join(form[1].split())])


@shown_example.register
def _(task: NextToken, text: str) -> Batch | None:
    wrapped = shown_example(task.task, text)
    return None if wrapped is None else task.from_batch(wrapped)


@shown_example.register
def _(task: DecimalOperands, text: str) -> Batch | None:
    between = re.escape(f" {task.operator} ")
    form = re.fullmatch(rf"\s*(\d+(?:{between}\d+)+) =(?: \d*)?\s*", text)
    if form is None:
        return None
    return task.from_digits(*_least_first(form[1].split(f" {task.operator} ")))


@shown_example.register
def _(task: AbacusSorting, text: str) -> Batch | None:
    number = "[A-Za-z]:[0-9]+"
    form = re.fullmatch(rf"\s*({number}(?:, {number})*) =(?: .*)?", text)
    if form is None:
        return None
    letters, numbers = zip(*(part.split(":") for part in form[1].split(", ")))
    tokens = torch.tensor([[SORTED.index(letter) for letter in letters]])
    return task.from_digits(*_least_first(numbers), tokens)


def _least_first(numbers: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Digits [1, number, width], the least significant first, and how many of each count."""
    n_digits = [len(number) for number in numbers]
    rows = [[int(d) for d in n[::-1]] + [0] * (max(n_digits) - len(n)) for n in numbers]
    return torch.tensor([rows]), torch.tensor([n_digits])


def numbers_example(task: object, text: str) -> Batch | None:
    """The batch of ``13 + 9`` or ``13*9``, in decimal, of a task on binary numbers; None else.

    Example:
        >>> Multiplication().decode(numbers_example(Multiplication(), "13*9"))
        ['1101 * 1001 = 01110101']
    """
    form = _NUMBERS.fullmatch(text)
    if form is None:
        return None
    a, b = int(form[1]), int(form[3])
    n_bits = [max(x.bit_length(), 1) for x in (a, b)]
    if isinstance(task, NextToken):
        wrapped = numbers_example(task.task, text)
        return None if wrapped is None else task.from_batch(wrapped)
    if isinstance(task, Multiplication) and form[2] == "*":
        bits = [[x >> k & 1 for k in range(n)] for x, n in zip((a, b), n_bits)]
        return full_output(task, [*bits[0], task.symbols.index("*"), *bits[1]])
    if isinstance(task, TokenAddition) and form[2] == "+":
        return task.encode([(a, b)], n=max(n_bits))
    if isinstance(task, Addition) and form[2] == "+":  # with room for the last carry
        return task.encode([(a, b)], n=max(n_bits) + 1)
    return None
