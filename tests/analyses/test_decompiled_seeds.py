"""The table of delays is what the file says; compiled programs hold as long as they should."""

from __future__ import annotations

import pandas as pd
import pytest

from analyses.decompiled_seeds import FILE, PAGE, PROGRAMS, SEEDS, measured, side_by_side
from analyses.tables_in_pages import PAGES, RESULTS, put
from tests.small_studies import decompile_little

STORED = pd.read_csv(RESULTS / FILE)


def test_the_page_says_what_the_file_says() -> None:
    text = (PAGES / PAGE).read_text()
    assert put(text, {"decompiled-seeds": side_by_side(STORED)}) == text


def test_every_seed_stands_beside_the_known_programs() -> None:
    assert {*STORED["model"]} == {*PROGRAMS, *SEEDS}
    assert (STORED["least"] >= 1).all() and (STORED["least"] <= STORED["most"]).all()
    assert STORED.groupby("model")["given"].first()[list(PROGRAMS)].all()


@pytest.mark.slow
def test_a_known_program_is_measured_as_it_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    decompile_little(monkeypatch)
    rows = side_by_side(pd.DataFrame(measured("ripple_held_3"))).splitlines()
    assert rows[-1].split(" | ")[4:] == ["1", "1", "1", "3", "3", "3 |"]
