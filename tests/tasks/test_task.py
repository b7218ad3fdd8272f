"""Batches: what they refuse; and the files that tasks draw from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from loopinterp import comparison, interventions, lenses
from loopinterp.core.errors import MOST_LOOPS, ConfigError, InputError
from loopinterp.models import LoopedTransformer, LoopedTransformerConfig
from loopinterp.tasks import Addition, Batch, as_batch, get_task, list_tasks
from loopinterp.tasks.chess import ChessPuzzles
from loopinterp.tasks.task import IGNORE
from loopinterp.training import CurriculumConfig, Run, TrainingConfig, train

GOOD = as_batch(Addition(), n=4, batch_size=8)
FEATURES = as_batch(Addition(format="features"), n=4, batch_size=8)

WRONG: dict[str, tuple[str, Callable[[], Batch]]] = {
    "a task's name": ("task", lambda: replace(GOOD, task="addition")),  # type: ignore[arg-type]
    "narrow targets": ("targets", lambda: replace(GOOD, targets=GOOD.targets[:, 1:])),
    "few targets": ("targets", lambda: replace(GOOD, targets=GOOD.targets[1:])),
    "flat targets": ("targets", lambda: replace(GOOD, targets=GOOD.targets[:, 0])),
    "float targets": ("targets", lambda: replace(GOOD, targets=GOOD.targets.float())),
    "bool targets": ("targets", lambda: replace(GOOD, targets=GOOD.targets > 0)),
    "listed targets": ("targets", lambda: replace(GOOD, targets=GOOD.targets.tolist())),
    "target beyond": ("targets", lambda: replace(GOOD, targets=GOOD.targets.clamp(min=2))),
    "target below": ("targets", lambda: replace(GOOD, targets=GOOD.targets - 1, task=None)),
    "token beyond": ("inputs", lambda: replace(GOOD, inputs=GOOD.inputs + 2)),
    "token below": ("inputs", lambda: replace(GOOD, inputs=GOOD.inputs - 9, task=None)),
    "float tokens": ("inputs", lambda: replace(GOOD, inputs=GOOD.inputs.float())),
    "one example": ("inputs", lambda: replace(GOOD, inputs=GOOD.inputs[0])),
    "nan features": ("inputs", lambda: replace(FEATURES, inputs=FEATURES.inputs * torch.nan)),
    "no length": ("n", lambda: replace(GOOD, n=GOOD.n * 0)),
    "one length": ("n", lambda: replace(GOOD, n=GOOD.n[:1])),
    "number of loops": ("n_loops", lambda: replace(GOOD, n_loops=5)),  # type: ignore[arg-type]
    "float loops": ("n_loops", lambda: replace(GOOD, n_loops=GOOD.n_loops.double())),
    "loops below": ("n_loops", lambda: replace(GOOD, n_loops=GOOD.n_loops - 9)),
    "loops beyond": ("n_loops", lambda: replace(GOOD, n_loops=GOOD.n_loops + MOST_LOOPS)),
}


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize("name", WRONG)
def test_a_batch_of_wrong_make_is_refused_by_the_part_that_is_wrong(name: str) -> None:
    part, make = WRONG[name]
    with pytest.raises(InputError) as refused:
        make()
    assert refused.value.what == f"{part} of a batch"


@pytest.mark.parametrize("name", [name for name in list_tasks() if name != "chess_puzzles"])
def test_what_a_task_draws_is_a_batch_and_so_is_any_part_of_it(name: str) -> None:
    batch = get_task(name).sample(3, batch_size=4, generator=torch.Generator().manual_seed(0))
    for part in (batch[:0], batch[1:], batch[batch.n > 5], batch.to("cpu")):
        assert isinstance(part, Batch)


def _model() -> LoopedTransformer:
    config = LoopedTransformerConfig(d_model=16, n_heads=2, d_vocab=6, d_vocab_out=2)
    return LoopedTransformer(config).eval()


def _unasked() -> Batch:
    targets = GOOD.targets.clone()
    targets[0] = IGNORE
    return replace(GOOD, targets=targets)


JUDGES: dict[str, Callable[[Batch], Any]] = {
    "ablation": lambda batch: interventions.ablation_study(_model(), batch, kinds=("zero",)),
    "comparison": lambda batch: comparison.compare_programs(
        _model(), ["ripple", "lookahead"], batch
    ),
    "interchange": lambda batch: comparison.interchange_study(_model(), batch, "ripple"),
    "exits": lambda batch: lenses.exit_study(_model(), batch),
}
UNJUDGED = {
    "nothing is asked of one example": _unasked(),
    "nothing is asked": replace(GOOD, targets=torch.full_like(GOOD.targets, IGNORE)),
    "asked before the first loop": replace(GOOD, n_loops=GOOD.n_loops * 0),
    "no examples": GOOD[:0],
}


@pytest.mark.parametrize("kind", UNJUDGED)
@pytest.mark.parametrize("name", JUDGES)
def test_a_study_that_judges_answers_refuses_what_it_cannot_judge(name: str, kind: str) -> None:
    with pytest.raises(InputError):
        JUDGES[name](UNJUDGED[kind])


def test_a_lens_reads_what_nothing_is_asked_of() -> None:
    result = lenses.attention_study(_model(), _unasked())
    assert result.findings()


def test_an_ablation_refuses_classes_that_the_model_has_not() -> None:
    beyond = replace(GOOD, targets=torch.full_like(GOOD.targets, 2), task=None)
    with pytest.raises(InputError):
        JUDGES["ablation"](beyond)


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
    task = run.task
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
        _ = again.task
    (here / "puzzles.csv").unlink()
    assert not again.finished
    with pytest.raises(InputError):
        _ = again.task


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
