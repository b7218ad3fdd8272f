"""What is written of the models that were trained to a circuit is what ships."""

from __future__ import annotations

import pandas as pd

from analyses.tables_in_pages import PAGES, RESULTS, put
from analyses.trained_circuits import FILE, NEEDED, PAGE, PROGRAMS, measured, tables
from loopinterp.benchmark import TRAINED, benchmark_models

STORED = pd.read_csv(RESULTS / FILE)


def test_the_page_says_what_the_file_says() -> None:
    text = (PAGES / PAGE).read_text()
    assert put(text, tables(STORED)) == text


def test_what_ships_is_what_was_good_enough() -> None:
    assert {*STORED["program"]} == {*PROGRAMS}
    good = STORED[(STORED[["lowest", "whole", "states"]] >= NEEDED).all(axis=1)]
    shipped = {m.program_name for m in benchmark_models() if m.disguise == TRAINED}
    assert {*good["program"]} == {*STORED[STORED["kept"]]["program"]} == shipped


def test_a_model_is_measured_as_it_was() -> None:
    (about,) = benchmark_models(["prefix_xor.trained"])
    scores, row = measured(about.compiled), STORED.set_index("program").loc["prefix_xor"]
    assert scores["states_runs"] == row["states_runs"]
    assert scores["kept"] and scores["lowest"] >= NEEDED
