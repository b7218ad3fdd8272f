"""Finite-state models of several seeds: which run one algorithm, and what the page says."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pandas as pd

from analyses import finite_models
from analyses.tables_in_pages import PAGES, RESULTS, put
from loopinterp.decompiler import Decompiled
from loopinterp.decompiler.exact_reading import Surroundings, tabulate_program
from loopinterp.programs import full, get_program
from loopinterp.tasks import get_task


def automaton(program):
    table = tabulate_program(program, Surroundings.of(get_task("addition"), (1, 2, 3)).pairs)
    assert table is not None
    return table[0]


def test_one_letter_for_what_differs_in_the_first_guess_alone() -> None:
    ripple, held_2 = (automaton(get_program(name)) for name in ("ripple", "ripple_held_2"))
    guessing = automaton(replace(get_program("ripple"), prepare={"carry": full(1)}))
    letters = finite_models.letters("addition-finite", [held_2, None, ripple, guessing, held_2])
    assert letters == ["A", "", "B", "B", "A"]


def test_what_was_read_off_a_seed_is_kept_beside_the_others(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    for seed, name in ((3, "ripple"), (0, "ripple_held_2")):
        decompiled = Decompiled(get_program(name), automaton=automaton(get_program(name)))
        rows = finite_models.keep(path, {seed: decompiled, 7: None})
    for seed, name in ((0, "ripple_held_2"), (3, "ripple")):
        table = automaton(get_program(name))
        assert (rows[seed].sizes, rows[seed].steps) == (table.sizes, table.steps)
        assert (rows[seed].starts, rows[seed].answer_of) == (table.starts, table.answer_of)
    assert [*json.loads(path.read_text())] == ["0", "3"]
    assert [*finite_models.keep(path, {3: None})] == [0]


def test_a_recipe_is_one_row_with_its_algorithms() -> None:
    rows = pd.DataFrame({
        "recipe": "r", "seed": [0, 1, 2, 3], "bits": [1, 1, 4, None], "cells": [9, 9, 13, None],
        "right": [1.0, 1.0, 0.999, None], "agree": [5, 6, 7, None], "of": [5, 6, 8, None],
        "same_as": ["ripple", "ripple", None, None], "algorithm": ["A", "A", "B", None],
    })  # fmt: skip
    *_, row = finite_models.as_table(rows).splitlines()
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    recipe, n_seeds, n_finite, right, bits, transitions, agree, algorithms = cells
    assert (recipe, n_seeds, n_finite, right) == ("r", "4", "3", "0.999")
    # Median, least and greatest.
    assert re.findall(r"\d+", bits) == ["1", "1", "4"]
    assert re.findall(r"\d+", transitions) == ["9", "9", "13"]
    assert agree == "18 of 19" and algorithms.split(", ") == ["ripple 2", "B 1"]


def test_the_page_says_what_the_file_says() -> None:
    stored, text = (
        pd.read_csv(RESULTS / finite_models.FILE),
        (PAGES / finite_models.PAGE).read_text(),
    )
    for recipe, rows in stored.dropna(subset="bits").groupby("recipe"):
        entries = json.loads((RESULTS / finite_models.PROGRAMS / f"{recipe}.json").read_text())
        assert [*map(int, entries)] == [*rows["seed"]]
        automata = [finite_models.automaton_of(entry) for entry in entries.values()]
        assert [len(entry.cells) for entry in automata] == [*rows["cells"]]
        assert finite_models.letters(str(recipe), automata) == [*rows["algorithm"]]
    assert put(text, {finite_models.NAME: finite_models.as_table(stored)}) == text
