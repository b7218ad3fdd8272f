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
    stored, text = pd.read_csv(RESULTS / script.FILE), (PAGES / script.PAGE).read_text()
    assert put(text, {script.NAME: script.as_table(stored)}) == text, anew
    assert {*stored["model"]} == {*looped_models()}, anew


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
    written, stored = (pd.read_csv(folder / script.FILE) for folder in (tmp_path, RESULTS))
    others, before = (table.query("model != 'prefix_sum'") for table in (written, stored))
    pd.testing.assert_frame_equal(others.reset_index(drop=True), before.reset_index(drop=True))
    rows = written[written["model"] == "prefix_sum"]
    assert {*rows["samples"]} == {4} and {*rows["length"]} == {12}
    assert put(page.read_text(), {script.NAME: script.as_table(written)}) == page.read_text()
