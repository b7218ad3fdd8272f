"""The page says what the file says, and what it claims of the best score holds in every row."""

from __future__ import annotations

import pandas as pd
import pytest

from analyses.edge_recovery import FILE, KEY, PAGE, PAIRS, SCORES, cells, measured, tables
from analyses.tables_in_pages import PAGES, RESULTS, put

STORED = pd.read_csv(RESULTS / FILE)


def test_the_page_says_what_the_file_says() -> None:
    text = (PAGES / PAGE).read_text()
    assert put(text, tables(STORED)) == text


def test_every_model_is_there_once_with_every_score() -> None:
    columns = [*KEY, "graph", "truth", "by", "score"]
    assert not STORED.duplicated(columns).any()
    assert {*STORED[KEY].itertuples(index=False, name=None)} == {*cells()}
    assert {*STORED["score"]} == {*SCORES}


def test_the_best_score_finds_the_tied_edges_of_every_model() -> None:
    full = STORED[STORED["pairs"] == PAIRS]
    tied = full.query("graph == 'tied' and truth == 'program' and by == 'size'")
    lowest = tied.groupby("score")["auroc"].min()
    assert lowest.idxmax() == "edge_ig" and lowest["edge_ig"] >= 0.95
    # Pruning keeps edges of the program and of wiping, and no others.
    assert (full["pruned"] == full["pruned_program"] + full["pruned_wiping"]).all()


@pytest.mark.slow
def test_a_model_is_measured() -> None:
    rows = pd.DataFrame(measured("prefix_xor", "bare", 4))
    best = rows.query("score == 'edge_ig' and graph == 'tied' and truth == 'program'")
    assert (best["auroc"] == 1).all() and best["n_true"].iloc[0] == 4
