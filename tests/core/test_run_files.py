from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from loopinterp import training
from loopinterp.core import run_files
from loopinterp.core.errors import CheckpointError, InputError
from loopinterp.core.run_files import (
    MADE,
    LinesDigest,
    Mismatch,
    Owner,
    Seal,
    check_lines,
    read_run_config,
    record_how_it_was_made,
)
from loopinterp.core.storage import (
    read_json,
    read_json_object,
    read_tensors_and_metadata,
    write_tensors,
)
from loopinterp.core.text import Stages
from loopinterp.pages import read_run
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
    record_how_it_was_made(run, command="mine", skipped={"programs": "mine"})
    assert read_run(run).skipped == {"programs": "mine"} and not read_run(run).problems
    other = trained / "1"
    record_how_it_was_made(other, command="other", skipped={"heads": "other"})
    shutil.copy(other / "made.json", run / "made.json")
    record = read_run(run)
    assert record.skipped == {} == record.made and len(record.problems) == 1
    record_how_it_was_made(run, seconds={"heads": 1.0})
    assert "other" not in (run / "made.json").read_text()


def test_reasons_of_earlier_weights_are_not_printed(run: Path) -> None:
    earlier = Owner(config=Owner.of_run(run).config, weights="ea51")
    record_how_it_was_made(run, skipped={"programs": "earlier"}, owner=earlier)
    record = read_run(run)
    assert record.skipped == {} and len(record.problems) == 1


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
    with pytest.warns(OlderWeightsWarning, match=f"after {len(lines) - 1} .*after {len(lines)}"):
        Run.load(run).model()
    training.train(Run.load(run).config, run, progress=False)  # type: ignore[arg-type]
    Run.load(run).model()


def test_a_given_model_is_known_by_its_weights(tmp_path: Path) -> None:
    from tests.app.test_session import small

    runs = [
        Run.from_model(small(seed), TINY.make_task(), tmp_path / f"{seed}", max_n=2, origin="x")
        for seed in (0, 1)
    ]
    assert read_run_config(runs[0].folder) != read_run_config(runs[1].folder)
    shutil.copy(runs[1].folder / WEIGHTS, runs[0].folder / WEIGHTS)
    with pytest.raises(InputError):
        runs[0].model()


def test_times_are_added_and_the_command_stays(tmp_path: Path) -> None:
    record_how_it_was_made(tmp_path, command="make it", seconds={"train": 2.0})
    record_how_it_was_made(tmp_path, seconds={"heads": 1.0})
    document = read_json(tmp_path / MADE)
    assert document["command"] == "make it"
    assert document["stages"] == {"train": 2.0, "heads": 1.0}


@pytest.mark.parametrize(
    "text",
    ["[1]", "3", "null", "{", "1" * 5000, '{"stages": 3}', '{"stages": [["a", 1]]}'],
    ids=len,
)
def test_what_is_of_another_type_counts_as_absent(tmp_path: Path, text: str) -> None:
    (tmp_path / MADE).write_text(text)
    record_how_it_was_made(tmp_path, seconds={"heads": 1.0})
    assert read_json(tmp_path / MADE)["stages"] == {"heads": 1.0}


def test_of_two_commands_that_end_at_once_both_times_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slowly(path: Path) -> dict[str, Any]:
        time.sleep(0.02)
        return read_json_object(path)

    record_how_it_was_made(tmp_path)
    monkeypatch.setattr(run_files, "read_json_object", slowly)
    names = ["generalisation", "heads", "attention", "explorer"]
    with ThreadPoolExecutor(len(names)) as pool:
        futures = [pool.submit(record_how_it_was_made, tmp_path, seconds={n: 1.0}) for n in names]
    assert all(future.result() is None for future in futures)
    assert set(read_json(tmp_path / MADE)["stages"]) == set(names)


def test_stages_that_were_done_before_one_that_failed_are_kept(tmp_path: Path) -> None:
    job = Stages(tmp_path, show=False)
    with job.stage("heads", "do they look where the programs look?"):
        pass
    job.skip("programs", "there is none")
    with pytest.raises(ZeroDivisionError), job.stage("attention", "where do they look?"):
        _ = 1 / 0
    document = read_json(tmp_path / MADE)
    assert set(document["stages"]) == {"heads"} and document["unsaid"] == {
        "programs": {"reason": "there is none"}
    }
