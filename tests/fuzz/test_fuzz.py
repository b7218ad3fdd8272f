"""A part of what `make fuzz` does, and that the fuzz itself finds what it looks for."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from loopinterp import cli
from tests.fuzz import harness
from tests.fuzz.harness import Answer, Bench
from tests.warm_python import WarmPython

ROOT = Path(__file__).parents[2]


def test_nothing_is_found_in_the_first_cases(warm_python: WarmPython) -> None:
    command = ["-m", "tests.fuzz", "--cases", "30", "--seed", "0"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = warm_python.run(*command, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "30 cases in " in done.stdout and " 0 findings" in done.stdout


@pytest.mark.parametrize(
    ("err", "fault"),
    [
        ("Error: seed: expected an integer, got x. Pass 0.\n", ""),
        ("Usage: loopinterp\nError: No such command 'x'.\n", ""),
        ("Error: it went wrong\n", "not all in"),
        ("Error: a: expected b, got c. Do d.\nError: again\n", "2 messages"),
        ("Traceback (most recent call last):\n", "0 messages"),
    ],
)
def test_a_message_has_all_three_parts(err: str, fault: str) -> None:
    found = harness._said_well(Answer(2, "", err))
    assert (fault in found) if fault else not found
    assert "exit 1" in harness._said_well(Answer(1, "", err))


def test_what_is_changed_or_left_behind_is_seen(tmp_path: Path) -> None:
    mine = harness._users_files(tmp_path / "mine", random.Random(0))
    (tmp_path / "run").mkdir()
    before = harness._contents(tmp_path)
    (mine / "notes.txt").write_text("other")
    (mine / "link").unlink()
    (mine / ".notes.txt.x").write_text("")
    (tmp_path / "run" / "made.json").write_text("{}")
    fault = harness._kept(before, harness._contents(tmp_path), tmp_path / "run", 0)
    assert sorted(fault.split("; ")) == [
        "changed: mine/link",
        "changed: mine/notes.txt",
        "left: mine/.notes.txt.x",
    ]


def test_crashes_hangs_and_wrong_numbers_are_findings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path)
    number = next(n for n in range(99) if bench.case(0, n).kind == "words")
    monkeypatch.setattr(harness, "LIMIT", 0.2)
    monkeypatch.setattr(cli, "main", lambda words: time.sleep(5))
    assert bench.case(0, number).ended == "hang"
    monkeypatch.setattr(cli, "main", lambda words: 1 / 0)
    assert "ZeroDivisionError" in bench.case(0, number).fault
    said = Answer(0, '{"cells": []}', "")
    run = tmp_path / "whole" / "compiled"
    assert "other numbers" in bench._same("evaluate", run, tmp_path, said, damaged="x")
