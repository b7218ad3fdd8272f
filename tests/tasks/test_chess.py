"""Chess positions and puzzles."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loopinterp.core.errors import InputError
from loopinterp.tasks import ChessPuzzles
from loopinterp.tasks.chess import SYMBOLS, name_of, read_fen, square_of, squares_of
from tests.tasks.answers import PUZZLES

START = "rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR w KQkq - 0 1"
CASTLE = "r3k2r/8/8/8/8/8/8/R3K2R"


def seen(fen: str) -> str:
    tokens = "".join(SYMBOLS[token] for token in squares_of(read_fen(fen)))
    return "/".join(tokens[k : k + 8] for k in range(0, 64, 8))


def test_the_side_to_move_plays_up_the_board() -> None:
    white = "c...k..c/......../......../......../......../......../......../C...K..C"
    assert seen(f"{CASTLE} w KQkq -") == seen(f"{CASTLE} b KQkq -") == white
    assert seen(f"{CASTLE} b Kq -") == white[:-1].replace("c...k..c", "r...k..c") + "R"
    # Black's pawn on d4 may take on e3: seen from its side, on e6.
    passed = seen("4k3/8/8/8/3pP3/8/8/4K3 b - e3")
    assert passed.split("/")[:4] == ["....k...", "........", "....+...", "...Pp..."]
    # No pawn stands beside, or it stands on the other edge of the board.
    for fen in ("4k3/8/8/8/4P3/8/8/4K3 b - e3", "4k3/8/8/7p/P7/8/8/4K3 b - a3"):
        assert "+" not in seen(fen)
    fen = "4k3/8/8/Pp6/8/8/8/4K3 w - b6"
    assert "+" in seen(fen)


@given(st.sampled_from([START, f"{CASTLE} w Kq -", "4k3/8/8/Pp6/8/8/8/4K3 w - b6"]))
def test_a_mirrored_board_with_exchanged_colours_looks_the_same(fen: str) -> None:
    board, _, rights, passing = fen.split()[:4]
    mirrored = "/".join(reversed(board.swapcase().split("/")))
    swapped = "".join(sorted(rights.swapcase()))
    behind = passing.replace("6", "3")
    assert seen(f"{mirrored} b {swapped} {behind}") == seen(fen)
    for square in range(64):
        assert square_of(name_of(square)) == square


@pytest.mark.parametrize(
    "fen",
    [
        "",
        "8/8/8/8/8/8/8/8 w - -",
        "4k3/8/8/8/8/8/8 w - -",
        "4k3/8/8/8/8/8/8/4K2X w - -",
        "4k3/8/8/8/8/8/8/4K2P w - -",
        "4k3/8/8/8/8/8/8/4K3 x - -",
        "4k3/8/8/8/8/8/8/4K3",
        "4k3/8/8/8/8/8/8/4K3 w K -",
        "4k3/8/8/8/8/8/8/4K3 w - e3",
    ],
)
def test_a_bad_fen_is_refused(fen: str) -> None:
    with pytest.raises(InputError) as caught:
        read_fen(fen)
    assert (caught.value.what, caught.value.given) == ("FEN", repr(fen))


@pytest.mark.parametrize("move", ["0000", "e2e9", "e1g1x", "e4e5", "e7e5", "a1a2", "e2e4q"])
def test_a_bad_move_is_refused(move: str) -> None:
    with pytest.raises(InputError) as caught:
        ChessPuzzles().encode([(START, f"{move} e7e5", 640)])
    assert (caught.value.what, caught.value.given) == ("puzzle 0: move", repr(move))


def test_without_the_package_the_error_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "chess", None)
    with pytest.raises(InputError) as caught:
        read_fen(START)
    assert "loopinterp[chess]" in caught.value.fix


TASK = ChessPuzzles(csv=PUZZLES)
HEAD = "PuzzleId,FEN,Moves,Rating\n"
MATE = "7k/5ppp/8/8/8/8/5PPP/1R4K1 b - - 0 30"


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_drawn_puzzles_are_those_of_the_file_with_that_rating() -> None:
    with open(PUZZLES, encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    every = {
        line: int(row["Rating"]) // 100
        for row in rows
        for line in TASK.decode(TASK.encode([(row["FEN"], row["Moves"], int(row["Rating"]))]))
    }
    n = torch.randint(1, 17, (400,), generator=rng())
    batch = TASK.sample(n, generator=rng())
    drawn = TASK.decode(batch)
    assert [every[line] for line in drawn] == n.tolist()
    assert set(drawn) == set(every) and len(every) == len(rows)
    assert torch.equal(TASK.targets(batch.inputs), batch.targets)
    assert ((batch.targets == 1).sum(1) == 1).all() and ((batch.targets == 2).sum(1) == 1).all()


def test_the_first_move_is_made_and_the_second_is_asked() -> None:
    """Lichess' own example, puzzle 0009B: Black retreats the bishop, White takes the knight."""
    fen = "r2qr1k1/b1p2ppp/pp4n1/P1P1p3/4P1n1/B2P2Pb/3NBP1P/RN1QR1K1 b - - 1 16"
    batch = ChessPuzzles().encode([(fen, "b6c5 e2g4 h3g4 d1g4", 1112)])
    assert batch.n.tolist() == [11] and batch.n_loops.tolist() == [30]
    (line,) = ChessPuzzles().decode(batch)
    board, move = line.split(" = ")
    assert board.split("/")[:4] == ["r..qr.k.", "b.p..ppp", "p.....n.", "P.p.p..."]
    assert board.split("/")[4:] == ["....P.n.", "B..P..Pb", "...NBP.P", "RN.QR.K."]
    assert move == "e2g4"


