"""Chess puzzles from a user's file: where the best move starts and ends."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from pydantic import PositiveInt

from loopinterp.core.errors import InputError
from loopinterp.core.settings import settings
from loopinterp.tasks.sampling import Sampler, check_length, check_tokens, uniform
from loopinterp.tasks.task import Batch

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor

SYMBOLS = ".+PNBRQKCpnbrqkc"
"""Tokens of squares, by number: an empty one, one where a pawn may be taken in passing, the own
pieces, of rooks those that may castle (C), and the other side's."""

_ROOKS = {"Q": 56, "K": 63, "q": 0, "k": 7}
_KINGS = {"Q": 60, "K": 60, "q": 4, "k": 4}
_MOVE = re.compile(r"([a-h][1-8])([a-h][1-8])([qrbn]?)")
_COLUMNS = ("FEN", "Moves", "Rating")
_FROM, _TO = 1, 2
_LOOPS = 30
"""T(n) of arXiv 2604.15259: no number of loops is known to be enough."""


@settings
class ChessPuzzles(Sampler):
    """The best move in a chess position, as the square it starts from and the one it ends on.

    The puzzles are those of a file in the format of Lichess' database: a CSV with the columns
    ``FEN``, ``Moves`` (in UCI notation; the first is the opponent's, and is made; the second is the
    answer) and ``Rating``. Nothing is downloaded. Where a position comes twice the first counts.

    Tokens: the 64 squares from top left to bottom right, as the side to move sees them, who plays
    up the board. 0 is an empty square, 1 one where a pawn may be taken in passing, then own
    P N B R Q K and a rook that may castle, and the same for the opponent. Output 1 where the move
    starts, 2 where it ends, 0 elsewhere; the piece that a pawn becomes is not asked for. Models
    should not be causal.

    The length n is the rating in hundreds: training on easy puzzles and testing on hard ones is
    training up to some n, and testing beyond. T(n) = 30 whatever n is: no bound is known.

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
        return _LOOPS

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
        board = f"{'/'.join(rows)} ="
        if answer is None:
            return board
        places = [[at for at, x in enumerate(answer) if x == kind] for kind in (_FROM, _TO)]
        move = "".join(name_of(at[0]) if len(at) == 1 else "?" for at in places)
        return f"{board} {move}"

    def encode(self, puzzles: Iterable[tuple[str, str, int]]) -> Batch:
        """The batch of given puzzles: FEN, moves and rating, as a row of a file has them.

        Raises:
            InputError: no puzzle, or one that is malformed; it is named.
        """
        rows = [_read(*puzzle, f"puzzle {k}") for k, puzzle in enumerate(puzzles)]
        if not rows:
            fix = "Pass e.g. [(fen, 'a7a6 d1d8', 640)]."
            raise InputError("puzzles", expected="at least one", given="none", fix=fix)
        boards, moves, n = (torch.tensor(column) for column in zip(*rows))
        return self._batch(boards, moves, n)

    def targets(self, inputs: Batch | Tensor) -> Int[Tensor, "batch square"]:
        """The answers of the file; of a batch's other positions, those that it came with.

        Raises:
            InputError: the inputs are no boards, or not of the file.
        """
        boards = check_tokens(inputs, self.d_vocab)
        if boards.shape[1] != 64:
            given, fix = str(boards.shape[1]), "Pass boards of this task."
            raise InputError("inputs", expected="64 squares each", given=given, fix=fix)
        rows = self._file().rows if self.csv else {}
        at = [rows.get(bytes(board)) for board in boards.tolist()]
        known = [k for k, row in enumerate(at) if row is not None]
        if isinstance(inputs, Batch):
            answers = inputs.targets.clone()
        elif len(known) == len(at):
            answers = torch.zeros_like(boards)
        else:
            raise InputError(
                "inputs",
                expected="positions of the file, whose answers are known",
                given=f"another one in row {at.index(None)}",
                fix="Pass the batch of encode itself, or set csv to a file that has it.",
            )
        if known:
            moves = self._file().moves[[at[k] for k in known]].to(boards.device)
            answers[known] = _marks(moves)
        return answers

    def right_answers(self, inputs: Batch | Tensor) -> Int[Tensor, "batch square"]:
        return self.targets(inputs)

    def _batch(self, boards: Tensor, moves: Tensor, n: Tensor) -> Batch:
        return Batch(boards, _marks(moves), n, torch.full_like(n, _LOOPS), self)

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
        stat = path.stat()
        return _load(path, self.most, (stat.st_mtime_ns, stat.st_size))

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
        # Puzzles are sorted by n: a random one among those of each example's n.
        which = torch.searchsorted(known.to(n.device), n)
        luck = uniform((len(n),), generator)
        rows = first.to(n.device)[which] + (luck * counts.to(n.device)[which]).long()
        boards, moves = (x[rows.to("cpu")].to(n.device) for x in (puzzles.boards, puzzles.moves))
        return self._batch(boards.long(), moves, n)


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
    puzzles: dict[bytes, tuple[tuple[int, int], int]] = {}  # by board: move, and n
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
            puzzles.setdefault(bytes(board), (move, n))
    if not puzzles:
        fix = "Use a file with puzzles in it."
        raise InputError(f"csv {path.name}", expected="puzzles", given="none", fix=fix)
    ordered = sorted(puzzles.items(), key=lambda one: one[1][1])
    return _Puzzles(
        torch.tensor([list(board) for board, _ in ordered], dtype=torch.int8),
        torch.tensor([move for _, (move, _) in ordered]),
        torch.tensor([n for _, (_, n) in ordered]),
        {board: row for row, (board, _) in enumerate(ordered)},
    )


def _read(
    fen: str | None, moves: str | None, rating: str | int | None, where: str
) -> tuple[list[int], tuple[int, int], int]:
    """Board and move as the solver sees them, and n; errors name the place ``where`` they are."""
    line = (moves or "").split()
    rated = str(rating).strip().isdecimal() and int(str(rating)) > 0
    if len(line) < 2 or not rated:
        raise InputError(
            where,
            expected="at least two moves, and a rating of at least 1",
            given=f"{moves!r} and {rating!r}",
            fix="Mend it, or leave it out.",
        )
    try:
        position = read_fen(fen or "").after(line[0])
        start, end, _ = position.squares(line[1])
    except InputError as error:
        what = f"{where}: {error.what}"
        raise InputError(what, expected=error.expected, given=error.given, fix=error.fix) from None
    move = position.seen_square(start), position.seen_square(end)
    return position.seen(), move, max(int(str(rating)) // 100, 1)


def _marks(moves: Int[Tensor, "puzzle end"]) -> Int[Tensor, "puzzle square"]:
    """1 at the first square, 2 at the second, of 64."""
    answers = moves.new_zeros((len(moves), 64))
    return answers.scatter_(1, moves, moves.new_tensor([_FROM, _TO]).expand_as(moves))


@dataclass(frozen=True)
class Position:
    """A position: the pieces, and all else that a move may depend on.

    Attributes:
        board: The 64 squares from a8 to h8, then a7 to h7, and so on: a letter as in FEN, or a dot.
        white: Whether White is to move.
        castling: The rights that are left, of ``KQkq``.
        passing: The square behind a pawn that has just made two steps.
    """

    board: tuple[str, ...]
    white: bool
    castling: str
    passing: int | None

    def seen(self) -> list[int]:
        """The tokens of the squares, as the side to move sees them: it plays up the board.

        For Black the board is mirrored, top to bottom, and the colours are exchanged. A square is
        marked for taking in passing where a pawn stands ready to do so.
        """
        board = list(self.board)
        for right in self.castling:
            board[_ROOKS[right]] = "C" if right.isupper() else "c"
        if self.passing is not None and self._can_take_at(self.passing):
            board[self.passing] = "+"
        if not self.white:
            rows = (board[8 * row : 8 * row + 8] for row in range(7, -1, -1))
            board = [square.swapcase() for row in rows for square in row]
        return [SYMBOLS.index(square) for square in board]

    def _can_take_at(self, passing: int) -> bool:
        pawn, behind = ("P", 8) if self.white else ("p", -8)
        squares = [passing + behind + side for side in (-1, 1) if 0 <= passing % 8 + side < 8]
        return any(self.board[square] == pawn for square in squares)

    def seen_square(self, square: int) -> int:
        """Where the side to move sees a square."""
        return square if self.white else (7 - square // 8) * 8 + square % 8

    def squares(self, move: str) -> tuple[int, int, str]:
        """From where to where a move in UCI notation goes, and what a pawn becomes.

        Raises:
            InputError: it is no move of a piece of the side to move to where none of its own is.
        """
        parts = _MOVE.fullmatch(move)
        if parts is None:
            raise _refused("move", "one such as e2e4, or e7e8q", move)
        start, end = square_of(parts[1]), square_of(parts[2])
        own_piece, blocked = (
            self.board[square] != "." and self.board[square].isupper() == self.white
            for square in (start, end)
        )
        if not own_piece or blocked:
            side = "White" if self.white else "Black"
            raise _refused("move", f"{side}'s piece to move, not onto another of its own", move)
        last = self.board[start] in "Pp" and end // 8 in (0, 7)
        if last != bool(parts[3]):
            raise _refused("move", "a piece named where a pawn reaches the last rank, only", move)
        return start, end, parts[3]

    def after(self, move: str) -> Position:
        """The position after a move in UCI notation, which is not checked for being legal.

        Raises:
            InputError: as :meth:`squares`.

        Example:
            >>> start = read_fen("rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR w KQkq - 0 1")
            >>> after = start.after("e2e4")
            >>> "".join(after.board[32:40]), after.white, after.passing == square_of("e3")
            ('....P...', False, True)
        """
        start, end, becomes = self.squares(move)
        board, piece = list(self.board), self.board[start]
        board[start], board[end] = ".", piece
        if becomes:
            board[end] = becomes.upper() if self.white else becomes
        pawn, king = piece in "Pp", piece in "Kk"
        if pawn and start % 8 != end % 8 and end == self.passing:
            board[start // 8 * 8 + end % 8] = "."
        if king and abs(end - start) == 2:
            corner = end // 8 * 8 + (7 if end > start else 0)
            board[corner], board[(start + end) // 2] = ".", board[corner]
        touched = {start, end}
        castling = "".join(
            right for right in self.castling if not touched & {_ROOKS[right], _KINGS[right]}
        )
        passing = (start + end) // 2 if pawn and abs(end - start) == 16 else None
        return replace(
            self, board=tuple(board), white=not self.white, castling=castling, passing=passing
        )


def square_of(name: str) -> int:
    """The number of a square: 0 for a8, 63 for h1."""
    return (8 - int(name[1])) * 8 + ord(name[0]) - ord("a")


def name_of(square: int) -> str:
    """The name of a square.

    Example:
        >>> name_of(0), name_of(52)
        ('a8', 'e2')
    """
    return "abcdefgh"[square % 8] + str(8 - square // 8)


def read_fen(fen: str) -> Position:
    """The position of a FEN; its clocks, if there are any, are left out.

    Raises:
        InputError: the FEN is malformed, a side has not one king, a pawn stands on the first or
            last rank, or there is nothing to castle with.
    """
    parts = fen.split()
    if not 4 <= len(parts) <= 6:
        raise _refused("FEN", "a board, w or b, castling rights and a square, or -", fen)
    placed, side, castling, passing = parts[:4]
    board = re.sub("[1-8]", lambda digit: "." * int(digit[0]), placed)
    rows = board.split("/")
    if [len(row) for row in rows] != [8] * 8 or not set(board) <= set("./PNBRQKpnbrqk"):
        raise _refused("FEN", "8 rows of 8 squares", fen)
    squares = tuple("".join(rows))
    if squares.count("K") != 1 or squares.count("k") != 1 or set("Pp") & {*rows[0], *rows[7]}:
        raise _refused("FEN", "one king of each side, and no pawn on the first or last rank", fen)
    if side not in ("w", "b") or not re.fullmatch("-|K?Q?k?q?", castling):
        raise _refused("FEN", "w or b, and - or some of KQkq", fen)
    rights = castling.replace("-", "")
    for right in rights:
        rook, king = ("R", "K") if right.isupper() else ("r", "k")
        if squares[_ROOKS[right]] != rook or squares[_KINGS[right]] != king:
            raise _refused("FEN", f"king and rook at home for the right {right}", fen)
    if not re.fullmatch("-|[a-h]" + ("6" if side == "w" else "3"), passing):
        raise _refused("FEN", "- or a square behind a pawn of the side not to move", fen)
    behind = None if passing == "-" else square_of(passing)
    return Position(squares, side == "w", rights, behind)


def _refused(what: str, expected: str, given: str) -> InputError:
    return InputError(what, expected=expected, given=repr(given), fix="Mend it, or leave it out.")
