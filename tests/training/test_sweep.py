"""A sweep goes on where it was killed, ends with the same table, and names what failed."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.stats import sem

from loopinterp.errors import ConfigError, InputError
from loopinterp.saved_results import load_result
from loopinterp.training import (
    Run,
    Sweep,
    SweepResult,
    evaluate,
    run_sweep,
    sweep,
    sweep_cells,
    train,
)
from loopinterp.training.sweep_cells import RESULT
from tests.training.small_sweep import SMALL

CELLS = [(name, seed) for name in ("base", "no noise") for seed in (0, 1)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep that nothing happened to. Shared: copy it before writing into it."""
    out = tmp_path_factory.mktemp("sweep") / "whole"
    run_sweep(SMALL, out, progress=False)
    return out


def folder(out: Path, setting: str, seed: int) -> Path:
    return out / "cells" / setting / f"seed-{seed}"


def made(out: Path) -> list[tuple[str, int]]:
    return [cell for cell in CELLS if (folder(out, *cell) / RESULT).exists()]


def test_every_cell_is_the_run_that_train_would_make(whole: Path, tmp_path: Path) -> None:
    exact = {}
    for setting, seed in CELLS:
        run = train(SMALL.config_of(setting, seed), tmp_path / setting / str(seed), progress=False)
        of_sweep = Run.load(folder(whole, setting, seed))
        assert of_sweep.finished and of_sweep.metrics().equals(run.metrics())
        found = evaluate(run.model(), run.task(), [2, 4], n_samples=8).data["exact_match"]
        exact[setting, seed] = found.sel(extra_loop=0, estimate="value").values
    result = SweepResult.load(whole / "sweep.safetensors")
    for setting in ("base", "no noise"):
        values = np.stack([exact[setting, seed] for seed in (0, 1)])
        at = result.data.sel(setting=setting, extra_loop=0)
        np.testing.assert_allclose(at["exact_match"], values.mean(0))
        np.testing.assert_allclose(at["exact_match_se"], sem(values))
    assert len({value.tobytes() for value in exact.values()}) > 1, "cells differ"
    assert result.data["n_seeds"].values.tolist() == [2, 2]
    assert not result.failed and not result.missing


def test_the_table_is_a_file_as_well(whole: Path) -> None:
    table = pd.read_csv(whole / "sweep.csv")
    assert len(table) == 2 * 3 * 2  # settings, distributions, lengths
    wanted = ["setting", "extra_loop", "distribution", "length", "n_seeds", "exact_match"]
    assert list(table.columns[:6]) == wanted and table["failed"].isna().all()
    assert Sweep.read(whole / "sweep.json") == SMALL


class Killed(BaseException):
    """What no handler of ours takes."""


