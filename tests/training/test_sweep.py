"""Running a sweep, its cells and its workers."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import threading
import time
import types
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from joblib.externals.loky import get_reusable_executor
from scipy.stats import sem

from loopinterp.core.errors import ConfigError
from loopinterp.core.results import Result, load_result
from loopinterp.core.storage import in_turn
from loopinterp.training import Run, Sweep, SweepResult, evaluate, run_sweep, sweep, train
from loopinterp.training.sweep import RESULT, SweepCell, _in_processes, _on_cluster, run_cell
from tests.refusals import naming
from tests.training.small_sweep import SMALL

CELLS = [(name, seed) for name in ("base", "no noise") for seed in (0, 1)]


@pytest.fixture(scope="module")
def sweep_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep that nothing happened to. Shared: copy it before writing into it."""
    out = tmp_path_factory.mktemp("sweep") / "whole"
    run_sweep(SMALL, out, progress=False)
    return out


def folder(out: Path, setting: str, seed: int) -> Path:
    return out / "cells" / setting / f"seed-{seed}"


def trained_cells(out: Path) -> list[tuple[str, int]]:
    return [cell for cell in CELLS if (folder(out, *cell) / RESULT).exists()]


def test_every_cell_is_the_run_that_train_would_make(sweep_folder: Path, tmp_path: Path) -> None:
    exact = {}
    for setting, seed in CELLS:
        run = train(SMALL.config_of(setting, seed), tmp_path / setting / str(seed), progress=False)
        of_sweep = Run.load(folder(sweep_folder, setting, seed))
        assert of_sweep.finished and of_sweep.metrics().equals(run.metrics())
        by_length = evaluate(run.model(), run.task, [2, 4], n_samples=8).data["exact_match"]
        exact[setting, seed] = by_length.sel(extra_loop=0, estimate="value").values
    result = SweepResult.load(sweep_folder / "sweep.safetensors")
    for setting in ("base", "no noise"):
        values = np.stack([exact[setting, seed] for seed in (0, 1)])
        at = result.data.sel(setting=setting, extra_loop=0)
        np.testing.assert_allclose(at["exact_match"], values.mean(0))
        np.testing.assert_allclose(at["exact_match_se"], sem(values))
    assert len({value.tobytes() for value in exact.values()}) > 1, "cells differ"
    assert result.data["n_seeds"].values.tolist() == [2, 2]
    assert not result.failed and not result.missing


def test_the_table_is_a_file_as_well(sweep_folder: Path) -> None:
    table = pd.read_csv(sweep_folder / "sweep.csv")
    assert len(table) == 2 * 3 * 2  # settings, distributions, lengths
    columns = ["setting", "extra_loop", "distribution", "length", "n_seeds", "exact_match"]
    assert list(table.columns[:6]) == columns and table["failed"].isna().all()
    assert Sweep.read(sweep_folder / "sweep.json") == SMALL


class Killed(BaseException):
    """What no handler of ours takes."""


