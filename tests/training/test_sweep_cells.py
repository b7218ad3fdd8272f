"""A cell is a run that is trained and evaluated once, whoever else works on it."""

from __future__ import annotations

import dataclasses
import pickle
import threading
from pathlib import Path

import pytest

from loopinterp.file_locks import in_turn
from loopinterp.results import Result
from loopinterp.saved_results import load_result
from loopinterp.training import sweep_cells
from loopinterp.training.sweep_cells import RESULT, SweepCell, run_cell
from tests.training.small_sweep import SMALL


@pytest.fixture
def cell(tmp_path: Path) -> SweepCell:
    config = SMALL.config_of("base", 1)
    coords = SMALL.evaluation.coords(config.make_task())
    return SweepCell("base", 1, tmp_path / "cell", config, SMALL.evaluation, coords)


def test_it_is_a_run_with_its_result_and_how_it_was_made(cell: SweepCell) -> None:
    assert cell.result() is None
    assert run_cell(pickle.loads(pickle.dumps(cell))) == ""
    found = cell.result()
    assert found is not None and found.provenance.run and found.trained_up_to == 3
    assert found.data.identical(load_result(cell.folder / RESULT).data)
    assert "loopinterp train --config" in (cell.folder / "made.json").read_text()


def test_a_result_of_other_questions_or_weights_does_not_count(cell: SweepCell) -> None:
    run_cell(cell)
    for changes in ({"samples": 7}, {"seed": 1}):
        evaluation = cell.evaluation.replace(**changes)
        assert dataclasses.replace(cell, evaluation=evaluation).result() is None
    assert dataclasses.replace(cell, coords={**cell.coords, "length": [2]}).result() is None
    assert dataclasses.replace(cell, coords={**cell.coords, "loop": [2]}).result() is None
    other = dataclasses.replace(cell, seed=0, folder=cell.folder.parent / "other")
    other = dataclasses.replace(other, config=cell.config.replace(seed=0))
    run_cell(other)
    (cell.folder / RESULT).write_bytes((other.folder / RESULT).read_bytes())
    assert other.result() is not None and cell.result() is None


def test_whoever_comes_second_waits_and_finds_it_done(
    cell: SweepCell, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_cell(cell)
    saved = []
    monkeypatch.setattr(Result, "save", lambda *_: saved.append(1))
    monkeypatch.setattr(sweep_cells, "train", lambda *_, **__: saved.append(1))
    with in_turn(cell.folder / "state"):
        second = threading.Thread(target=run_cell, args=(cell,))
        second.start()
        second.join(0.2)
        assert second.is_alive(), "it waits"
    second.join(30)
    assert not second.is_alive() and not saved
