"""Finite-state models of several seeds: which run one algorithm, and what the page says."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd

from analyses import finite_models
from analyses.tables_in_pages import PAGES, RESULTS, put
from loopinterp.circuits.decompiler.coded_states import Surroundings
from loopinterp.circuits.decompiler.program_automaton import tabulate_program
from loopinterp.rasp import full, get_program
from loopinterp.tasks import get_task


def automaton(program):
    found = tabulate_program(program, Surroundings.of(get_task("addition"), (1, 2, 3)).pairs)
    assert found is not None
    return found.automaton


def test_one_letter_for_what_differs_in_the_first_guess_alone() -> None:
    ripple, held = (automaton(get_program(name)) for name in ("ripple", "ripple_held_2"))
    guessing = automaton(replace(get_program("ripple"), prepare={"carry": full(1)}))
    letters = finite_models.letters("addition-finite", [held, None, ripple, guessing, held])
    assert letters == ["A", "", "B", "B", "A"]


def test_the_page_says_what_the_file_says() -> None:
    kept, text = (
        pd.read_csv(RESULTS / finite_models.FILE),
        (PAGES / "read-a-program.md").read_text(),
    )
    assert put(text, {finite_models.NAME: finite_models.as_table(kept)}) == text
