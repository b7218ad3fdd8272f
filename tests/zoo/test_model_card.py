"""A card: what is measured of a run, and what it says in words."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import loopinterp
from loopinterp.core.errors import ConfigError
from loopinterp.models import LoopedTransformer, LoopedTransformerConfig
from loopinterp.tasks import Sudoku
from loopinterp.training import Run, evaluate
from loopinterp.training.run import RunFault
from loopinterp.zoo import Card, get_card, make_entry
from loopinterp.zoo.pretrained import Failure, measure_card
from tests.refusals import naming
from tests.training.tiny_run import refused

FAILING = {
    "uniform": {12: {0: 1.0, 6: 1.0, 12: 0.8}, 24: {0: 0.95, 6: 0.5, 12: 0.2}},
    "chain": {12: {0: 0.9, 6: 0.9, 12: 0.9}, 24: {0: 0.3, 6: 0.0, 12: 0.0}},
}


def test_an_entry_is_measured_and_moved_whole(barely_trained: Path, tmp_path: Path) -> None:
    run = Run.load(barely_trained)
    card = make_entry(run, tmp_path / "entry", recipe="addition", note="Small.", samples=16, seed=3)
    entry = Run.load(tmp_path / "entry")
    assert entry.config == run.config
    assert len(entry.metrics()) == len(run.metrics()) == 6
    assert Card.from_dict(json.loads((tmp_path / "entry" / "card.json").read_text())) == card
    assert card.changes == {
        "model.d_model": 32, "model.n_heads": 2, "curriculum.max_n": 3, "steps": 60
    }  # fmt: skip
    assert set(card.exact_match) == {"propagate", "uniform", "chain"}
    assert set(card.exact_match["chain"]) == {3, 6, 12, 24}
    for model in (run.model(), entry.model()):
        cell = evaluate(
            model, run.task, [6], distributions=["chain"], extra_loops=[6], n_samples=16, seed=3
        )
        share = float(cell.data["exact_match"].sel(estimate="value").squeeze())
        assert share == card.exact_match["chain"][6][6]
    table = card.table()
    assert table.loc[("chain", 6), 6] == card.exact_match["chain"][6][6]
    assert table.shape == (12, 7)


def test_only_a_finished_run_of_training_becomes_an_entry(
    barely_trained: Path, tmp_path: Path
) -> None:
    make: dict[str, Any] = {"recipe": "addition", "note": "Small.", "samples": 4}
    run = Run.load(barely_trained)
    with refused(RunFault.TAKEN):
        make_entry(run, barely_trained, **make)
    with naming("output .*"):
        make_entry(run, Path(loopinterp.__file__).parent / "zoo" / "new", **make)
    with naming("recipe"):
        make_entry(run, tmp_path / "new", recipe="additon", note="Small.")
    unfinished = Path(shutil.copytree(barely_trained, tmp_path / "unfinished"))
    shutil.rmtree(unfinished / "state")
    with naming("run .*"):
        make_entry(Run.load(unfinished), tmp_path / "new", **make)
    model = LoopedTransformer(run.model().config)
    run_of_model = Run.from_model(model, run.task, tmp_path / "given", max_n=3, origin="given")
    with naming("run .*"):
        make_entry(run_of_model, tmp_path / "new", **make)
    with naming("recipe"):
        make_entry(run, tmp_path / "new", **{**make, "recipe": None})
    assert not (tmp_path / "new").exists()
    card = make_entry(run_of_model, tmp_path / "new", **{**make, "recipe": None})
    assert (card.recipe, card.minutes, card.changes) == (None, None, {})
    assert Run.load(tmp_path / "new").config == run_of_model.config


def test_a_card_says_where_it_fails_and_how_long_an_answer_lasts() -> None:
    values = get_card("addition").to_dict()
    card = Card.from_dict(values | {"exact_match": FAILING})
    assert card.fails_at() == [Failure("uniform", 24, 6, 0.5), Failure("chain", 24, 0, 0.3)]
    texts = [
        "uniform: exact match 0.50 at length 24, 6 loops after T(n)",
        "chain: exact match 0.30 at length 24",
    ]
    assert list(map(str, card.fails_at())) == texts
    assert card.worst() == {12: 0.9, 24: 0.3}
    assert card.worst(12) == {12: 0.8, 24: 0.0}
    assert card.lowest(24).distributions == ("chain",)
    assert card.lowest_table()["on"].tolist() == ["chain", "chain"]
    with pytest.raises(ConfigError, match="note"):
        Card.from_dict(values | {"note": ""})


def test_a_card_has_the_lengths_that_its_task_can_draw(tmp_path: Path) -> None:
    config = LoopedTransformerConfig(d_model=8, n_heads=2, d_vocab=5, d_vocab_out=5, causal=False)
    made = {"max_n": 6, "origin": "made for a test"}
    run = Run.from_model(LoopedTransformer(config), Sudoku(), tmp_path / "run", **made)
    exact = measure_card(run, samples=1, seed=0, distributions=["uniform"])
    assert [*exact["uniform"]] == [6, 12]  # not 24 and 48 blanks of 16 cells
