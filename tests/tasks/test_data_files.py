"""A run on a user's own file keeps which file it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from loopinterp.errors import ConfigError, InputError
from loopinterp.models import LoopedTransformer, LoopedTransformerConfig
from loopinterp.tasks import get_task
from loopinterp.tasks.chess_puzzles import ChessPuzzles
from loopinterp.training import CurriculumConfig, Run, TrainingConfig, train

ROOK_MATES = (Path(__file__).parent / "rook_mates.csv").read_text()
MODEL = LoopedTransformerConfig(
    d_model=8,
    n_heads=2,
    d_vocab=ChessPuzzles.d_vocab,
    d_vocab_out=3,
    causal=False,
    positions="absolute",
    n_ctx=64,
)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a file of puzzles beside another one that has the same name."""
    for name, text in (("here", ROOK_MATES), ("other", "\n".join(ROOK_MATES.splitlines()[:2]))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "puzzles.csv").write_text(text)
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def _drawn(run: Run) -> torch.Tensor:
    task = run.task()
    return task.targets(task.sample(_rating(), batch_size=4, generator=torch.Generator()))


def _rating() -> int:
    row = ROOK_MATES.splitlines()[1].split(",")
    return int(row[ROOK_MATES.splitlines()[0].split(",").index("Rating")]) // 100


def test_a_given_models_run_draws_from_its_file_in_any_folder(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = get_task("chess_puzzles", csv="puzzles.csv")
    run = Run.from_model(LoopedTransformer(MODEL, seed=0), task, "run", max_n=6, origin="x")
    before = _drawn(run)
    monkeypatch.chdir(here.parent / "other")
    again = Run.load(here / "run")
    assert torch.equal(_drawn(again), before) and again.finished
    (here / "puzzles.csv").write_text((here.parent / "other" / "puzzles.csv").read_text())
    assert not again.finished
    with pytest.raises(InputError):
        again.task()
    (here / "puzzles.csv").unlink()
    assert not again.finished
    with pytest.raises(InputError):
        again.task()


def test_a_training_is_not_gone_on_with_on_another_file(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    n = _rating()
    config = TrainingConfig(
        task="chess_puzzles",
        task_settings={"csv": "puzzles.csv"},
        model=MODEL,
        curriculum=CurriculumConfig(kind="none", min_n=n, max_n=n),
        steps=1,
        batch_size=2,
        device="cpu",
    )
    run = train(config, here / "run", progress=False)
    assert run.finished and train(config, here / "run", progress=False).finished
    monkeypatch.chdir(here.parent / "other")
    with pytest.raises(ConfigError):  # the file of that name is another one
        train(config, here / "run", progress=False)
    (here / "puzzles.csv").write_text("FEN,Moves,Rating\n")
    assert not Run.load(here / "run").finished
    with pytest.raises(InputError):
        train(Run.load(here / "run").config, here / "run", progress=False)  # type: ignore[arg-type]
