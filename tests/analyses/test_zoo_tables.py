"""The tables of every model of the zoo: what their pages say, and one model measured anew."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from types import ModuleType

import pandas as pd
import pytest

from analyses import settled_but_wrong, state_geometry, stopping_rules
from analyses.tables_in_pages import PAGES, RESULTS, put
from analyses.zoo_tables import looped_models

SCRIPTS = [settled_but_wrong, state_geometry, stopping_rules]


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_page_says_what_the_file_says_of_every_model(script: ModuleType) -> None:
    anew = f"run python -m {script.__name__}"
    kept, text = pd.read_csv(RESULTS / script.FILE), (PAGES / script.PAGE).read_text()
    assert put(text, {script.NAME: script.as_table(kept)}) == text, anew
    assert {*kept["model"]} == {*looped_models()}, anew


@pytest.mark.parametrize("script", SCRIPTS)
def test_one_model_anew_leaves_the_others(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(RESULTS / script.FILE, tmp_path)
    page = Path(shutil.copy(PAGES / script.PAGE, tmp_path))
    small = ["--name", "prefix_sum", "--times", "1", "--samples", "4"]
    where = ["--results", str(tmp_path), "--page", str(page)]
    monkeypatch.setattr(sys, "argv", [script.__name__, *small, *where])
    script.main()
    made, kept = (pd.read_csv(folder / script.FILE) for folder in (tmp_path, RESULTS))
    others, before = (of.query("model != 'prefix_sum'") for of in (made, kept))
    pd.testing.assert_frame_equal(others.reset_index(drop=True), before.reset_index(drop=True))
    own = made[made["model"] == "prefix_sum"]
    assert {*own["samples"]} == {4} and {*own["length"]} == {12}
    assert put(page.read_text(), {script.NAME: script.as_table(made)}) == page.read_text()
