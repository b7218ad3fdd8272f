"""The page says what the file says; what was read off a known model is never another program."""

from __future__ import annotations

import pandas as pd
import pytest

from analyses.decompiled_models import (
    FILE,
    KEY,
    PAGE,
    TO_IT,
    UNEXPLAINED,
    cells,
    cells_left,
    measured,
    tables,
)
from analyses.tables_in_pages import PAGES, RESULTS, put

STORED, LEFT = (pd.read_csv(RESULTS / file) for file in (FILE, UNEXPLAINED))


def test_the_page_says_what_the_file_says() -> None:
    text = (PAGES / PAGE).read_text()
    assert put(text, tables(STORED) | {"decompiled-unexplained": cells_left(LEFT)}) == text


def test_what_is_kept_is_of_models_that_there_are() -> None:
    assert not STORED.duplicated(KEY).any()
    assert {*STORED[KEY].itertuples(index=False, name=None)} <= {*cells()}


def test_no_known_model_is_given_another_program() -> None:
    known = STORED[~STORED["kind"].isin(["trained", TO_IT])]
    assert {*known["outcome"]} <= {"equivalent", "not decompiled"}
    assert (known["outcome"] == "equivalent").sum() >= 48
    assert known.loc[known["outcome"] == "not decompiled", "reason"].str.len().min() > 0


def test_most_models_that_were_trained_to_a_program_give_it_back() -> None:
    to_circuit = STORED[STORED["kind"] == TO_IT]
    assert len(to_circuit) == 12
    assert (to_circuit["outcome"] == "equivalent").mean() >= 0.8


def test_no_program_is_claimed_to_be_exact_that_is_another() -> None:
    compiled = STORED[(STORED["kind"] != "trained") & STORED["claim"].notna()]
    assert {*compiled.loc[compiled["claim"] == "exact", "outcome"]} == {"equivalent"}
    assert {*compiled.loc[compiled["outcome"] == "not decompiled", "claim"]} <= {"none"}
    assert (compiled["claim"] == "exact").sum() >= 48


def test_every_trained_model_says_where_its_runs_leave_the_table() -> None:
    trained = STORED[(STORED["kind"] == "trained") & (STORED["cells"] > 0)]
    assert {*trained[trained["whole trajectory"] < 0.999]["model"]} == {*LEFT["model"]}
    assert (LEFT["exits"] >= 1).all() and (LEFT["exits"] <= LEFT["steps"]).all()
    assert LEFT["otherwise"].between(0, 1).all()
    assert not LEFT.duplicated(["model", "left", "left_value", "token", "value"]).any()


@pytest.mark.slow
def test_a_model_is_measured() -> None:
    row, unexplained = measured("known", "prefix_xor", "rotated, permuted")
    assert not len(unexplained)  # its values are sharp
    assert (row["outcome"], row["reason"], row["whole trajectory"]) == ("equivalent", "", 1.0)
    assert "shift_right" in row["code"]
