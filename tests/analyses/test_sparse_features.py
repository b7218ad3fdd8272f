"""The page says what the files say; a small run fills every table."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from analyses import sparse_features
from analyses.sparse_features import FILES, MODELS, PAGE, SEEDS, as_tables, results, rows_of
from analyses.tables_in_pages import PAGES, RESULTS, put

STORED: Any = [pd.read_csv(RESULTS / file) for file in FILES]


def test_the_page_says_what_the_files_say() -> None:
    text = (PAGES / PAGE).read_text()
    assert put(text, as_tables(*STORED)) == text


def test_every_model_seed_and_dictionary_is_there_once() -> None:
    features, splices, across = STORED
    expected = {(studied.name, seed) for studied in MODELS for seed in SEEDS}
    for frame in STORED:
        assert {*frame[["model", "seed"]].itertuples(index=False, name=None)} == expected
    assert not features.duplicated(["model", "seed"]).any()
    assert not splices.duplicated(["model", "seed", "dictionary", "loop"]).any()
    assert not across.duplicated(["model", "seed", "trained_loop", "loop"]).any()


def test_a_small_run_fills_every_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_features, "N_PROMPTS", 16)
    monkeypatch.setattr(sparse_features, "N_EXAMPLES", 8)
    studied = MODELS[0]
    sizes = {"n_features": 16, "steps": 2, "batch_size": 8}
    parts = [
        rows_of(studied.name, seed, result) for seed, result in zip(SEEDS, results(studied, sizes))
    ]
    tables = as_tables(*(pd.concat(frames) for frames in zip(*parts)))
    rows = {name: len(text.splitlines()) - 2 for name, text in tables.items()}
    assert rows == {"feature-loops": len(SEEDS), "feature-splices": 5, "feature-across": 3}
