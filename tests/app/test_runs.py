"""How runs that no training of their own made are noted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loopinterp import training
from loopinterp.app.runs import compile_run, train_finite_run
from loopinterp.core.errors import InputError
from loopinterp.core.run_files import MADE
from loopinterp.training import FiniteStage, Run
from tests.training.tiny_run import TINY


def test_a_model_whose_start_was_chosen_is_made_by_all_stages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = TINY.replace(steps=2)
    first = training.train(config, tmp_path / "bits-1", progress=False)
    chosen = Run.from_model(
        first.model(), first.task, tmp_path / "chosen", max_n=2, origin="trained elsewhere"
    )
    stages = [
        FiniteStage(1, first, True, {2: 1.0}),
        FiniteStage(1, chosen, True, {2: 1.0}, chosen_start=True),
    ]
    monkeypatch.setattr(training, "train_finite", lambda *args, **options: stages)
    train_finite_run(config, tmp_path)
    notes = [json.loads((stage.run.folder / MADE).read_text()) for stage in stages]
    assert [f"{first.folder / 'config.json'}" in note["command"] for note in notes] == [True, True]
    assert ["--drop-bits" in note["command"] for note in notes] == [False, True]
    assert "train" in notes[0]["stages"] and not notes[1]["stages"]


def test_a_length_that_no_model_has_room_for_is_named_as_given(tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        compile_run("ripple", tmp_path / "long", max_length=100_000)
    assert error.value.what == "max_length" and "100000" in error.value.given
