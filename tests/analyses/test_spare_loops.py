"""Loops to spare: what the page says is what was measured, and the script trains and measures."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pandas as pd
import pytest

from analyses import spare_loops
from analyses.spare_loops import FILE, KINDS, NAME, PAGE, PROBE, as_table
from analyses.tables_in_pages import PAGES, RESULTS, put

STORED = pd.read_csv(RESULTS / FILE)
PASSED, ZERO, ONE = KINDS


def test_the_page_is_what_the_file_says() -> None:
    page = (PAGES / PAGE).read_text()
    assert put(page, {NAME: as_table(STORED)}) == page, "run the script"


def shares(kind: str, spare: int, ahead: int = 0) -> pd.Series:
    """Share of bits that are read of each model and chain length, [seed, chain]."""
    cells = STORED.query("kind == @kind and spare == @spare and ahead == @ahead")
    return cells.set_index(["seed", "chain_length"])["right"]


def test_with_no_loop_to_spare_every_bit_is_read_when_its_carry_is() -> None:
    for kind in KINDS:
        assert (shares(kind, 0) == 1).all(), kind
        assert {*shares(kind, 0).index.get_level_values("seed")} == {0, 1, 2, 3, 4}
    assert (shares(PROBE, 0) == 1).all()
    # A loop earlier, bits that pass a carry on are at chance, and those that a carry turns wrong.
    assert (shares(PASSED, 0, -1) == 0.5).all()
    seen = shares(ONE, 0, -1).drop(1, level="chain_length")  # before loop 1 nothing is seen at all
    assert (seen == 0).all()


@pytest.mark.slow
def test_it_trains_measures_and_writes_its_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = Path(shutil.copy(PAGES / PAGE, tmp_path))
    where = ["--out", str(tmp_path / "runs"), "--results", str(tmp_path), "--page", str(page)]
    tiny = ["--set", "steps=2", "--set", "model.d_model=8", "--set", "model.n_heads=2"]
    chosen = ["--spare", "0", "3", "--seeds", "1", "--pairs", "2"]
    monkeypatch.setattr(sys, "argv", ["spare_loops", *where, *tiny, *chosen])
    monkeypatch.setattr(spare_loops, "BITS", 12)
    monkeypatch.setattr(spare_loops, "LONGEST", 4)
    spare_loops.main()
    measured = pd.read_csv(tmp_path / FILE)
    assert {*measured["kind"]} == {*KINDS, PROBE} and {*measured["ahead"]} == {-1, 0, 1}
    assert put(page.read_text(), {NAME: as_table(measured)}) == page.read_text()
    trained = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert trained == ["spare-0-seed-1", "spare-3-seed-1"]
