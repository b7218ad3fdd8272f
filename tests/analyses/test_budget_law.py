from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analyses import budget_law
from analyses.budget_law import FILE, NAME, PAGE, as_table, exponent
from analyses.tables_in_pages import PAGES, RESULTS, put


def test_an_exponent_is_that_of_the_power_law_it_is_made_of() -> None:
    x = np.geomspace(1, 16, 12)
    noisy = 3 * x**0.7 * np.exp(0.05 * np.random.default_rng(0).normal(size=12))
    value, low, high = exponent(x, noisy)
    assert low < 0.7 < high and high - low < 0.2 and low <= value <= high
    assert np.isnan(exponent([2, 2], [1, 3])).all() and np.isnan(exponent([], [])).all()


def test_models_have_levels_of_their_own() -> None:
    x, y = np.tile([1.0, 2, 4], 2), np.array([2.0, 4, 8, 200, 400, 800])
    np.testing.assert_allclose(exponent(x, y, of=["a"] * 3 + ["b"] * 3), 1)
    _, low, high = exponent(x, y)
    assert high - low > 1  # one level for both models does not fit


def models(speed: float) -> pd.DataFrame:
    """Models that need n over a power of what they were given in training."""
    rows = [
        {"task": "made up", "cutoff": c, "trained_loops": c * s, "seed": 0, "n": n}
        | {"least_loops": n * s**speed, "settled": np.inf if s == 2 else 2 * n}
        for c in (8, 12, 16)
        for s in (0.5, 1, 2)
        for n in (c // 2, c, 2 * c)
    ]
    return pd.DataFrame(rows)


@pytest.mark.parametrize("speed", [0.0, 1.0])
def test_the_table_finds_the_law_or_that_there_is_none(speed: float) -> None:
    name, learnt, law, _, *exponents = cells(as_table(models(speed)))
    assert (name, learnt) == ("made up", "9 of 9") and law.startswith(f"{speed:.2f} (")
    one = "1.00 (1.00 to 1.00)"
    assert exponents == [one, one]


def test_a_model_that_has_not_learnt_is_left_out_and_counted() -> None:
    measured = models(1.0)
    measured.loc[measured["trained_loops"] == 4, "least_loops"] = np.inf
    assert cells(as_table(measured))[1] == "8 of 9"


@pytest.mark.parametrize("cutoffs", [[8, 12, 16], [8]])
def test_few_models_or_such_that_were_given_the_same_say_nothing_of_the_speed(
    cutoffs: list[int],
) -> None:
    """All cutoffs with one number of loops a position, five seeds; or one cutoff with three."""
    measured = models(1.0)
    if len(cutoffs) > 1:
        measured = measured.query("trained_loops == cutoff")
        measured = pd.concat([measured.assign(seed=seed) for seed in range(5)])
    measured = measured.query("cutoff in @cutoffs")
    _, learnt, law, one, *_ = cells(as_table(measured))
    assert learnt.startswith(f"{15 if len(cutoffs) > 1 else 3} of")
    assert (law, one) == ("not known", "1.00")


def cells(table: str) -> list[str]:
    """The cells of a table's only row."""
    _, _, row = table.splitlines()
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_what_the_page_says() -> None:
    stored = pd.read_csv(RESULTS / FILE)
    page = (PAGES / PAGE).read_text()
    assert put(page, {NAME: as_table(stored)}) == page, "run the script"
    assert {*stored["seed"]} == {0, 1} and {*stored["cutoff"]} == {8, 12, 16}
    at = stored.query("n == cutoff and least_loops < inf")
    for task, above in {"parity": True, "prefix_sum": True, "addition": False}.items():
        of_task = at.query("task == @task")
        _, low, high = exponent(
            of_task["cutoff"] / of_task["trained_loops"], of_task["n"] / of_task["least_loops"]
        )
        assert (low > 0) == above and high < 0.8, (task, low, high)


@pytest.mark.slow
def test_it_trains_and_writes_its_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Path(shutil.copy(PAGES / PAGE, tmp_path))
    chosen = ["--tasks", "parity", "--cutoffs", "3", "--seeds", "0", "--samples", "4"]
    chosen += ["--scales", "1", "2"]
    where = ["--out", str(tmp_path / "runs"), "--results", str(tmp_path), "--page", str(page)]
    tiny = ["--set", "steps=2", "--set", "model.d_model=8", "--set", "model.n_heads=2"]
    monkeypatch.setattr(sys, "argv", ["budget_law", *chosen, *where, *tiny])
    budget_law.main()
    measured = pd.read_csv(tmp_path / FILE)
    assert {*measured["n"]} == {2, 3, 4, 6} and {*measured["trained_loops"]} == {3.0, 6.0}
    assert f"table {NAME}" in page.read_text() and "| parity |" in page.read_text()
