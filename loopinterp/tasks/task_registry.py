"""Tasks by name, and their examples given as text."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import singledispatch
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import pad

from loopinterp.core.errors import ConfigError, InputError, check_new_name, need, unknown_name
from loopinterp.tasks.abacus import AbacusAddition, AbacusMultiplication, AbacusSum, DecimalOperands
from loopinterp.tasks.addition import BOS, Addition, Multiplication, TokenAddition
from loopinterp.tasks.chess import SYMBOLS as PIECES
from loopinterp.tasks.chess import ChessPuzzles, read_fen, square_of, squares_of
from loopinterp.tasks.full_output import BinarySum, Copy, FullOutput, Parity, UniqueSet
from loopinterp.tasks.hops import PHop
from loopinterp.tasks.maze import Maze
from loopinterp.tasks.prefixes import PrefixSum, RegularLanguage
from loopinterp.tasks.sorting import SYMBOLS as SORTED
from loopinterp.tasks.sorting import AbacusSorting
from loopinterp.tasks.sudoku import Sudoku
from loopinterp.tasks.task import IGNORE, Batch, Task, until
from loopinterp.tasks.token_by_token import NextToken

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxtyping import Int
    from torch import Tensor


_FACTORIES: dict[str, Callable[..., Task]] = {
    task.name: task
    for task in (
        AbacusAddition,
        AbacusMultiplication,
        AbacusSorting,
        AbacusSum,
        Addition,
        BinarySum,
        ChessPuzzles,
        Copy,
        Maze,
        Multiplication,
        NextToken,
        PHop,
        Parity,
        PrefixSum,
        RegularLanguage,
        Sudoku,
        TokenAddition,
        UniqueSet,
    )
}


def list_tasks() -> list[str]:
    """Names of the registered tasks, sorted."""
    return sorted(_FACTORIES)


def get_task(name: str, **settings: object) -> Task:
    """The task of a name (see :func:`list_tasks`), with some settings.

    Example:
        >>> get_task("addition", format="features").d_features
        2
    """
    if name not in _FACTORIES:
        error = unknown_name("task", name, _FACTORIES)
        fix = f"{error.fix} A task of your own is known once the file that registers it is run."
        raise InputError("task", expected=error.expected, given=error.given, fix=fix)
    factory = _FACTORIES[name]
    known = inspect.signature(factory).parameters
    open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values())
    for setting in settings:
        if setting not in known and not open_ended:
            raise unknown_name(f"setting of task {name}", setting, known, ConfigError)
    return factory(**settings)


def register_task(name: str, factory: Callable[..., Task], *, replace: bool = False) -> None:
    """Register a task for :func:`get_task` and the command line; a taken name needs ``replace``.

    ``factory`` is the task's class, or a function of its settings.
    """
    expected, fix = "a class or function that makes the task", "Pass the class itself."
    need(callable(factory), "factory", expected, type(factory).__name__, fix)
    if not replace:
        check_new_name("task name", name, _FACTORIES)
    _FACTORIES[name] = factory


def typed_example(task: Task, text: str) -> Batch:
    """The batch of one example that a text describes, with the right answer if the task knows it.

    Tokens are written in the task's words, with or without spaces; a prompt of full-output
    prediction needs no BOS, ``=`` or padding. The text may also be what ``decode`` shows (``25 * 14
    = 350``, a grid, a board), or a FEN. ``13 + 9`` and ``13*9`` are decimal numbers where digits
    beyond 1 are no tokens.

    Raises:
        InputError: If the text is no example of the task, or the task reads no tokens.

    Example:
        >>> from loopinterp.tasks import Addition, TokenAddition
        >>> task = Addition()
        >>> task.decode(typed_example(task, "13 + 9")), task.decode(typed_example(task, "1+1 0+1"))
        (['01101 + 01001 = 10110 mod 2^5'], ['01 + 11 = 00 mod 2^2'])
        >>> TokenAddition().decode(typed_example(TokenAddition(), "101+011"))
        ['101 + 011 = 1000']
    """
    words = token_words(task)
    tokens = words is not None or task.d_vocab is not None
    got = f"{task.name}, which reads {task.d_features} numbers a position"
    fix = "Pass its inputs to explore() as a tensor."
    need(tokens, "example", "a task that reads tokens", got, fix)
    shown = _shown_example(task, text)
    if shown is not None:
        return shown
    numbers = _numbers_example(task, text)
    if isinstance(task, Addition) and numbers is not None and text.strip() not in (words or ()):
        return numbers
    try:
        tokens = _read_words(text, words or [str(k) for k in range(task.d_vocab or 0)])
    except InputError:
        if numbers is None:
            raise
        return numbers
    if isinstance(task, FullOutput):
        return _full_output(task, tokens)
    if isinstance(task, Addition) and tokens[0] != BOS:
        tokens = [BOS, *tokens]
    # The least problem length that has so many positions.
    lengths = (n for n in range(1, len(tokens) + 1) if task.n_positions(n) >= len(tokens))
    return _batch_of(task, torch.tensor([tokens]), next(lengths, len(tokens)))


def token_words(task: Any) -> list[str] | None:
    """A word for each token of a task; None if it has no words or reads no tokens.

    Example:
        >>> from loopinterp.tasks import Addition, TokenAddition
        >>> token_words(TokenAddition())
        ['0', '1', '+', '=', 'EOS', 'BOS']
        >>> token_words(Addition())[3]
        '1+1'
    """
    d_vocab, symbols = getattr(task, "d_vocab", None), getattr(task, "symbols", None)
    if d_vocab is None:
        return None
    if isinstance(task, Addition):
        return ["0+0", "1+0", "0+1", "1+1", "BOS", "PAD"]
    if isinstance(task, FullOutput):
        return [*task.symbols, "=", "EOS", "BOS"]
    return list(map(str, symbols)) if symbols is not None and len(symbols) == d_vocab else None


def answer_words(task: Any) -> list[str] | None:
    """A word for each answer class of a task; None if classes have only numbers."""
    if isinstance(task, FullOutput):
        return [*task.symbols[: task.n_answer_symbols], "EOS"]
    if isinstance(task, PHop):
        return [*task.answer_symbols]
    words = token_words(task)
    return words if words is not None and len(words) == task.d_vocab_out else None


def words_at(inputs: Tensor, words: Sequence[str] | None) -> list[str]:
    """The words of one input's tokens, or its features as text.

    Example:
        >>> import torch
        >>> words_at(torch.tensor([0, 2]), ["a", "b"]), words_at(torch.tensor([[0.0, 1.0]]), None)
        (['a', '2'], ['0 1'])
    """
    if inputs.ndim > 1:
        return [" ".join(f"{value:g}" for value in row) for row in inputs.tolist()]
    n = 0 if words is None else len(words)
    return [str(words[t]) if words and 0 <= t < n else str(t) for t in inputs.tolist()]


def _read_words(text: str, words: Sequence[str]) -> list[int]:
    """The tokens of a text: at each place the longest word that fits; spaces are skipped."""
    # Longest words first, so that "10" is not read as "1" and "0".
    known = sorted(range(len(words)), key=lambda k: -len(words[k]))
    tokens, at = [], 0
    while at < len(text):
        if text[at].isspace():
            at += 1
            continue
        token = next((k for k in known if words[k] and text.startswith(words[k], at)), None)
        if token is None:
            shown = ", ".join(words[:12]) + (", …" if len(words) > 12 else "")
            raise InputError(
                "example",
                expected=f"words of the task: {shown}",
                given=f"{text[at : at + 12]!r} at place {at}",
                fix="Write these, with spaces between them.",
            )
        tokens.append(token)
        at += len(words[token])
    if not tokens:
        raise InputError("example", expected="a token", given="none", fix="Write one.")
    return tokens


def _full_output(task: FullOutput, tokens: Sequence[int]) -> Batch:
    """The example of a prompt; tokens from ``=`` on are left out."""
    eos, bos = task.equals + 1, task.equals + 2
    # Padding, EOS and BOS have greater numbers than ``=``.
    prompt = [t for t in until(tokens, task.equals) if t < task.equals]
    n = next(k for k in range(1, len(prompt) + 2) if task.prompt_length(k) >= len(prompt))
    inputs = torch.tensor([[bos, *prompt, task.equals]])
    room = task.n_positions(n) - inputs.shape[1]
    return _batch_of(task, pad(inputs, (0, max(room, 1)), value=eos), n)


def _batch_of(task: Task, inputs: Int[Tensor, "1 pos"], n: int) -> Batch:
    try:
        targets = task.targets(inputs)
    except InputError:  # half an example, of which the task knows no answer
        targets = torch.full(inputs.shape, IGNORE)
    return Batch(inputs, targets, torch.tensor([n]), torch.tensor([task.n_loops(n)]), task)


@singledispatch
def _shown_example(task: object, text: str) -> Batch | None:
    """The example, if the text is what ``task.decode`` shows or ``task.encode`` takes.

    The part after ``=`` is left out, except the move of a chess puzzle.
    """
    return None


@_shown_example.register
def _(task: Sudoku, text: str) -> Batch | None:
    grid = text.partition("=")[0]
    if not re.fullmatch(r"[.\d/\s]+", grid):
        return None
    cells = [0 if sign == "." else int(sign) for sign in grid if sign in ".0123456789"]
    if len(cells) != task.side**2 or max(cells) > task.side:
        return task.encode([grid])  # which says what it should be
    inputs = torch.tensor([cells])
    try:
        return task.from_cells(inputs)
    except InputError:  # a grid without one solution can be looked at all the same
        n = (inputs == 0).sum(1).clamp(min=1)
        unknown, loops = torch.full_like(inputs, IGNORE), torch.full_like(n, task.n_loops(1))
        return Batch(inputs, unknown, n, loops, task)


@_shown_example.register
def _(task: Maze, text: str) -> Batch | None:
    return task.encode([text.partition("=")[0].strip()]) if "#" in text else None


@_shown_example.register
def _(task: ChessPuzzles, text: str) -> Batch | None:
    board, _, move = (part.strip() for part in text.partition("="))
    if re.fullmatch(rf"([{re.escape(PIECES)}]{{8}}/){{7}}[{re.escape(PIECES)}]{{8}}", board):
        squares = [PIECES.index(sign) for sign in board.replace("/", "")]
    elif "/" in board:
        squares = squares_of(read_fen(board))
    else:
        return None
    targets = torch.full((1, 64), IGNORE)
    if re.fullmatch("([a-h][1-8]){2}", move):
        targets = torch.zeros_like(targets)
        # 1 marks the square that is left, 2 the one that is entered.
        targets[0, [square_of(move[:2]), square_of(move[2:])]] = torch.tensor([1, 2])
    one = torch.ones(1, dtype=torch.int64)
    return Batch(torch.tensor([squares]), targets, one, one * task.n_loops(1), task)


@_shown_example.register
def _(task: Addition, text: str) -> Batch | None:
    bits = re.fullmatch(r"\s*([01]+) \+ ([01]+) = [01?]* mod 2\^(\d{1,4})\s*", text)
    if bits is None:
        return None
    return task.encode([(int(bits[1], 2), int(bits[2], 2))], n=int(bits[3]))


@_shown_example.register
def _(task: FullOutput, text: str) -> Batch | None:
    """The prompt, shown reversed or as a question."""
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
    return _full_output(task, _read_words(prompt, task.symbols))


@_shown_example.register
def _(task: PrefixSum, text: str) -> Batch | None:
    form = re.fullmatch(r"\s*running (?:XOR|sum mod \d+) of ([\d ]+) =.*", text)
    if form is None:
        return None
    # Digits above 9 have spaces between them.
    digits = form[1].split() if task.modulus > 10 else list(form[1].replace(" ", ""))
    return task.from_bits(torch.tensor([[int(d) for d in digits]]), torch.tensor([len(digits)]))


@_shown_example.register
def _(task: RegularLanguage, text: str) -> Batch | None:
    """Of what ``decode`` shows, or of the string alone."""
    shown = rf"(?:in {re.escape(task.language)}, prefixes of )?"
    form = re.fullmatch(rf"\s*{shown}([{re.escape(task.automaton.alphabet)}\s]+)(?:=.*)?", text)
    return None if form is None else task.encode(["".join(form[1].split())])


@_shown_example.register
def _(task: PHop, text: str) -> Batch | None:
    form = re.fullmatch(r"\s*(\d+)-hop from each of ([a-z\s]+)(?:=.*)?", text)
    return None if form is None else task.encode(["".join(form[2].split())], hops=int(form[1]))


@_shown_example.register
def _(task: NextToken, text: str) -> Batch | None:
    wrapped = _shown_example(task.task, text)
    return None if wrapped is None else task.from_batch(wrapped)


@_shown_example.register
def _(task: DecimalOperands, text: str) -> Batch | None:
    sign = re.escape(task.operator)
    shown = re.fullmatch(rf"\s*(\d+(?: {sign} \d+)+) =(?: \d*)?\s*", text)
    # Without "=", which every row of tokens has, the text is a question in numbers too.
    form = shown or re.fullmatch(rf"\s*(\d+(?:\s*{sign}\s*\d+)+)\s*", text)
    if form is None:
        return None
    return task.from_digits(*_least_first(re.split(rf"\s*{sign}\s*", form[1])))


@_shown_example.register
def _(task: AbacusSorting, text: str) -> Batch | None:
    number = "[A-Za-z]:[0-9]+"
    form = re.fullmatch(rf"\s*({number}(?:, {number})*) =(?: .*)?", text)
    if form is None:
        return None
    letters, numbers = zip(*(part.split(":") for part in form[1].split(", ")))
    tokens = torch.tensor([[SORTED.index(letter) for letter in letters]])
    return task.from_digits(*_least_first(numbers), tokens)


def _least_first(numbers: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Digits [1, number, width], least significant first, and their numbers."""
    n_digits = [len(number) for number in numbers]
    # Zeros fill the more significant digits up to one width.
    rows = [[int(d) for d in n[::-1]] + [0] * (max(n_digits) - len(n)) for n in numbers]
    return torch.tensor([rows]), torch.tensor([n_digits])


def _numbers_example(task: object, text: str) -> Batch | None:
    """The example ``13 + 9`` or ``13*9`` of a task on binary numbers, else None."""
    form = re.fullmatch(r"\s*(\d{1,300})\s*([+*])\s*(\d{1,300})\s*=?\s*", text)
    if form is None:
        return None
    a, b = int(form[1]), int(form[3])
    # 0 has one bit.
    n_bits = [max(x.bit_length(), 1) for x in (a, b)]
    if isinstance(task, NextToken):
        wrapped = _numbers_example(task.task, text)
        return None if wrapped is None else task.from_batch(wrapped)
    if isinstance(task, Multiplication) and form[2] == "*":
        bits = [[x >> k & 1 for k in range(n)] for x, n in zip((a, b), n_bits)]
        return _full_output(task, [*bits[0], task.symbols.index("*"), *bits[1]])
    if isinstance(task, TokenAddition) and form[2] == "+":
        return task.encode([(a, b)], n=max(n_bits))
    if isinstance(task, Addition) and form[2] == "+":  # with room for the last carry
        return task.encode([(a, b)], n=max(n_bits) + 1)
    return None