@pytest.mark.parametrize("after", [0, 3])
def test_stopped_by_an_exception_it_goes_on(
    sweep_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    ends = 0

    def run_cell(cell: sweep.SweepCell) -> str | None:
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
    assert len(trained_cells(tmp_path / "out")) == after
    times = {cell: _written(tmp_path / "out", cell) for cell in trained_cells(tmp_path / "out")}
    run_sweep(SMALL, tmp_path / "out", progress=False)
    assert {cell: _written(tmp_path / "out", cell) for cell in times} == times, "ended is ended"
    assert _table(tmp_path / "out") == _table(sweep_folder)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_killed_by_a_signal_it_goes_on(tmp_path: Path) -> None:
    assert SMALL.config is not None
    longer = SMALL.config.replace(steps=30, checkpoint_every=10)
    longer = SMALL.replace(config=longer, settings={"base": ()})
    run_sweep(longer, tmp_path / "whole", progress=False)
    out, fork = tmp_path / "killed", multiprocessing.get_context("fork")
    for seed in (0, 1):  # in the middle of each cell
        child = fork.Process(target=run_sweep, args=(longer, out), kwargs={"progress": False})
        child.start()
        _wait_for(folder(out, "base", seed) / "state" / "checkpoint.safetensors")
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        assert child.exitcode == -signal.SIGKILL and trained_cells(out) == CELLS[:seed]
    assert not (out / "sweep.csv").exists()
    run_sweep(longer, out, progress=False)
    assert _table(out) == _table(tmp_path / "whole")


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Processes of joblib that have everything imported."""
    get_reusable_executor().shutdown()
    monkeypatch.setattr("joblib.externals.loky.backend.context._DEFAULT_START_METHOD", "fork")
    yield
    get_reusable_executor().shutdown()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`fork` start method should not be used:UserWarning")
@pytest.mark.usefixtures("forked")
def test_processes_make_the_same_table(sweep_folder: Path, tmp_path: Path) -> None:
    run_sweep(SMALL, tmp_path / "out", jobs=2, progress=False)
    assert _table(tmp_path / "out") == _table(sweep_folder)


def test_a_failed_cell_is_named_and_stops_no_other(sweep_folder: Path, tmp_path: Path) -> None:
    more = {"wrong": ("model.n_heads=3",), "unstable": ("optimiser.lr=1e30", "optimiser.clip=none")}
    more["too long"] = ("model.positions=absolute", "model.n_ctx=4", "model.relative_window=none")
    failing = SMALL.replace(settings={**more, **SMALL.settings}, seeds=(1,))
    result = run_sweep(failing, tmp_path, progress=False)
    errors = {name.removesuffix(", seed 1"): error for name, error in result.failed.items()}
    assert list(errors) == ["wrong", "unstable", "too long"] and len(result.failed) == 3
    assert all(name.endswith(", seed 1") for name in result.failed)
    assert "d_model" in errors["wrong"]
    assert "finite" in errors["unstable"]
    assert "n_ctx=4" in errors["too long"]
    assert result.data["n_seeds"].values.tolist() == [0, 0, 0, 1, 1]
    assert result.data["exact_match"].sel(setting=[*more]).isnull().all()
    rows = {row["setting"]: row for row in result.table().to_dict("records")}
    assert rows["wrong"]["failed"].startswith("seed 1: ") and np.isnan(rows["wrong"]["exact_match"])
    assert rows["base"]["failed"] == "" and rows["base"]["exact_match"] >= 0
    finding = result.findings()[0]
    assert finding.good is False and finding.value == "3 failed" and "3 of 5" in finding.text
    assert load_result(tmp_path / "sweep.safetensors").data.identical(result.data)


def test_an_error_of_any_kind_is_one_failed_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(config, *args, **options):
        if config.seed == 0:
            raise ZeroDivisionError("by zero")
        return trained(config, *args, **options)

    trained = sweep.train
    monkeypatch.setattr(sweep, "train", train)
    result = run_sweep(SMALL, tmp_path, progress=False)
    cells = ["base, seed 0", "no noise, seed 0"]
    assert result.failed == dict.fromkeys(cells, "ZeroDivisionError: by zero")
    assert result.data["n_seeds"].values.tolist() == [1, 1]


def test_only_some_settings_leave_the_others_for_later(sweep_folder: Path, tmp_path: Path) -> None:
    first = run_sweep(SMALL, tmp_path, only=["no noise"], progress=False)
    assert trained_cells(tmp_path) == [("no noise", 0), ("no noise", 1)]
    assert first.missing == ["base, seed 0", "base, seed 1"] and not first.failed
    missing = next(finding for finding in first.findings() if finding.value == "2 left")
    assert missing.text.startswith("2 of 4")
    then = run_sweep(SMALL, tmp_path, only=["base"], progress=False)
    assert not then.missing and _table(tmp_path) == _table(sweep_folder)


def test_more_seeds_and_another_evaluation_reuse_what_is_trained(
    sweep_folder: Path, tmp_path: Path
) -> None:
    out = Path(shutil.copytree(sweep_folder, tmp_path / "out"))
    trained = {cell: (folder(out, *cell) / "metrics.jsonl").read_bytes() for cell in CELLS}
    evaluation = SMALL.evaluation.replace(lengths=(3,), loops=(1, 2))
    more = SMALL.replace(seeds=(0, 1, 2), evaluation=evaluation, show={"exact_match": "loop"})
    result = run_sweep(more, out, progress=False)
    assert result.data["length"].values.tolist() == [3]
    assert result.data["n_seeds"].values.tolist() == [3, 3]
    assert {cell: (folder(out, *cell) / "metrics.jsonl").read_bytes() for cell in CELLS} == trained
    assert {t["name"] for t in result.figures()[0].plot.to_dict()["data"]} == {"base", "no noise"}


def test_a_damaged_result_is_made_again(sweep_folder: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(sweep_folder, tmp_path / "out"))
    (folder(out, "base", 1) / RESULT).write_bytes(b"half")
    run_sweep(SMALL, out, progress=False)
    assert _table(out) == _table(sweep_folder)
    (folder(out, "base", 1) / "config.json").write_text("{")
    assert list(run_sweep(SMALL, out, progress=False).failed) == ["base, seed 1"]


def test_a_folder_of_another_sweep_and_wrong_options_are_refused(sweep_folder: Path) -> None:
    before = _table(sweep_folder)
    with naming("batch_size", ConfigError):
        run_sweep(SMALL.replace(set=("batch_size=2",)), sweep_folder, progress=False)
    with naming("setting"):
        run_sweep(SMALL, sweep_folder, only=["none"], progress=False)
    with naming("jobs"):
        run_sweep(SMALL, sweep_folder, jobs=0, progress=False)
    with naming("options"):
        run_sweep(SMALL, sweep_folder, options={"timeout_min": 3}, progress=False)
    assert _table(sweep_folder) == before


def _table(out: Path) -> str:
    return (out / "sweep.csv").read_text()


def _written(out: Path, cell: tuple[str, int]) -> int:
    return (folder(out, *cell) / RESULT).stat().st_mtime_ns


def _wait_for(path: Path) -> None:
    end = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.002)


@pytest.fixture
def cell(tmp_path: Path) -> SweepCell:
    config = SMALL.config_of("base", 1)
    coords = SMALL.evaluation.coords(config.make_task())
    return SweepCell("base", 1, tmp_path / "cell", config, SMALL.evaluation, coords)


def test_it_is_a_run_with_its_result_and_how_it_was_made(cell: SweepCell) -> None:
    assert cell.result() is None
    assert run_cell(pickle.loads(pickle.dumps(cell))) is None
    result = cell.result()
    assert result is not None and result.provenance.run and result.trained_up_to == 3
    assert result.data.identical(load_result(cell.folder / RESULT).data)
    assert "loopinterp train --config" in (cell.folder / "made.json").read_text()


def test_a_result_of_other_questions_or_weights_does_not_count(cell: SweepCell) -> None:
    run_cell(cell)
    for changes in ({"samples": 7}, {"seed": 1}):
        evaluation = cell.evaluation.replace(**changes)
        assert dataclasses.replace(cell, evaluation=evaluation).result() is None
    assert dataclasses.replace(cell, coords={**cell.coords, "length": [2]}).result() is None
    assert dataclasses.replace(cell, coords={**cell.coords, "loop": [2]}).result() is None
    other = dataclasses.replace(cell, seed=0, folder=cell.folder.parent / "other")
    other = dataclasses.replace(other, config=cell.config.replace(seed=0))
    run_cell(other)
    (cell.folder / RESULT).write_bytes((other.folder / RESULT).read_bytes())
    assert other.result() is not None and cell.result() is None


def test_whoever_comes_second_waits_and_finds_it_done(
    cell: SweepCell, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_cell(cell)
    saved = []
    monkeypatch.setattr(Result, "save", lambda *_: saved.append(1))
    monkeypatch.setattr(sweep, "train", lambda *_, **__: saved.append(1))
    with in_turn(cell.folder / "state"):
        second = threading.Thread(target=run_cell, args=(cell,))
        second.start()
        second.join(0.2)
        assert second.is_alive(), "it waits"
    second.join(30)
    assert not second.is_alive() and not saved


@pytest.mark.parametrize("jobs", [1, 2])
def test_every_cell_is_worked_on_once(jobs: int) -> None:
    done = list(_in_processes(lambda cell: f"of {cell}" if cell % 2 else "", [5, 6, 7], jobs=jobs))
    assert sorted(done) == [(0, "of 5"), (1, ""), (2, "of 7")]


def test_a_killed_process_is_one_failed_cell() -> None:
    def work(cell: int) -> str:
        if cell == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return ""

    done = dict(_in_processes(work, [0, 1, 2], jobs=2))
    reason = done.pop(1)
    assert reason is not None and "killed" in reason
    assert done == {0: "", 2: ""}


class Job:
    def __init__(self, work: Any, cell: Any) -> None:
        self._work, self._cell = work, cell

    def result(self) -> str:
        if self._cell == "lost":
            raise RuntimeError("Job 3 was lost\nnode down")
        return self._work(self._cell)


class Executor:
    """submitit's executor, as far as it is used; its jobs run when their result is asked for."""

    parameters: dict[str, Any]

    def __init__(self, folder: Path, cluster: str) -> None:
        if cluster != "slurm":
            raise ValueError(f"AutoExecutor doesn't know any executor named {cluster!r}")

    def update_parameters(self, **parameters: Any) -> None:
        Executor.parameters = parameters

    def map_array(self, work: Any, cells: Any) -> list[Job]:
        Executor.work = work
        return [Job(work, cell) for cell in cells]


@pytest.fixture
def submitit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in; whatever is installed, no job leaves this machine."""
    fake, helpers = types.ModuleType("submitit"), types.ModuleType("submitit.helpers")
    fake.AutoExecutor, fake.helpers = Executor, helpers  # type: ignore[attr-defined]
    helpers.as_completed = lambda jobs: reversed(jobs)  # type: ignore[attr-defined]
    helpers.DelayedSubmission = lambda *call: call  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "submitit", fake)
    monkeypatch.setitem(sys.modules, "submitit.helpers", helpers)


def work_of(cell: str) -> str:
    return {"bad": "it is bad"}.get(cell, "")


@pytest.mark.usefixtures("submitit")
def test_cells_are_jobs_of_one_array(tmp_path: Path) -> None:
    options: dict[str, Any] = {"cluster": "slurm", "folder": tmp_path, "jobs": 4}
    cells = ["good", "bad", "lost"]
    done = list(_on_cluster(work_of, cells, **options, options={"timeout_min": 60}))
    (lost, error), *others = done
    assert lost == 2 and error is not None and error.endswith("node down")
    assert others == [(1, "it is bad"), (0, "")]
    parameters = {"name": "loopinterp-sweep", "slurm_array_parallelism": 4, "timeout_min": 60}
    assert Executor.parameters == parameters
    again, cell = Executor.work.checkpoint("bad")
    # A job that is taken away goes on in another.
    assert again(cell) == "it is bad"
    options["cluster"] = "slum"
    with naming("cluster 'slum'"):
        list(_on_cluster(work_of, cells, **options, options={}))


def test_without_submitit_it_is_said_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "submitit", None)
    with naming("cluster"):
        list(_on_cluster(work_of, [], cluster="slurm", folder=tmp_path, jobs=None, options={}))


if find_spec("submitit"):  # an extra, which few machines have

    def test_submitit_itself_runs_them(tmp_path: Path) -> None:
        kind: dict[str, Any] = {
            "cluster": "local",
            "folder": tmp_path,
            "jobs": 1,
            "options": {"timeout_min": 5},
        }
        assert dict(_on_cluster(work_of, ["good", "bad"], **kind)) == {0: "", 1: "it is bad"}
