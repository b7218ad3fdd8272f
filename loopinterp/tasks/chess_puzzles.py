"""Chess puzzles from a file of the user's own: where the best move starts and ends."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from pydantic import PositiveInt

from loopinterp.errors import InputError
from loopinterp.settings import settings
from loopinterp.tasks.chess_positions import SYMBOLS, name_of, read_fen
from loopinterp.tasks.sampling import Sampler, check_length, check_tokens
from loopinterp.tasks.task import Batch

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor

LOOPS = 30
"""T(n): no number of loops is known to be enough, and this is that of arXiv 2604.15259."""

_COLUMNS = ("FEN", "Moves", "Rating")
_FROM, _TO = 1, 2


@settings
class ChessPuzzles(Sampler):
    """The best move in a chess position, as the square it starts from and the one it ends on.

    The puzzles are those of a file in the format of Lichess' database: a CSV with the columns
    ``FEN``, ``Moves`` (in UCI notation; the first is the opponent's, and is made; the second is the
    answer) and ``Rating``. Nothing is downloaded. Where a position comes twice the first counts.

    Tokens: the 64 squares from top left to bottom right, as the side to move sees them, who plays
    up the board; so it need not be said who that is. 0 is an empty square, 1 one where a pawn may
    be taken in passing, then own P N B R Q K and a rook that may castle, and the same for the
    opponent. Output 1 where the move starts, 2 where it ends, 0 elsewhere; what a pawn becomes is
    not asked. Models should not be causal.

    The length n is the rating in hundreds, so that to train on easy puzzles and test on hard ones
    is to train to some n, and to test beyond. T(n) = 30 whatever n is: no bound is known.

    Distributions: ``"uniform"`` (any puzzle of that rating).

    Args:
        csv: The file; without one nothing can be drawn, but :meth:`encode` works.
        most: Rows that are read at most, the first ones.

    Raises:
        ConfigError: a setting is of another kind.

    Source: the chess puzzles of arXiv 2108.06011 and 2604.15259.

    Example:
        >>> task = ChessPuzzles()
        >>> batch = task.encode([("6k1/p4ppp/8/8/8/8/5PPP/3R2K1 b - - 0 1", "a7a6 d1d8", 640)])
        >>> task.decode(batch)[0].split("/")[-1]
        '...R..K. = d1d8'
        >>> batch.n.tolist(), batch.targets[0].nonzero().flatten().tolist()
        ([6], [3, 59])
    """

    name = "chess_puzzles"
    distributions = ("uniform",)
    d_vocab = len(SYMBOLS)
    d_vocab_out = 3
    data_files = ("csv",)

    csv: str | None = None
    most: PositiveInt = 100_000

    def n_loops(self, n: int) -> int:
        check_length(n)
        return LOOPS

    def n_positions(self, n: int) -> int:
        """The squares."""
        check_length(n)
        return 64

    def longest(self, n: int) -> int:
        """The greatest rating up to n that the file has puzzles of, or else its least."""
        check_length(n)
        known = self._file().n.unique().tolist() if self.csv else [n]
        return max((rating for rating in known if rating <= n), default=min(known))

    def describe(self) -> str:
        return "The best move in chess puzzles, rated 100 n, of a CSV file of your own (csv=...)."

    def say(self, row: Sequence[int], answer: Sequence[int] | None) -> str:
        rows = ("".join(SYMBOLS[token] for token in row[k : k + 8]) for k in range(0, 64, 8))
        said = f"{'/'.join(rows)} ="
        if answer is None:
            return said
        places = [[at for at, x in enumerate(answer) if x == kind] for kind in (_FROM, _TO)]
        move = "".join(name_of(at[0]) if len(at) == 1 else "?" for at in places)
        return f"{said} {move}"

    def encode(self, puzzles: Iterable[tuple[str, str, int]]) -> Batch:
        """The batch of given puzzles: FEN, moves and rating, as a row of a file has them.

        Raises:
            InputError: no puzzle, or one that is malformed; it is named.
        """
        read = [
            _read(fen, moves, rating, f"puzzle {k}")
            for k, (fen, moves, rating) in enumerate(puzzles)
        ]
        if not read:
            fix = "Pass e.g. [(fen, 'a7a6 d1d8', 640)]."
            raise InputError("puzzles", expected="at least one", given="none", fix=fix)
        boards, moves, n = (torch.tensor(column) for column in zip(*read))
        return self._asked(boards, moves, n)

    def targets(self, inputs: Batch | Tensor) -> Int[Tensor, "batch square"]:
        """The answers of the file; of a batch's other positions, those that it came with.

        Raises:
            InputError: the inputs are no boards, or not of the file.
        """
        boards = check_tokens(inputs, self.d_vocab)
        if boards.shape[1] != 64:
            fix = "Pass boards of this task."
            given = str(boards.shape[1])
            raise InputError("inputs", expected="64 squares each", given=given, fix=fix)
        rows = self._file().rows if self.csv else {}
        at = [rows.get(bytes(board)) for board in boards.tolist()]
        given = inputs.targets if isinstance(inputs, Batch) else None
        if given is None and None in at:
            raise InputError(
                "inputs",
                expected="positions of the file, whose answers are known",
                given=f"another one in row {at.index(None)}",
                fix="Pass the batch of encode itself, or set csv to a file that has it.",
            )
        answers = torch.zeros_like(boards) if given is None else given.clone()
        known = [row for row, found in enumerate(at) if found is not None]
        if known:
            moves = self._file().moves[[at[row] for row in known]].to(boards.device)
            answers[known] = _marks(moves)
        return answers

    def right_answers(self, inputs: Batch | Tensor) -> Int[Tensor, "batch square"]:
        return self.targets(inputs)

    def _asked(self, boards: Tensor, moves: Tensor, n: Tensor) -> Batch:
        return Batch(boards, _marks(moves), n, torch.full_like(n, LOOPS), self)

    def _file(self) -> _Puzzles:
        if self.csv is None:
            raise InputError(
                "csv",
                expected="a file of puzzles to draw from",
                given="none",
                fix="Set csv to a file in the format of https://database.lichess.org/#puzzles, "
                "unpacked: task_settings={'csv': 'puzzles.csv'}.",
            )
        path = Path(self.csv)
        if not path.is_file():
            fix = "Give the path of an unpacked CSV file; nothing is downloaded."
            raise InputError("csv", expected="a file", given=repr(self.csv), fix=fix)
        about = os.stat(path)
        return _load(path, self.most, (about.st_mtime_ns, about.st_size))

    def _draw(self, kind: str, n: Tensor, generator: torch.Generator) -> Batch:
        puzzles = self._file()
        known, counts = puzzles.n.unique(return_counts=True)
        absent = [x for x in n.unique().tolist() if x not in known]
        if absent:
            raise InputError(
                "n",
                expected=f"a rating in hundreds that the file has puzzles of: {known.tolist()}",
                given=str(absent[0]),
                fix="Draw other ones (curriculum.min_n, start_n and max_n), or add puzzles.",
            )
        first = counts.cumsum(0) - counts
        which = torch.searchsorted(known.to(n.device), n)
        luck = torch.rand(len(n), generator=generator, device=n.device, dtype=torch.float32)
        rows = first.to(n.device)[which] + (luck * counts.to(n.device)[which]).long()
        boards, moves = (x[rows.to("cpu")].to(n.device) for x in (puzzles.boards, puzzles.moves))
        return self._asked(boards.long(), moves, n)


@dataclass(frozen=True, eq=False)
class _Puzzles:
    """The puzzles of a file, by rating, on the CPU."""

    boards: Int[Tensor, "puzzle square"]
    moves: Int[Tensor, "puzzle end"]
    n: Int[Tensor, " puzzle"]
    rows: dict[bytes, int]


@lru_cache(maxsize=4)
def _load(path: Path, most: int, stamp: tuple[int, int]) -> _Puzzles:
    """The puzzles of a file, read again where its time or size has changed."""
    found: dict[bytes, tuple[tuple[int, int], int]] = {}
    with path.open(newline="", encoding="utf-8", errors="replace") as lines:
        table = csv.DictReader(lines)
        missing = [name for name in _COLUMNS if name not in (table.fieldnames or ())]
        if missing:
            raise InputError(
                f"csv {path.name}",
                expected=f"the columns {', '.join(_COLUMNS)}",
                given=f"a first line without {', '.join(missing)}",
                fix="Use the format of Lichess' puzzles, unpacked (a .zst file is packed).",
            )
        for k, row in enumerate(table):
            if k == most:
                break
            where = f"csv {path.name}, line {table.line_num}"
            board, move, n = _read(row["FEN"], row["Moves"], row["Rating"], where)
            found.setdefault(bytes(board), (move, n))
    if not found:
        fix = "Use a file with puzzles in it."
        raise InputError(f"csv {path.name}", expected="puzzles", given="none", fix=fix)
    ordered = sorted(found.items(), key=lambda one: one[1][1])
    return _Puzzles(
        torch.tensor([list(board) for board, _ in ordered], dtype=torch.int8),
        torch.tensor([move for _, (move, _) in ordered]),
        torch.tensor([n for _, (_, n) in ordered]),
        {board: row for row, (board, _) in enumerate(ordered)},
    )


def _read(
    fen: str | None, moves: str | None, rating: str | int | None, where: str
) -> tuple[list[int], tuple[int, int], int]:
    """Board and move as the solver sees them, and n; errors say where that stands."""
    line = (moves or "").split()
    whole = str(rating).strip().isdecimal() and int(str(rating)) > 0
    if len(line) < 2 or not whole:
        raise InputError(
            where,
            expected="at least two moves, and a rating of at least 1",
            given=f"{moves!r} and {rating!r}",
            fix="Mend it, or leave it out.",
        )
    try:
        asked = read_fen(fen or "").after(line[0])
        start, end, _ = asked.squares(line[1])
    except InputError as error:
        what = f"{where}: {error.what}"
        raise InputError(what, expected=error.expected, given=error.given, fix=error.fix) from None
    move = asked.seen_square(start), asked.seen_square(end)
    return asked.seen(), move, max(int(str(rating)) // 100, 1)


def _marks(moves: Int[Tensor, "puzzle end"]) -> Int[Tensor, "puzzle square"]:
    """1 at the first square, 2 at the second, of 64."""
    answers = moves.new_zeros((len(moves), 64))
    return answers.scatter_(1, moves, moves.new_tensor([_FROM, _TO]).expand_as(moves))
