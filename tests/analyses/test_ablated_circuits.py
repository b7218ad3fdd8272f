"""The page says what the file says; parts are judged as circuits say, or the page says why not."""

from __future__ import annotations

from typing import Any

import pandas as pd

from analyses.ablated_circuits import FILE, PAGE, tables
from analyses.tables_in_pages import PAGES, RESULTS, put
from loopinterp.benchmark import benchmark_models

STORED: Any = pd.read_csv(RESULTS / FILE)


def test_the_page_says_what_the_file_says() -> None:
    text = (PAGES / PAGE).read_text()
    assert put(text, tables(STORED)) == text


def test_every_model_is_there_with_each_part_once() -> None:
    assert {*STORED["model"]} == {m.name for m in benchmark_models()}
    assert not STORED.duplicated(["model", "part", "ablation"]).any()
    assert STORED.groupby(["model", "part"])["ablation"].nunique().eq(3).all()


def test_no_part_that_the_circuit_leaves_out_is_called_needed() -> None:
    assert not ((STORED["need"] == "needed") & ~STORED["used"]).any()


def test_what_is_judged_otherwise_is_the_part_that_the_page_explains() -> None:
    wrong = STORED[~STORED["right"]]
    assert {*wrong[["program", "part"]].itertuples(index=False, name=None)} <= {
        ("binary_sum", "MLP 0")
    }
