"""Chess positions: from FEN, after a move, and as the side to move sees them."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from loopinterp.errors import InputError

SYMBOLS = ".+PNBRQKCpnbrqkc"
"""Tokens of squares, by number: an empty one, one where a pawn may be taken in passing, the own
pieces, of rooks those that may castle (C), and the other side's."""

_ROOKS = {"Q": 56, "K": 63, "q": 0, "k": 7}
_KINGS = {"Q": 60, "K": 60, "q": 4, "k": 4}
_MOVE = re.compile(r"([a-h][1-8])([a-h][1-8])([qrbn]?)")


@dataclass(frozen=True)
class Position:
    """Who stands where, and what else a move may depend on.

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
        if self.passing is not None and self._can_pass(self.passing):
            board[self.passing] = "+"
        if not self.white:
            board = [square.swapcase() for row in range(7, -1, -1) for square in _row(board, row)]
        return [SYMBOLS.index(square) for square in board]

    def _can_pass(self, at: int) -> bool:
        pawn, behind = ("P", 8) if self.white else ("p", -8)
        beside = [at + behind + side for side in (-1, 1) if 0 <= at % 8 + side < 8]
        return any(self.board[square] == pawn for square in beside)

    def seen_square(self, square: int) -> int:
        """Where the side to move sees a square."""
        return square if self.white else (7 - square // 8) * 8 + square % 8

    def squares(self, move: str) -> tuple[int, int, str]:
        """From where to where a move in UCI notation goes, and what a pawn becomes.

        Raises:
            InputError: it is no move of a piece of the side to move to where none of its own is.
        """
        found = _MOVE.fullmatch(move)
        if found is None:
            raise _refused("move", "one such as e2e4, or e7e8q", move)
        start, end = square_of(found[1]), square_of(found[2])
        own = self.board[start] != "." and self.board[start].isupper() == self.white
        blocked = self.board[end] != "." and self.board[end].isupper() == self.white
        if not own or blocked:
            side = "White" if self.white else "Black"
            raise _refused("move", f"{side}'s piece to move, not onto another of its own", move)
        last = self.board[start] in "Pp" and end // 8 in (0, 7)
        if last != bool(found[3]):
            raise _refused("move", "a piece named where a pawn reaches the last rank, only", move)
        return start, end, found[3]

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
    """Its name.

    Example:
        >>> name_of(0), name_of(52)
        ('a8', 'e2')
    """
    return "abcdefgh"[square % 8] + str(8 - square // 8)


def read_fen(fen: str) -> Position:
    """The position that a FEN says; its clocks, if there are any, are left out.

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


def _row(board: list[str], row: int) -> list[str]:
    return board[8 * row : 8 * row + 8]


def _refused(what: str, expected: str, given: str) -> InputError:
    return InputError(what, expected=expected, given=repr(given), fix="Mend it, or leave it out.")
