from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from analyses import settled_but_wrong
from analyses.settled_but_wrong import FILE, NAME, PAGE, as_table, longest_run, properties, telling
from analyses.tables_in_pages import PAGES, RESULTS, put
from loopinterp.dynamics import FATES
from loopinterp.tasks import Addition, Parity
from loopinterp.zoo import list_pretrained

KEPT = pd.read_csv(RESULTS / FILE)
ANEW = "run python -m analyses.settled_but_wrong"


def test_the_page_says_what_the_file_says() -> None:
    text = (PAGES / PAGE).read_text()
    assert put(text, {NAME: as_table(KEPT)}) == text, ANEW


def test_every_model_is_there_and_every_example_has_one_fate() -> None:
    assert {*KEPT["model"]} == {*list_pretrained().index}, ANEW
    np.testing.assert_allclose(KEPT[list(FATES)].sum(axis="columns"), 1, atol=1e-3)


def test_one_model_anew_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(RESULTS / FILE, tmp_path)
    page = Path(shutil.copy(PAGES / PAGE, tmp_path))
    small = ["--name", "prefix_sum", "--times", "1", "--samples", "4"]
    where = ["--results", str(tmp_path), "--page", str(page)]
    monkeypatch.setattr(sys, "argv", ["settled_but_wrong", *small, *where])
    settled_but_wrong.main()
    made = pd.read_csv(tmp_path / FILE)
    others, before = (of.query("model != 'prefix_sum'") for of in (made, KEPT))
    pd.testing.assert_frame_equal(others.reset_index(drop=True), before.reset_index(drop=True))
    (own,) = made.query("model == 'prefix_sum'").to_dict(orient="records")
    # It ends on a cycle of two loops, and is right all the same.
    assert own["samples"] == 4 and own["moves on, right"] == 1


def test_the_longest_way_of_a_carry_is_told() -> None:
    # 1 + 1, then three pairs that hand the carry on, and one that ends it.
    batch = Addition().encode([(0b01111, 0b00001), (0b10101, 0b01010)], n=5)
    found = properties(Addition(), batch)
    assert found["longest way of a carry"].tolist() == [3, 0]
    assert longest_run([1, 1, 0, 0, 0, 1]) == 3 and longest_run([1, 1, 0], of=0) == 1


def test_what_separates_wrong_from_right_is_named_where_there_are_enough_of_both() -> None:
    task = Parity()
    generator = torch.Generator().manual_seed(0)
    batch = task.sample(8, batch_size=40, generator=generator, distribution="uniform")
    runs = properties(task, batch)["longest run in the input"]
    name, area = telling(task, batch, runs > np.median(runs))
    assert (name, area) == ("longest run in the input", 1.0)
    assert telling(task, batch, np.arange(40) < 4)[0] == ""
