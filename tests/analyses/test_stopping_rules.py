"""The table of stopping rules: of every model of the zoo, in line with its card, on the page."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pandas as pd
import pytest

from analyses import stopping_rules
from analyses.stopping_rules import FILE, NAME, PAGE, SHORT, as_table
from analyses.tables_in_pages import PAGES, RESULTS, put
from loopinterp.training.evaluation import BEST, ORACLE
from loopinterp.zoo import get_card, list_pretrained

KEPT = pd.read_csv(RESULTS / FILE)
ANEW = "run python -m analyses.stopping_rules"


def test_the_page_says_what_the_file_says() -> None:
    text = (PAGES / PAGE).read_text()
    assert put(text, {NAME: as_table(KEPT)}) == text, ANEW


def test_every_model_of_the_zoo_is_there_with_every_rule() -> None:
    assert {*KEPT["model"]} == {*list_pretrained().index}, ANEW
    for _, cells in KEPT.groupby(["model", "distribution", "length"]):
        assert sorted(cells["rule"]) == sorted(SHORT)


@pytest.mark.parametrize("name", sorted({*KEPT["model"]}))
def test_at_T_of_n_it_is_what_the_card_says(name: str) -> None:
    card, own = get_card(name), KEPT[KEPT["model"] == name]
    assert {*own["samples"]} == {card.samples}
    at_own = own[own["rule"] == ORACLE]
    for d, n, share in zip(*(at_own[k] for k in ("distribution", "length", "stopped_exact_match"))):
        assert share == card.exact_match[d][n][0], ANEW


def test_no_number_of_loops_is_above_the_best_in_hindsight() -> None:
    for _, cells in KEPT.groupby(["model", "distribution", "length"]):
        by_rule = cells.set_index("rule")["stopped_exact_match"]
        assert by_rule["calibrated"] <= by_rule[BEST], "one loop for all, as the best is"


def test_one_model_anew_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(RESULTS / FILE, tmp_path)
    page = Path(shutil.copy(PAGES / PAGE, tmp_path))
    small = ["--name", "prefix_sum", "--times", "1", "--samples", "4"]
    where = ["--results", str(tmp_path), "--page", str(page)]
    monkeypatch.setattr(sys, "argv", ["stopping_rules", *small, *where])
    stopping_rules.main()
    made = pd.read_csv(tmp_path / FILE)
    others, before = (of.query("model != 'prefix_sum'") for of in (made, KEPT))
    pd.testing.assert_frame_equal(others.reset_index(drop=True), before.reset_index(drop=True))
    own = made[made["model"] == "prefix_sum"]
    assert {*own["samples"]} == {4} and {*own["length"]} == {12}
    assert put(page.read_text(), {NAME: as_table(made)}) == page.read_text()
