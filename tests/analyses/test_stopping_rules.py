"""The table of stopping rules: of every model of the zoo, in line with its card, on the page."""

from __future__ import annotations

import pandas as pd
import pytest

from analyses.stopping_rules import FILE, SHORT
from analyses.tables_in_pages import RESULTS
from loopinterp.training.evaluation import BEST, ORACLE
from loopinterp.zoo import get_card

STORED = pd.read_csv(RESULTS / FILE)
ANEW = "run python -m analyses.stopping_rules"


def test_every_rule_is_there_in_every_cell() -> None:
    for _, cells in STORED.groupby(["model", "distribution", "length"]):
        assert sorted(cells["rule"]) == sorted(SHORT)


@pytest.mark.parametrize("name", sorted({*STORED["model"]}))
def test_at_T_of_n_it_is_what_the_card_says(name: str) -> None:
    card, rows = get_card(name), STORED[STORED["model"] == name]
    [samples] = {*rows["samples"]}
    at_own = rows[rows["rule"] == ORACLE]
    for d, n, share in zip(*(at_own[k] for k in ("distribution", "length", "stopped_exact_match"))):
        on_card = card.exact_match[d][n][0]
        if samples == card.samples:
            assert share == on_card, ANEW
        else:  # measured on other samples than the card: four standard errors of their difference
            spread = 0.25 * (1 / samples + 1 / card.samples)
            assert abs(share - on_card) <= 4 * spread**0.5, ANEW


def test_no_number_of_loops_is_above_the_best_in_hindsight() -> None:
    for _, cells in STORED.groupby(["model", "distribution", "length"]):
        by_rule = cells.set_index("rule")["stopped_exact_match"]
        assert by_rule["calibrated"] <= by_rule[BEST]  # both stop all examples at one loop
