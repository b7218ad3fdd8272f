"""The demo as a user runs it, on a model that is trained for seconds only."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from loopinterp.app.catalogue import STUDIES
from loopinterp.core.results import load_result, result_files
from tests.pages.test_report import Reader
from tests.warm_python import WarmPython

ROOT = Path(__file__).resolve().parent.parent.parent
COMMAND = ["-m", "loopinterp"]
SMALL = ["steps=80", "checkpoint_every=10", "curriculum.max_n=3", "model.d_model=32"]
SETTINGS = [part for setting in SMALL for part in ("--set", setting)]


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
def test_the_demo_ends_in_a_report_with_every_study(
    tmp_path: Path, warm_python: WarmPython
) -> None:
    out = tmp_path / "demo"
    command = [*COMMAND, "demo", "--out", str(out), "--seed", "1", *SETTINGS, "--json"]
    done = warm_python.run(*command, env=environment())
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr

    document = json.loads(done.stdout)
    assert document["report"] == str(out / "report.html")
    assert document["findings"][0]["kind"] == "verdict"
    finite = document["finite_findings"][0]
    assert finite["kind"] == "verdict" and finite["good"] is True
    algorithm = "ripple"
    assert finite["value"] == algorithm
    comparison = (out / "comparison.html").read_text()
    assert document["comparison"] == str(out / "comparison.html")
    assert algorithm in comparison
    assert Path(document["finite_report"]).read_text().count(algorithm) > 1
    record = json.loads((out / "made.json").read_text())
    # So small a model may have no state whose interchange changes an answer.
    skipped = record.get("unsaid", {})
    assert set(skipped) <= {"subspaces"}
    named = {"generalisation", *(study.name for study in STUDIES)} - set(skipped)
    results = {path.stem: load_result(path) for path in result_files(out / "results")}
    assert set(results) == named
    assert {result.provenance.seed for result in results.values()} <= {0, 1}

    report = (out / "report.html").read_text()
    for word in ("--seed 1", "steps=80", *(name for name in ("generalisation", "wavefront"))):
        assert word in report
    # The rest is there when it is asked for.
    assert len(Reader(report).unfolded) <= 1000
    assert set(record["stages"]) == {"train", *named}
    assert all(name in done.stderr for name in ("train:", *(f"{name}:" for name in named)))


@pytest.mark.slow
def test_a_training_killed_on_the_way_goes_on_with_the_same_command(
    tmp_path: Path, warm_python: WarmPython
) -> None:
    def train(out: Path) -> list[str]:
        return [*COMMAND, "train", "--task", "addition", *SETTINGS, "--out", str(out)]

    uninterrupted, killed = tmp_path / "whole", tmp_path / "killed"
    warm_python.run(*train(uninterrupted), env=environment()).check_returncode()
    command = [sys.executable, *train(killed)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment()) as process:
        while not (killed / "state" / "checkpoint.safetensors").exists():
            assert process.poll() is None  # else it ended before its first checkpoint
        process.send_signal(signal.SIGKILL)
    warm_python.run(*train(killed), env=environment()).check_returncode()
    for name in ("metrics.jsonl", "model/model.safetensors", "config.json"):
        assert (killed / name).read_bytes() == (uninterrupted / name).read_bytes()