@pytest.mark.parametrize("after", [0, 1, 3])
def test_stopped_by_an_exception_it_goes_on(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    ends = 0

    def run_cell(cell: sweep.SweepCell) -> str:
        nonlocal ends
        if ends == after:
            raise Killed
        ends += 1
        return done(cell)

    done = sweep.run_cell
    monkeypatch.setattr(sweep, "run_cell", run_cell)
    with pytest.raises(Killed):
        run_sweep(SMALL, tmp_path / "out", progress=False)
    monkeypatch.undo()
    assert len(made(tmp_path / "out")) == after
    times = {cell: _written(tmp_path / "out", cell) for cell in made(tmp_path / "out")}
    run_sweep(SMALL, tmp_path / "out", progress=False)
    assert {cell: _written(tmp_path / "out", cell) for cell in times} == times, "ended is ended"
    assert _table(tmp_path / "out") == _table(whole)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_killed_by_a_signal_it_goes_on(tmp_path: Path) -> None:
    assert SMALL.config is not None
    longer = SMALL.replace(config=SMALL.config.replace(steps=60))
    run_sweep(longer, tmp_path / "whole", progress=False)
    out, fork = tmp_path / "killed", multiprocessing.get_context("fork")
    for wanted in (1, 3):  # after so many cells, in the middle of the next
        child = fork.Process(target=run_sweep, args=(longer, out), kwargs={"progress": False})
        child.start()
        _wait_for(out, wanted)
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        child.join()
    assert child.exitcode == -signal.SIGKILL and not (out / "sweep.csv").exists()
    run_sweep(longer, out, progress=False)
    assert _table(out) == _table(tmp_path / "whole")


@pytest.mark.slow
def test_processes_make_the_same_table(whole: Path, tmp_path: Path) -> None:
    run_sweep(SMALL, tmp_path / "out", jobs=2, progress=False)
    assert _table(tmp_path / "out") == _table(whole)


def test_a_failed_cell_is_named_and_stops_no_other(whole: Path, tmp_path: Path) -> None:
    more = {"wrong": ("model.n_heads=3",), "unstable": ("optimiser.lr=1e30", "optimiser.clip=none")}
    more["too long"] = ("model.positions=absolute", "model.n_ctx=4", "model.relative_window=none")
    failing = SMALL.replace(settings={**more, **SMALL.settings}, seeds=(1,))
    result = run_sweep(failing, tmp_path, progress=False)
    assert list(result.failed) == ["wrong, seed 1", "unstable, seed 1", "too long, seed 1"]
    assert "a divisor of d_model" in result.failed["wrong, seed 1"]
    assert "finite" in result.failed["unstable, seed 1"]
    assert "at most n_ctx=4" in result.failed["too long, seed 1"]
    assert result.data["n_seeds"].values.tolist() == [0, 0, 0, 1, 1]
    assert result.data["exact_match"].sel(setting=[*more]).isnull().all()
    rows = {row["setting"]: row for row in result.table().to_dict("records")}
    assert rows["wrong"]["failed"].startswith("seed 1: ") and np.isnan(rows["wrong"]["exact_match"])
    assert rows["base"]["failed"] == "" and rows["base"]["exact_match"] >= 0
    said = result.findings()[0]
    assert said.good is False and "3 of 5 cells failed" in said.text
    assert load_result(tmp_path / "sweep.safetensors").data.identical(result.data)


def test_an_error_of_any_kind_is_one_failed_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(config, *args, **options):
        if config.seed == 0:
            raise ZeroDivisionError("division by zero")
        return trained(config, *args, **options)

    trained = sweep_cells.train
    monkeypatch.setattr(sweep_cells, "train", train)
    result = run_sweep(SMALL, tmp_path, progress=False)
    assert set(result.failed.values()) == {"ZeroDivisionError: division by zero"}
    assert list(result.failed) == ["base, seed 0", "no noise, seed 0"]
    assert result.data["n_seeds"].values.tolist() == [1, 1]


def test_only_some_settings_leave_the_others_for_later(whole: Path, tmp_path: Path) -> None:
    first = run_sweep(SMALL, tmp_path, only=["no noise"], progress=False)
    assert made(tmp_path) == [("no noise", 0), ("no noise", 1)]
    assert first.missing == ["base, seed 0", "base, seed 1"] and not first.failed
    assert "2 of 4 cells are not run yet." in [finding.text for finding in first.findings()]
    then = run_sweep(SMALL, tmp_path, only=["base"], progress=False)
    assert not then.missing and _table(tmp_path) == _table(whole)


def test_more_seeds_and_another_evaluation_reuse_what_is_trained(
    whole: Path, tmp_path: Path
) -> None:
    out = Path(shutil.copytree(whole, tmp_path / "out"))
    trained = {cell: (folder(out, *cell) / "metrics.jsonl").read_bytes() for cell in CELLS}
    evaluation = SMALL.evaluation.replace(lengths=(3,), loops=(1, 2))
    more = SMALL.replace(seeds=(0, 1, 2), evaluation=evaluation, show={"exact_match": "loop"})
    result = run_sweep(more, out, progress=False)
    assert result.data["length"].values.tolist() == [3]
    assert result.data["n_seeds"].values.tolist() == [3, 3]
    assert {cell: (folder(out, *cell) / "metrics.jsonl").read_bytes() for cell in CELLS} == trained
    assert {t["name"] for t in result.figures()[0].plot.to_dict()["data"]} == {"base", "no noise"}


def test_a_damaged_result_is_made_again(whole: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(whole, tmp_path / "out"))
    (folder(out, "base", 1) / RESULT).write_bytes(b"half")
    run_sweep(SMALL, out, progress=False)
    assert _table(out) == _table(whole)
    (folder(out, "base", 1) / "config.json").write_text("{")
    assert list(run_sweep(SMALL, out, progress=False).failed) == ["base, seed 1"]


def test_a_folder_of_another_sweep_and_wrong_options_are_refused(whole: Path) -> None:
    before = _table(whole)
    with pytest.raises(ConfigError, match="batch_size: expected 4, as the run in"):
        run_sweep(SMALL.replace(set=("batch_size=2",)), whole, progress=False)
    with pytest.raises(InputError, match="setting: expected one of"):
        run_sweep(SMALL, whole, only=["none"], progress=False)
    with pytest.raises(InputError, match="jobs: expected an integer in"):
        run_sweep(SMALL, whole, jobs=0, progress=False)
    with pytest.raises(InputError, match="options: expected none on this machine"):
        run_sweep(SMALL, whole, options={"timeout_min": 3}, progress=False)
    assert _table(whole) == before


def _table(out: Path) -> str:
    return (out / "sweep.csv").read_text()


def _written(out: Path, cell: tuple[str, int]) -> int:
    return (folder(out, *cell) / RESULT).stat().st_mtime_ns


def _wait_for(out: Path, n_cells: int) -> None:
    end = time.monotonic() + 60
    while len(made(out)) < n_cells:
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.005)
