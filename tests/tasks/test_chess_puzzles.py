"""Chess puzzles: files as they should be and as they should not, boards, answers and ratings."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

from loopinterp.errors import InputError
from loopinterp.tasks import ChessPuzzles
from tests.tasks.answers import PUZZLES

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
    with pytest.raises(InputError, match=r"puzzles of: \[1\], got 2"):
        task.sample(2, batch_size=1, generator=rng())
    path.write_text(HEAD + rows[1])  # a changed file is read again
    assert task.sample(2, batch_size=1, generator=rng()).n.tolist() == [2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("PuzzleId,FEN,Rating\n", "csv p.csv: expected the columns FEN, Moves, Rating, .*Moves"),
        ("", "without FEN, Moves, Rating"),
        (HEAD, "expected puzzles, got none"),
        (
            HEAD + f"a,{MATE},h8g8 b1b8,640\nb,{MATE},h8g8,640",
            "line 3: expected at least two moves",
        ),
        (HEAD + f"a,{MATE},h8g8 b1b8,", "line 2: .*a rating of at least 1"),
        (HEAD + f"a,{MATE},", "line 2: .*a rating of at least 1"),
        (HEAD + "a,8/8 w - -,h8g8 b1b8,640", "line 2: FEN: expected 8 rows of 8 squares"),
        (HEAD + f"a,{MATE},b1b8 h8g8,640", "line 2: move: expected Black's piece to move"),
        (HEAD + f"a,{MATE},h8g8 g8h8,640", "line 2: move: expected White's piece to move"),
    ],
)
def test_a_bad_file_says_where_and_what(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "p.csv"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        ChessPuzzles(csv=str(path)).sample(6, batch_size=1, generator=rng())


def test_without_a_file_nothing_is_drawn(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="csv: expected a file of puzzles to draw from, got none"):
        ChessPuzzles().sample(6, batch_size=1, generator=rng())
    with pytest.raises(InputError, match="nothing is downloaded"):
        ChessPuzzles(csv=str(tmp_path / "absent.csv")).sample(6, batch_size=1, generator=rng())
    with pytest.raises(InputError, match="puzzles: expected at least one"):
        ChessPuzzles().encode([])
    with pytest.raises(InputError, match="puzzle 1: FEN"):
        ChessPuzzles().encode([(MATE, "h8g8 b1b8", 640), ("x", "h8g8 b1b8", 640)])


def test_boards_that_are_not_of_the_file_are_refused() -> None:
    batch = TASK.sample(6, batch_size=2, generator=rng())
    other = batch.inputs.clone()
    other[1, 20] = 3
    with pytest.raises(InputError, match=r"positions of the file.* another one in row 1"):
        TASK.targets(other)
    with pytest.raises(InputError, match="64 squares each, got 60"):
        TASK.targets(other[:, :60])
