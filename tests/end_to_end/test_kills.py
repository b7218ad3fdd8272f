"""Processes killed with SIGKILL again and again leave whole runs; ``kills.py`` says how."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.kills import kill_at_random


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
# A kill between checkpoint and model leaves the older model, which is said.
@pytest.mark.filterwarnings("ignore::loopinterp.training.run.OlderWeightsWarning")
def test_nothing_is_lost_and_no_result_mixes_runs(tmp_path: Path) -> None:
    done = kill_at_random(tmp_path, 10, in_the_middle=3)
    assert done.in_the_middle >= 3 and len(done.kills) >= 3
