"""What is kept of long additions is of the models that ship; what is there is not done again."""

from __future__ import annotations

import json
import multiprocessing
import sys
from pathlib import Path

import pandas as pd
import pytest

from analyses import long_addition
from analyses.long_addition import FILE, KEY, MODELS
from analyses.tables_in_pages import RESULTS
from loopinterp import zoo

STORED = pd.read_csv(RESULTS / FILE)


def test_what_is_kept_is_of_the_models_that_ship() -> None:
    assert not STORED.duplicated(KEY).any()
    for seed, name in MODELS.items():
        card = json.loads((Path(zoo.__file__).parent / name / "card.json").read_text())
        assert (card["recipe"], card["changes"].get("seed", card["seed"])) == ("addition", seed)
        rows = STORED.query("seed == @seed")
        assert {*rows["weights"]} == {card["weights_sha256"][:12]}
        assert {*rows["digits"]} == {"uniform", "chain"}


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_what_is_there_is_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(long_addition, "MODELS", {0: "addition"})
    monkeypatch.setattr(long_addition, "DIGITS", ("chain",))
    context, asked = multiprocessing.get_context("fork"), []  # which has everything imported
    monkeypatch.setattr(multiprocessing, "get_context", lambda how: asked.append(how) or context)
    small = ["--length", "6", "--samples", "4", "--results", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["long_addition", *small])
    long_addition.main()
    (row,) = pd.read_csv(tmp_path / FILE).to_dict("records")
    assert (row["length"], row["samples"], row["exact_match"]) == (6, 4, 1.0)
    assert row["megabytes"] > 100 and capsys.readouterr().out
    long_addition.main()
    assert not capsys.readouterr().out
    assert asked == ["spawn"]  # what was measured before takes none of the memory
