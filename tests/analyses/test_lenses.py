"""The tables on lenses: what the page says of them is what they say, and the scripts run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from analyses import lenses
from analyses.exits import FILE as EXITS
from analyses.exits import NAME, as_table
from analyses.exits import PAGE as EXIT_PAGE
from analyses.tables_in_pages import PAGES, RESULTS, put
from loopinterp.lenses.exits_by_loop import RULES

KEPT = pd.read_csv(RESULTS / lenses.FILE)
LEFT = pd.read_csv(RESULTS / EXITS)


def test_the_page_is_what_the_files_say() -> None:
    page = (PAGES / lenses.PAGE).read_text()
    assert EXIT_PAGE == lenses.PAGE
    assert put(page, {**lenses.tables(KEPT), NAME: as_table(LEFT)}) == page, "run the scripts"


@pytest.mark.parametrize("model", lenses.NAMES)
def test_what_the_page_says_of_carries(model: str) -> None:
    cells = KEPT[(KEPT["model"] == model) & (KEPT["chain_length"] > 0) & (KEPT["loop"] > 0)]
    ahead = cells["loop"] - cells["chain_length"]

    def right(lens: str, at: Any) -> Any:
        return cells[(cells["lens"] == lens) & at]["right"]

    assert right("logit", ahead < 0).between(0.4, 0.6).all()
    assert right("logit", ahead == 0).min() >= 0.75 and (right("logit", ahead > 0) == 1).all()
    assert right("tuned", ahead == 0).min() >= 0.95 and (right("tuned", ahead > 0) == 1).all()
    assert (right("probe of the carry", ahead >= 0) > 0.99).all()
    assert right("Jacobian", ahead == 0).min() <= right("logit", ahead == 0).min()


def test_what_the_page_says_of_distances() -> None:
    at = KEPT[(KEPT["chain_length"] == 0) & (KEPT["model"] == lenses.NAMES[0])]
    own = at.pivot_table("kl_lens", index="loop", columns="lens")
    last = own.index.max()
    assert (own.loc[last] == 0).all()
    early = own.loc[1:4]
    assert (early["logit"] > at["kl_unigram"].mean()).all()
    assert (early["tuned"] < at["kl_unigram"].mean()).all()


def test_exits_are_those_of_the_right_models() -> None:
    for _, cells in LEFT.groupby(["model", "length"]):
        assert [*cells["rule"]] == [*RULES]
        one = cells.iloc[0]
        assert one["oracle"] >= one["best"] and one["oracle_loops"] >= 1
        assert (cells["cheapest"].dropna() >= 1).all()


def test_the_script_measures_a_model(tmp_path: Path) -> None:
    found = lenses.measure("addition", 4, 1)
    assert {*found["lens"]} == {*KEPT["lens"]}
    assert len(lenses.tables(found)) == 2
