"""Files of another run in a run's folder are found, whoever reads them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from loopinterp import training
from loopinterp.errors import CheckpointError, InputError
from loopinterp.report import read_run
from loopinterp.run_seal import LinesDigest, Mismatch, Seal, check_lines
from loopinterp.saved_results import Owner, read_run_config
from loopinterp.stages import record_how_it_was_made
from loopinterp.storage import read_tensors_and_metadata, write_tensors
from loopinterp.training.run import (
    CHECKPOINT,
    METRICS,
    WEIGHTS,
    OlderWeightsWarning,
    Run,
    UnsealedRunWarning,
    complete_lines,
)
from tests.training.tiny_run import TINY

FOUR = [json.dumps({"step": step, "loss": 1 / step}) for step in (10, 20, 30, 40)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of one architecture, with other seeds."""
    folder = tmp_path_factory.mktemp("seal")
    for seed in (0, 1):
        training.train(TINY.replace(seed=seed, steps=6), folder / f"{seed}", progress=False)
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained / "0", tmp_path / "run"))


@pytest.mark.parametrize(
    ("lines", "mismatch"),
    [
        (FOUR, None),
        ([*FOUR, json.dumps({"step": 50})], None),
        (FOUR[::-1], Mismatch.LINES_CHANGED),
        (FOUR[:3], Mismatch.LINES_MISSING),
        (FOUR * 2, Mismatch.STEPS_OUT_OF_ORDER),
        ([FOUR[0], FOUR[0].replace("1.0", "0.0"), *FOUR[2:]], Mismatch.LINES_CHANGED),
        ([line.replace("loss", "lass") for line in FOUR], Mismatch.LINES_CHANGED),
    ],
)
def test_lines_that_training_did_not_write(lines: list[str], mismatch: Mismatch | None) -> None:
    seal = LinesDigest(FOUR).seal("f00d")
    assert Seal.of_texts(seal.texts()) == seal
    assert check_lines(lines, seal) is mismatch


def test_no_step_comes_after_the_last() -> None:
    seal = LinesDigest(FOUR).seal("f00d")
    assert check_lines(FOUR, seal, last=40) is None
    assert check_lines([*FOUR, json.dumps({"step": 50})], seal, last=45) is Mismatch.STEPS_BEYOND


@pytest.mark.parametrize("lines", [FOUR[::-1], FOUR * 2, [FOUR[0]] * 4])
def test_without_a_seal_steps_go_up(lines: list[str]) -> None:
    assert check_lines(FOUR, None) is None
    assert check_lines(lines, None) is Mismatch.STEPS_OUT_OF_ORDER


def _evaluates(run: Path) -> None:
    Run.load(run).model()


def _metrics(run: Path) -> None:
    Run.load(run).metrics()


def _resumes(run: Path) -> None:
    training.train(Run.load(run).config, run, progress=False)  # type: ignore[arg-type]


def _counts(run: Path) -> None:
    _ = Run.load(run).finished


@pytest.mark.parametrize(
    ("file", "reads"),
    [
        (WEIGHTS, _evaluates),
        (WEIGHTS, _resumes),
        (METRICS, _metrics),
        (METRICS, _resumes),
        (CHECKPOINT, _counts),
        (CHECKPOINT, _resumes),
        ("config.json", _evaluates),
        ("config.json", _resumes),
        ("config.json", _counts),
    ],
)
def test_a_file_of_a_run_of_the_same_architecture_is_refused(
    trained: Path, run: Path, file: str, reads: Callable[[Path], None]
) -> None:
    reads(run)
    shutil.copy(trained / "1" / file, run / file)
    with pytest.raises(CheckpointError):
        reads(run)


def test_notes_of_another_run_are_not_printed(trained: Path, run: Path) -> None:
    record_how_it_was_made(run, command="mine", unsaid={"programs": "mine"})
    assert read_run(run).unsaid == {"programs": "mine"} and not read_run(run).problems
    other = trained / "1"
    record_how_it_was_made(other, command="other", unsaid={"heads": "other"})
    shutil.copy(other / "made.json", run / "made.json")
    record = read_run(run)
    assert record.unsaid == {} == record.made and len(record.problems) == 1
    record_how_it_was_made(run, seconds={"heads": 1.0})
    assert "other" not in (run / "made.json").read_text()


def test_reasons_of_earlier_weights_are_not_printed(run: Path) -> None:
    earlier = Owner(config=Owner.of_run(run).config, weights="ea51")
    record_how_it_was_made(run, unsaid={"programs": "earlier"}, owner=earlier)
    record = read_run(run)
    assert record.unsaid == {} and len(record.problems) == 1


def test_a_run_of_an_earlier_version_is_read_with_a_notice(run: Path) -> None:
    tensors, texts = read_tensors_and_metadata(run / WEIGHTS)
    bare = {name: text for name, text in texts.items() if not name.startswith("loopinterp.")}
    write_tensors(run / WEIGHTS, tensors, bare)
    assert Owner.of_run(run).mismatch is Mismatch.UNSEALED
    with pytest.warns(UnsealedRunWarning):
        Run.load(run).model()
    assert len(read_run(run).problems) == 1
    training.train(Run.load(run).config, run, progress=False)  # type: ignore[arg-type]
    assert Owner.of_run(run).mismatch is None and not read_run(run).problems


def test_weights_of_another_step_are_read_with_a_notice(run: Path) -> None:
    """As a kill between checkpoint and model leaves them, or a file that was put back."""
    Run.load(run).model()
    tensors, texts = read_tensors_and_metadata(run / WEIGHTS)
    lines = complete_lines(run / METRICS)
    earlier = LinesDigest(lines[:-1]).seal(Seal.of_texts(texts).run)  # type: ignore[union-attr]
    write_tensors(run / WEIGHTS, tensors, texts | earlier.texts())
    with pytest.warns(OlderWeightsWarning, match="the model is not that of the last step"):
        Run.load(run).model()
    training.train(Run.load(run).config, run, progress=False)  # type: ignore[arg-type]
    Run.load(run).model()


def test_a_given_model_is_known_by_its_weights(tmp_path: Path) -> None:
    from tests.test_studied_model import small

    runs = [
        Run.from_model(small(seed), TINY.make_task(), tmp_path / f"{seed}", max_n=2, origin="x")
        for seed in (0, 1)
    ]
    assert read_run_config(runs[0].folder) != read_run_config(runs[1].folder)
    shutil.copy(runs[1].folder / WEIGHTS, runs[0].folder / WEIGHTS)
    with pytest.raises(InputError):
        runs[0].model()
