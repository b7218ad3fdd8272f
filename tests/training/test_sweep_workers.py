"""Cells run in processes, and as jobs of a cluster behind submitit's interface."""

from __future__ import annotations

import os
import signal
import sys
import types
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from loopinterp.errors import InputError
from loopinterp.training.sweep_workers import in_processes, on_cluster


@pytest.mark.parametrize("jobs", [1, 2])
def test_every_cell_is_worked_on_once(jobs: int) -> None:
    done = list(in_processes(lambda cell: f"of {cell}" if cell % 2 else "", [5, 6, 7], jobs=jobs))
    assert sorted(done) == [(0, "of 5"), (1, ""), (2, "of 7")]


def test_a_killed_process_is_one_failed_cell() -> None:
    def work(cell: int) -> str:
        if cell == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return ""

    done = dict(in_processes(work, [0, 1, 2], jobs=2))
    assert done.pop(1).startswith("its process was killed") and done == {0: "", 2: ""}


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
    done = list(on_cluster(work_of, cells, **options, options={"timeout_min": 60}))
    assert done == [(2, "its job failed: node down"), (1, "it is bad"), (0, "")]
    wanted = {"name": "loopinterp-sweep", "slurm_array_parallelism": 4, "timeout_min": 60}
    assert Executor.parameters == wanted
    again, cell = Executor.work.checkpoint("bad")
    assert again(cell) == "it is bad", "a job that is taken away goes on in another"
    options["cluster"] = "slum"
    with pytest.raises(InputError, match="cluster 'slum': expected one that submitit has here"):
        list(on_cluster(work_of, cells, **options, options={}))


def test_without_submitit_it_is_said_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(InputError, match=r"pip install 'loopinterp\[cluster\]'"):
        list(on_cluster(work_of, [], cluster="slurm", folder=tmp_path, jobs=None, options={}))


if find_spec("submitit"):  # an extra, which few machines have

    def test_submitit_itself_runs_them(tmp_path: Path) -> None:
        kind: dict[str, Any] = {
            "cluster": "local",
            "folder": tmp_path,
            "jobs": 1,
            "options": {"timeout_min": 5},
        }
        assert dict(on_cluster(work_of, ["good", "bad"], **kind)) == {0: "", 1: "it is bad"}
