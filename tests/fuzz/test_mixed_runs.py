"""A part of the fuzz over folders with files of two runs, and that it finds what it looks for."""

from __future__ import annotations

import dataclasses

import pytest

from tests.fuzz.mixed_runs import MixedBench, _shown_of_others


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> MixedBench:
    return MixedBench(tmp_path_factory.mktemp("mixed"))


def test_nothing_is_found_in_the_first_folders(bench: MixedBench) -> None:
    found = [bench.case(0, number) for number in range(20)]
    assert [(what, fault) for what, _, fault in found if fault] == []


def test_numbers_of_another_run_are_seen(bench: MixedBench) -> None:
    mine, other = (bench.wholes[name].record for name in ("plain", "other seed"))
    assert _shown_of_others(mine, mine, "") == ""
    for name in ("metrics", "results", "made"):
        mixed = dataclasses.replace(mine, **{name: getattr(other, name)})
        assert _shown_of_others(mixed, mine, "")


def test_other_cells_are_seen(bench: MixedBench, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, other = bench.wholes["plain"], bench.wholes["other seed"]
    swapped = dataclasses.replace(mine, cells=[{"length": 0}], lens=["other"])
    monkeypatch.setitem(bench.by_hash, mine.owner.config, swapped)
    for command in ("evaluate", "lens"):
        assert bench._try(command, mine.folder)[1]
        assert not bench._try(command, other.folder)[1]
