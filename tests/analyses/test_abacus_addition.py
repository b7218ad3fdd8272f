"""What is measured of long abacus additions, against generation and a model with the window."""

from __future__ import annotations

import json

import pytest
import torch

from analyses.abacus_addition import (
    CHANGES,
    FILE,
    barred,
    cell,
    exact,
    shares,
    tables,
    with_window,
)
from analyses.tables_in_pages import PAGES, put
from loopinterp.models import LoopedTransformer, generate
from loopinterp.tasks import AbacusAddition
from loopinterp.zoo import load_pretrained

STORED = json.loads(FILE.read_text())


@pytest.fixture(scope="module")
def model() -> LoopedTransformer:
    """Trained on numbers of 6 digits, so that it is sometimes right at 8."""
    return load_pretrained("abacus")


def test_the_page_is_what_is_stored() -> None:
    page = (PAGES / "results" / "abacus-addition.md").read_text()
    assert put(page, tables(STORED)) == page
    assert set(STORED) <= set(CHANGES)


def test_exact_match_is_that_of_greedy_generation(model: LoopedTransformer) -> None:
    batch = cell(8, 7, 40)
    task = AbacusAddition()
    prompt, mask = task.prompt_of(batch)
    options = {"n_loops": 4, "max_new_tokens": 10, "stop_token": task.end, "attention_mask": mask}
    right = task.is_right(batch, generate(model, prompt, **options))
    share = float(right.float().mean())
    assert 0 < share < 1
    assert exact(model, batch) == pytest.approx(share)


@pytest.mark.parametrize("window", [2, 4, 6])
def test_barred_pairs_are_those_beyond_the_window(model: LoopedTransformer, window: int) -> None:
    batch = cell(8, 8, 40)
    with_it = with_window(model, window)
    assert barred(model, batch, "window", window) == exact(with_it, batch)
    assert barred(model, batch, "none", window) == exact(model, batch)


def test_the_rules_for_digits_leave_signs_alone(model: LoopedTransformer) -> None:
    """Of one digit each, the sum's second digit and the end see all but through the ``=``."""
    batch = cell(1, 1, 40)
    assert barred(model, batch, "digits", 0) != barred(model, batch, "window", 0)


def test_numbers_within_the_window_are_read_as_without_one(model: LoopedTransformer) -> None:
    inputs = cell(5, 4, 20).inputs  # sums have 6 digits, the last 6 after the sign before them
    wide, narrow = (with_window(model, window)(inputs, n_loops=4) for window in (6, 2))
    torch.testing.assert_close(wide, model(inputs, n_loops=4))
    assert not torch.allclose(narrow, wide)


def test_all_attention_is_of_some_kind(model: LoopedTransformer) -> None:
    rows = shares(model, cell(5, 5, 20))
    assert [row["head"] for row in rows[:3]] == [None, 0, 1]
    for row in rows:
        total = sum(row[kind] for kind in ("next", "same", "signs", "other"))
        assert total == pytest.approx(1, abs=3e-4)