def test_what_black_is_asked_is_seen_from_its_side() -> None:
    fen = "3r2k1/5ppp/8/1p6/8/8/5PPP/7K w - - 0 30"
    (line,) = ChessPuzzles().decode(ChessPuzzles().encode([(fen, "h1g1 d8d1", 134)]))
    assert line.endswith("/......../.....PPP/...R..K. = d1d8")
    assert line.startswith("......k./.....ppp/")


def test_answers_that_are_no_move_are_question_marks() -> None:
    batch = TASK.sample(3, batch_size=1, generator=rng())
    answers = batch.targets.clone()
    answers[answers == 2] = 0
    assert TASK.decode(batch, answers)[0].endswith("?")


def test_a_position_that_comes_twice_counts_once_and_most_is_the_most(tmp_path: Path) -> None:
    path = tmp_path / "p.csv"
    rows = [f"a,{MATE},h8g8 b1b8,100", f"b,{MATE},h8g8 b1b7,200", f"c,{MATE},h8g8 b1b7,x"]
    path.write_text(HEAD + "\n".join(rows))
    task = ChessPuzzles(csv=str(path), most=2)
    batch = task.sample(1, batch_size=5, generator=rng())
    assert {line[-4:] for line in task.decode(batch)} == {"b1b8"}
    with pytest.raises(InputError) as caught:
        task.sample(2, batch_size=1, generator=rng())
    assert (caught.value.what, caught.value.given) == ("n", "2")
    path.write_text(HEAD + rows[1])  # a changed file is read again
    assert task.sample(2, batch_size=1, generator=rng()).n.tolist() == [2]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("PuzzleId,FEN,Rating\n", "csv p.csv"),
        ("", "csv p.csv"),
        (HEAD, "csv p.csv"),
        (HEAD + f"a,{MATE},h8g8 b1b8,640\nb,{MATE},h8g8,640", "csv p.csv, line 3"),
        (HEAD + f"a,{MATE},h8g8 b1b8,", "csv p.csv, line 2"),
        (HEAD + f"a,{MATE},", "csv p.csv, line 2"),
        (HEAD + "a,8/8 w - -,h8g8 b1b8,640", "csv p.csv, line 2: FEN"),
        (HEAD + f"a,{MATE},b1b8 h8g8,640", "csv p.csv, line 2: move"),
        (HEAD + f"a,{MATE},h8g8 g8h8,640", "csv p.csv, line 2: move"),
    ],
)
def test_a_bad_file_says_where_and_what(text: str, what: str, tmp_path: Path) -> None:
    path = tmp_path / "p.csv"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        ChessPuzzles(csv=str(path)).sample(6, batch_size=1, generator=rng())
    assert caught.value.what == what


def test_without_a_file_nothing_is_drawn(tmp_path: Path) -> None:
    attempts = {
        "csv": lambda: ChessPuzzles().sample(6, batch_size=1, generator=rng()),
        "csv ": lambda: ChessPuzzles(csv=str(tmp_path / "absent.csv")).longest(6),
        "puzzles": lambda: ChessPuzzles().encode([]),
        "puzzle 1: FEN": lambda: ChessPuzzles().encode(
            [(MATE, "h8g8 b1b8", 640), ("x", "h8g8 b1b8", 640)]
        ),
    }
    for what, attempt in attempts.items():
        with pytest.raises(InputError) as caught:
            attempt()
        assert caught.value.what == what.strip()


def test_boards_that_are_not_of_the_file_are_refused() -> None:
    batch = TASK.sample(6, batch_size=2, generator=rng())
    other = batch.inputs.clone()
    other[1, 20] = 3
    for wrong in (other, other[:, :60]):
        with pytest.raises(InputError) as caught:
            TASK.targets(wrong)
        assert caught.value.what == "inputs"
