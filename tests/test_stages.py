"""How a run was made is kept, whatever was there before."""

from __future__ import annotations

from pathlib import Path

import pytest

from loopinterp.stages import MADE, record_how_it_was_made
from loopinterp.storage import read_json


def test_times_are_added_and_the_command_stays(tmp_path: Path) -> None:
    record_how_it_was_made(tmp_path, "make it", {"train": 2.0})
    record_how_it_was_made(tmp_path, None, {"heads": 1.0})
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
    record_how_it_was_made(tmp_path, None, {"heads": 1.0})
    assert read_json(tmp_path / MADE)["stages"] == {"heads": 1.0}
