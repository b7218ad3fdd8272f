"""How a run was made is kept, whatever was there before."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from loopinterp import stages
from loopinterp.stages import MADE, Stages, record_how_it_was_made
from loopinterp.storage import read_json, read_json_object


def test_times_are_added_and_the_command_stays(tmp_path: Path) -> None:
    record_how_it_was_made(tmp_path, command="make it", seconds={"train": 2.0})
    record_how_it_was_made(tmp_path, seconds={"heads": 1.0})
    made = read_json(tmp_path / MADE)
    assert made["command"] == "make it"
    assert made["stages"] == {"train": 2.0, "heads": 1.0}


@pytest.mark.parametrize(
    "text",
    ["[1]", "3", "null", "{", "1" * 5000, '{"stages": 3}', '{"stages": [["a", 1]]}'],
    ids=len,
)
def test_what_is_of_another_type_counts_as_absent(tmp_path: Path, text: str) -> None:
    (tmp_path / MADE).write_text(text)
    record_how_it_was_made(tmp_path, seconds={"heads": 1.0})
    assert read_json(tmp_path / MADE)["stages"] == {"heads": 1.0}


def test_of_two_commands_that_end_at_once_both_times_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slowly(path: Path) -> dict[str, Any]:
        time.sleep(0.02)
        return read_json_object(path)

    record_how_it_was_made(tmp_path)
    monkeypatch.setattr(stages, "read_json_object", slowly)
    names = ["generalisation", "heads", "attention", "explorer"]
    with ThreadPoolExecutor(len(names)) as pool:
        futures = [pool.submit(record_how_it_was_made, tmp_path, seconds={n: 1.0}) for n in names]
    assert all(future.result() is None for future in futures)
    assert set(read_json(tmp_path / MADE)["stages"]) == set(names)


def test_stages_that_were_done_before_one_that_failed_are_kept(tmp_path: Path) -> None:
    job = Stages(tmp_path, show=False)
    with job.stage("heads", "do they look where the programs look?"):
        pass
    job.unsaid("programs", "there is none")
    with pytest.raises(ZeroDivisionError), job.stage("attention", "where do they look?"):
        _ = 1 / 0
    made = read_json(tmp_path / MADE)
    assert set(made["stages"]) == {"heads"} and made["unsaid"] == {
        "programs": {"reason": "there is none"}
    }
