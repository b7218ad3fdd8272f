"""The script of the graph, by node's own test runner."""

from __future__ import annotations

import subprocess
from pathlib import Path


def test_the_script_passes_its_own_tests(node: str) -> None:
    tests = Path(__file__).with_name("circuit_script.test.js")
    done = subprocess.run([node, "--test", str(tests)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout
