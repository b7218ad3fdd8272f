"""What training tells a tracker is what stands in metrics.jsonl."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from loopinterp.core.errors import InputError
from loopinterp.training import Run, log_to, train
from tests.training.tiny_run import TINY

NAMES = ["loss", "exact_match", "longest_n", "lr", "grad_norm"]


class Kept:
    """A run of wandb or trackio: ``log(values, step=)``."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, float]] = {}

    def log(self, values: dict[str, float], step: int | None = None) -> None:
        assert step is not None
        self.rows[step] = values


class Writer:
    """A SummaryWriter: ``add_scalar(tag, value, global_step)``."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, float]] = {}

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.rows.setdefault(global_step, {})[tag] = scalar_value


@pytest.mark.parametrize("tracker", [Kept, Writer])
def test_each_line_of_metrics_is_told_once(tracker: Callable[[], Any], tmp_path: Path) -> None:
    there = tracker()
    run = train(TINY, tmp_path / "run", progress=False, on_log=log_to(there))
    table = run.metrics().set_index("step")
    assert [*there.rows] == table.index.tolist() == list(range(2, 25, 2))
    for step, values in there.rows.items():
        assert values == table.loc[step].to_dict() and [*values] == NAMES
    assert Run.load(tmp_path / "run").finished


def test_a_run_that_its_tracker_ended_resumes(tmp_path: Path) -> None:
    """With the numbers of one without a tracker."""
    whole = train(TINY, tmp_path / "whole", progress=False).metrics()
    steps: list[int] = []

    def fail(step: int, values: Mapping[str, float]) -> None:
        steps.append(step)
        if step == 14:
            raise ConnectionError

    with pytest.raises(ConnectionError):
        train(TINY, tmp_path / "run", progress=False, on_log=fail)
    resumed = train(
        TINY, tmp_path / "run", progress=False, on_log=lambda step, _: steps.append(step)
    )
    assert resumed.metrics().equals(whole)
    # The last checkpoint before step 14 is that of step 10.
    assert steps == [2, 4, 6, 8, 10, 12, 14, 12, 14, 16, 18, 20, 22, 24]


def test_what_keeps_no_numbers_is_refused() -> None:
    with pytest.raises(InputError) as caught:
        log_to(object())
    assert caught.value.what == "run"
