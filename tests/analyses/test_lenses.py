"""The tables on lenses: what the page says of them is what they say, and the scripts run."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
import torch

from analyses import lenses
from analyses.exits import FILE as EXITS
from analyses.exits import NAME, as_table
from analyses.exits import PAGE as EXIT_PAGE
from analyses.tables_in_pages import PAGES, RESULTS, put
from loopinterp.lenses import lens_study
from loopinterp.lenses.exits_by_loop import RULES
from loopinterp.probing import sample_chains
from loopinterp.tasks import Addition
from loopinterp.zoo import load_pretrained

STORED = pd.read_csv(RESULTS / lenses.FILE)
LEFT = pd.read_csv(RESULTS / EXITS)
NO_SPARE = "addition-no-spare-loops"


def test_the_page_is_what_the_files_say() -> None:
    page = (PAGES / lenses.PAGE).read_text()
    assert put(page, lenses.tables(STORED)) == page, "run the scripts"
    page = (PAGES / EXIT_PAGE).read_text()
    assert put(page, {NAME: as_table(LEFT)}) == page, "run the scripts"


@pytest.mark.parametrize("model", lenses.NAMES)
def test_what_the_page_says_of_carries(model: str) -> None:
    cells = STORED[(STORED["model"] == model) & (STORED["chain_length"] > 0) & (STORED["loop"] > 0)]
    ahead = cells["loop"] - cells["chain_length"]
    exact = model != "addition-seed-4"

    def right(lens: str, at: Any, kind: str = "right") -> Any:
        return pd.Series(cells[(cells["lens"] == lens) & at][kind]).dropna()

    assert right("logit", ahead < 0).between(0.4, 0.6).all()
    assert (right("logit", ahead == 0, "right_passing") == 1).all()
    ending = right("logit", ahead == 0, "right_ending")
    if model == NO_SPARE:
        assert (ending == 1).all()
    else:
        assert ending.min() < 0.75
        far = right("logit", (ahead == 0) & (cells["chain_length"] >= 4), "right_ending")
        late = model not in ("addition-seed-3", "addition-no-hold")
        assert (far == 0.5).all() if late else (far >= 0.5).all() and far.max() > 0.7
    assert right("logit", ahead == 1).min() >= (1 if exact else 0.82)
    assert right("logit", ahead > 1).min() >= (1 if exact else 0.94)
    assert right("tuned", ahead == 0).min() >= (0.95 if exact else 0.87)
    if exact:
        probe = "probe of the carry"
        assert (right(probe, ahead >= 0) > 0.99).all()
    assert right("Jacobian", ahead == 0).min() <= right("logit", ahead == 0).min()


@pytest.mark.parametrize("name", [n for n in lenses.NAMES if n != "addition-seed-4"])
def test_which_bits_the_logit_lens_reads_late(name: str) -> None:
    """Against Python integers, not the table: only those that end a chain and a carry turns.

    None where training left no loop to spare.
    """
    task, generator = Addition(), torch.Generator().manual_seed(7)
    n, longest, pairs = (48, 40, 8) if name == NO_SPARE else (14, 9, 24)
    sample = sample_chains(task, n, max_chain=longest, n_pairs=pairs, generator=generator)
    result = lens_study(load_pretrained(name), sample.inputs, lens="logit", n_loops=n + 1)
    answer = result.data["answer"].sel(layer="state").values
    late = {True: 0, False: 0}
    for chain, (rows, places) in enumerate(zip(sample.row, sample.pos), 1):
        for row, pos in zip(rows.tolist(), places.tolist()):
            digits = sample.inputs[row].tolist()
            a, b = (sum(((d >> k) & 1) << i for i, d in enumerate(digits)) for k in (1, 0))
            bit, carry = (a + b) >> pos & 1, ((a + b) ^ a ^ b) >> pos & 1
            ends_with_one = digits[pos] in (0, 3) and bool(carry)
            if answer[chain, row, pos] != bit:
                late[ends_with_one] += 1
            assert answer[chain + 1, row, pos] == bit
    assert (late[True] == 0) == (name == NO_SPARE) and late[False] == 0


def test_what_the_page_says_of_distances() -> None:
    at = STORED[(STORED["chain_length"] == 0) & (STORED["model"] == lenses.NAMES[0])]
    kl = at.pivot_table("kl_lens", index="loop", columns="lens")
    last = kl.index.max()
    assert (kl.loc[last] == 0).all()
    early = kl.loc[1:4]
    assert (early["logit"] > at["kl_unigram"].mean()).all()
    assert (early["tuned"] < at["kl_unigram"].mean()).all()


def test_exits_are_those_of_the_right_models() -> None:
    for _, cells in LEFT.groupby(["model", "length"]):
        assert [*cells["rule"]] == [*RULES]
        one = cells.iloc[0]
        assert one["oracle"] >= one["best"] and one["oracle_loops"] >= 1
        assert (cells["cheapest"].dropna() >= 1).all()


def test_the_script_measures_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lenses, "BITS", 9)
    monkeypatch.setattr(lenses, "LONGEST", 3)
    monkeypatch.setattr(lenses, "SHOWN", (1, 2, 4))
    rows = lenses.measure("addition", 4, 1)
    assert {*rows["lens"]} == {*STORED["lens"]}
    assert len(lenses.tables(rows)) == 2
