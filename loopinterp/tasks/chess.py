"""Chess puzzles from a user's file."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from pydantic import PositiveInt

from loopinterp.core.errors import InputError, need
from loopinterp.core.settings import settings
from loopinterp.tasks.sampling import Sampler, check_tokens, uniform
from loopinterp.tasks.task import Batch, or_text, spell_grid

if TYPE_CHECKING:
    from chess import Board
    from jaxtyping import Int
    from torch import Tensor

SYMBOLS = ".+PNBRQKCpnbrqkc"
"""Squares by token: empty, en passant target, own pieces (C: a rook that may castle), opponent's.
"""

_TOKENS = {symbol: token for token, symbol in enumerate(SYMBOLS)}
_FROM, _TO = 1, 2
_FIX = "Correct it, or leave it out."
_LOOPS = 30  # of arXiv 2604.15259: no number of loops is known to be enough


@settings
class ChessPuzzles(Sampler):
    """The best move in a chess position, as the square it starts from and the one it ends on.

    The puzzles are in a CSV file in the format of Lichess' database, with the columns ``FEN``,
    ``Moves`` (in UCI notation: the opponent's, which is made, then the answer) and ``Rating``.

    Tokens: the 64 squares, row by row, with the side to move playing upwards: an empty one (0), an
    en passant target (1), own P N B R Q K and a rook that may castle, and the opponent's. Output 1
    where the move starts, 2 where it ends, else 0. Models should not be causal.

    The length n is the rating in hundreds; the one distribution is ``"uniform"``. T(n) = 30 for
    every n: no bound is known.

    Positions are read with the package ``chess``: ``pip install 'loopinterp[chess]'``.

    Args:
        csv: The file; without one, only :meth:`encode` works.
        most: Rows that are read at most.

    Source: arXiv 2108.06011 and 2604.15259.

    Example:
        >>> task = ChessPuzzles()
        >>> batch = task.encode([("6k1/p4ppp/8/8/8/8/5PPP/3R2K1 b - - 0 1", "a7a6 d1d8", 640)])
        >>> task.decode(batch)[0].split("/")[-1]
        '...R..K. = d1d8'
        >>> batch.n.tolist(), batch.targets[0].nonzero().flatten().tolist()
        ([6], [3, 59])
    """

    name = "chess_puzzles"
    goal = "find the best move in a chess position"
    about = "The best move in chess puzzles, rated 100 n, of a CSV file of your own (csv=...)."
    distributions = ("uniform",)
    d_vocab = len(SYMBOLS)
    d_vocab_out = 3
    data_files = ("csv",)

    csv: str | None = None
    most: PositiveInt = 100_000

    def _n_loops(self, n: int) -> int:
        return _LOOPS

    def _n_positions(self, n: int) -> int:
        return 64

    def longest(self, n: int) -> int:
        """The greatest rating up to n in the file, else its lowest."""
        known = self._file().n.unique().tolist() if self.csv else [n]
        return max((rating for rating in known if rating <= n), default=min(known))

    def say(self, row: Sequence[int], answer: Sequence[int] | None) -> str:
        board = f"{spell_grid([SYMBOLS[token] for token in row], 8)} ="
        if answer is None:
            return board
        # The squares that are marked as the start, and as the end: one each in a move.
        places = [[at for at, x in enumerate(answer) if x == kind] for kind in (_FROM, _TO)]
        move = "".join(name_of(at[0]) if len(at) == 1 else "?" for at in places)
        return f"{board} {move}"

    @or_text
    def encode(self, puzzles: Iterable[tuple[str, str, int]]) -> Batch:
        """The batch of puzzles: FEN, moves and rating, as in a row of a file."""
        rows = [_read(*puzzle, f"puzzle {k}") for k, puzzle in enumerate(puzzles)]
        need(rows, "puzzles", "at least one", "[]", _FIX)
        boards, moves, n = (torch.tensor(column) for column in zip(*rows))
        return self._batch(boards, moves, n)

    def targets(self, inputs: Batch | Tensor) -> Int[Tensor, "batch square"]:
        """The file's answers; for other positions, the batch's own."""
        boards = check_tokens(inputs, self.d_vocab)
        need(boards.shape[1] == 64, "inputs", "64 squares each", str(boards.shape[1]), _FIX)
        rows = self._file().rows if self.csv else {}
        at = [rows.get(bytes(board)) for board in boards.tolist()]  # rows of the file, or None
        known = [k for k, row in enumerate(at) if row is not None]
        answers = torch.zeros_like(boards)
        if isinstance(inputs, Batch):
            answers = inputs.targets.clone()
        else:
            fix = "Pass the batch of encode itself, or set csv to a file that has it."
            row = next((k for k, row in enumerate(at) if row is None), None)
            need(row is None, "inputs", "positions of the file", f"another one in row {row}", fix)
        if known:
            moves = self._file().moves[[at[k] for k in known]].to(boards.device)
            answers[known] = _marks(moves)
        return answers

    def right_answers(self, inputs: Batch | Tensor) -> Int[Tensor, "batch square"]:
        return self.targets(inputs)  # which knows the answers of a batch

    def _batch(self, boards: Tensor, moves: Tensor, n: Tensor) -> Batch:
        return Batch(boards, _marks(moves), n, torch.full_like(n, _LOOPS), self)

    def _file(self) -> _Puzzles:
        path = Path(self.csv or "")
        fix = "Set csv to an unpacked file of https://database.lichess.org/#puzzles."
        need(path.is_file(), "csv", "a file of puzzles to draw from", repr(self.csv), fix)
        stat = path.stat()
        return _load(path, self.most, (stat.st_mtime_ns, stat.st_size))

    def _draw(self, kind: str, n: Tensor, generator: torch.Generator) -> Batch:
        puzzles = self._file()
        known, counts = puzzles.n.unique(return_counts=True)
        absent = [x for x in n.unique().tolist() if x not in known]
        expected = f"a rating in hundreds that the file has puzzles of: {known.tolist()}"
        fix = "Draw other ones (curriculum.min_n, start_n and max_n), or add puzzles."
        need(not absent, "n", expected, str(*absent[:1]), fix)
        # Puzzles are sorted by n, so that those of one n begin at ``first``.
        first = counts.cumsum(0) - counts
        which = torch.searchsorted(known.to(n.device), n)
        luck = uniform((len(n),), generator)
        rows = first.to(n.device)[which] + (luck * counts.to(n.device)[which]).long()
        boards, moves = (x[rows.to("cpu")].to(n.device) for x in (puzzles.boards, puzzles.moves))
        return self._batch(boards.long(), moves, n)


@dataclass(frozen=True, eq=False)
class _Puzzles:
    """A file's puzzles by rating, on the CPU."""

    boards: Int[Tensor, "puzzle square"]
    moves: Int[Tensor, "puzzle end"]
    n: Int[Tensor, " puzzle"]
    rows: dict[bytes, int]


@lru_cache(maxsize=4)
def _load(path: Path, most: int, stamp: tuple[int, int]) -> _Puzzles:
    puzzles: dict[bytes, tuple[tuple[int, int], int]] = {}  # by board: move, and n
    with path.open(newline="", encoding="utf-8", errors="replace") as lines:
        table = csv.DictReader(lines)
        missing = {"FEN", "Moves", "Rating"} - {*(table.fieldnames or ())}
        got = f"a first line without {', '.join(sorted(missing))}"
        fix = "Use the format of Lichess' puzzles, unpacked (a .zst file is packed)."
        need(not missing, f"csv {path.name}", "the columns FEN, Moves and Rating", got, fix)
        for k, row in enumerate(table):
            if k == most:
                break
            where = f"csv {path.name}, line {table.line_num}"
            board, move, n = _read(row["FEN"], row["Moves"], row["Rating"], where)
            puzzles.setdefault(bytes(board), (move, n))
    need(puzzles, f"csv {path.name}", "puzzles", "[]", _FIX)
    ordered = sorted(puzzles.items(), key=lambda one: one[1][1])  # by n
    return _Puzzles(
        torch.tensor([list(board) for board, _ in ordered], dtype=torch.int8),
        torch.tensor([move for _, (move, _) in ordered]),
        torch.tensor([n for _, (_, n) in ordered]),
        {board: row for row, (board, _) in enumerate(ordered)},
    )


def _read(
    fen: str | None, moves: str | None, rating: str | int | None, where: str
) -> tuple[list[int], tuple[int, int], int]:
    """Board and move as the side to move sees them, and n."""
    line, rated = (moves or "").split(), str(rating).strip()
    fine = len(line) >= 2 and rated.isdecimal() and int(rated) > 0
    if not fine:
        expected = "at least two moves, and a rating of at least 1"
        raise InputError(where, expected=expected, given=repr((moves, rating)), fix=_FIX)
    board = read_fen(fen or "", f"{where}: FEN")
    _read_move(board, line[0], where)
    board.push_uci(line[0])
    return squares_of(board), _read_move(board, line[1], where), max(int(rated) // 100, 1)


def _marks(moves: Int[Tensor, "puzzle end"]) -> Int[Tensor, "puzzle square"]:
    """1 at the first square, 2 at the second."""
    answers = moves.new_zeros((len(moves), 64))
    return answers.scatter_(1, moves, moves.new_tensor([_FROM, _TO]).expand_as(moves))


def read_fen(fen: str, what: str = "FEN") -> Board:
    """The position of a FEN, with or without clocks.

    Raises:
        InputError: If it is malformed or no legal position, or ``chess`` is not installed.
    """
    try:
        from chess import Board
    except ImportError as missing:
        raise InputError(
            "chess puzzles",
            expected="the package chess, which reads positions",
            given="an environment without it",
            fix="pip install 'loopinterp[chess]'",
        ) from missing
    fields = fen.split()
    try:
        board = Board(" ".join(fields)) if len(fields) >= 4 else None
    except ValueError:
        board = None
    if board is None or not board.is_valid():
        expected = "a legal position: board, w or b, castling rights, en passant"
        raise InputError(what, expected=expected, given=repr(fen), fix=_FIX)
    return board


def squares_of(board: Board) -> list[int]:
    """The squares' tokens, with the side to move playing up the board.

    For Black the board is mirrored, with colours reversed. The en passant square is marked if a
    pawn can take there.
    """
    squares = ["."] * 64
    for square, piece in board.piece_map().items():
        squares[square] = piece.symbol()
    rights = board.clean_castling_rights()  # a bit for each rook that may castle
    for square in (0, 7, 56, 63):
        if rights >> square & 1:
            squares[square] = {"R": "C", "r": "c"}[squares[square]]
    if board.ep_square is not None and board.has_pseudo_legal_en_passant():
        squares[board.ep_square] = "+"
    if board.turn:
        return [_TOKENS[squares[_from_top(square)]] for square in range(64)]
    return [_TOKENS[square.swapcase()] for square in squares]


def _from_top(square: int) -> int:
    """From a square's number by ``chess`` (a1 0, h8 63) to ours (a8 0, h1 63), or back."""
    return square ^ 56


def square_of(name: str) -> int:
    """The number of a square: 0 for a8, 63 for h1."""
    return (8 - int(name[1])) * 8 + ord(name[0]) - ord("a")


def name_of(square: int) -> str:
    return "abcdefgh"[square % 8] + str(8 - square // 8)


def _read_move(board: Board, move: str, where: str) -> tuple[int, int]:
    """Start and end of a move in UCI notation, as the side to move sees them."""
    try:
        squares = board.parse_uci(move)
    except ValueError:
        squares = None
    if not squares:  # 0000 is none
        expected = "a legal one such as e2e4, or e7e8q"
        raise InputError(f"{where}: move", expected=expected, given=repr(move), fix=_FIX)
    start, end = squares.from_square, squares.to_square
    return (_from_top(start), _from_top(end)) if board.turn else (start, end)
