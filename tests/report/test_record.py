from __future__ import annotations

from pathlib import Path

import pytest

from loopinterp.errors import InputError
from loopinterp.report import read_run
from tests.report import synthetic


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with synthetic.loadable():
        return synthetic.write_run(tmp_path / "run")


def test_a_run_is_read_whole(run: Path) -> None:
    with synthetic.loadable():
        record = read_run(run)
    assert record.name == "run"
    assert list(record.results) == sorted(record.results)
    assert set(record.results) == {
        "attention",
        "convergence",
        "generalisation",
        "program",
        "wavefront",
    }
    assert record.config["seed"] == 0 and record.metrics[0]["step"] == 0
    assert record.made["command"].startswith("loopinterp demo")
    assert record.problems == []


def test_a_damaged_result_is_a_problem_and_the_others_are_read(run: Path) -> None:
    (run / "results" / "wavefront.json").write_text("{")
    with synthetic.loadable():
        record = read_run(run)
    assert "wavefront" not in record.results and "convergence" in record.results
    (problem,) = record.problems
    assert problem.startswith("wavefront.json cannot be read") and "Restore the file" in problem
    assert str(run) not in problem  # a report is passed on: it names no folder of this machine


def test_a_damaged_line_of_metrics_is_a_problem(run: Path) -> None:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 99']))
    with synthetic.loadable():
        record = read_run(run)
    assert len(record.metrics) == len(lines)
    assert record.problems == [f"Line {len(lines) + 1} of metrics.jsonl is damaged and left out."]


def test_a_run_without_analyses_is_a_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    record = read_run(tmp_path)
    assert not record.results and not record.metrics and not record.made


@pytest.mark.parametrize("there", [True, False])
def test_what_is_no_run_is_refused(tmp_path: Path, there: bool) -> None:
    folder = tmp_path if there else tmp_path / "absent"
    with pytest.raises(InputError, match=r"without config\.json" if there else "no such folder"):
        read_run(folder)
