"""Asks another tool, in its own Python: ``answer`` of a test's file runs there, the test here.

``make peers`` makes the environments, on top of ours: each has the packages of NAME.txt, whose
versions come before those of ours.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
ANSWER = "answer.pt"


def ask(environment: str, test: str, folder: Path, *arguments: str) -> Any:
    """What ``answer(folder, *arguments)`` of a test's file returns in another environment."""
    python = ROOT / "build" / "peers" / environment / "bin" / "python"
    if not python.exists():
        pytest.skip("the tool is not installed; run: make peers")
    module = test.rpartition(".")[2]
    command = [str(python), "-W", "ignore", __file__, module, str(folder)]
    ran = subprocess.run(
        [*command, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    return torch.load(folder / ANSWER, weights_only=True)


if __name__ == "__main__":
    tests: Any = types.ModuleType("tests")  # some tools install a package of this name
    tests.__path__, sys.modules["tests"] = [str(ROOT / "tests")], tests
    asked = importlib.import_module(f"tests.peers.{sys.argv[1]}")
    torch.save(asked.answer(Path(sys.argv[2]), *sys.argv[3:]), Path(sys.argv[2]) / ANSWER)
