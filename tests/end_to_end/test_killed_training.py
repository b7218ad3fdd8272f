"""A training that is killed, on a model that is trained for seconds only."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.warm_python import WarmPython

ROOT = Path(__file__).resolve().parent.parent.parent
COMMAND = ["-m", "loopinterp"]
SMALL = ["steps=20", "checkpoint_every=5", "curriculum.max_n=3", "model.d_model=16"]
SETTINGS = [part for setting in SMALL for part in ("--set", setting)]


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
def test_a_training_killed_on_the_way_goes_on_with_the_same_command(
    tmp_path: Path, warm_python: WarmPython
) -> None:
    def train(out: Path) -> list[str]:
        return [*COMMAND, "train", "--task", "addition", *SETTINGS, "--out", str(out)]

    uninterrupted, killed = tmp_path / "whole", tmp_path / "killed"
    warm_python.run(*train(uninterrupted), env=environment()).check_returncode()
    process = warm_python.start(train(killed), [os.devnull] * 2, env=environment())
    while not (killed / "state" / "checkpoint.safetensors").exists():
        assert process.poll() is None  # else it ended before its first checkpoint
        time.sleep(0.002)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    warm_python.run(*train(killed), env=environment()).check_returncode()
    for name in ("metrics.jsonl", "model/model.safetensors", "config.json"):
        assert (killed / name).read_bytes() == (uninterrupted / name).read_bytes()
