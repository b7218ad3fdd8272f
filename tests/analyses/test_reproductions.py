"""The page of reproductions says what the files say; what is kept is what was found."""

from __future__ import annotations

import itertools
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analyses import reproductions
from analyses.notebook_models import SOURCE as NOTEBOOK
from analyses.reproductions import (
    PAGE,
    RECIPE_OF,
    SIX,
    contrast,
    keep,
    lowest,
    means_of,
    notebook,
    six_tasks,
    sweeps,
    tables,
)
from analyses.tables_in_pages import PAGES, RESULTS, put
from loopinterp.core.errors import InputError
from loopinterp.models import LoopedTransformer, LoopedTransformerConfig
from loopinterp.tasks import AbacusAddition
from loopinterp.training import Measurement, Sweep, operand_grid
from loopinterp.training.recipes import get_recipe, list_recipes

TEXT = (PAGES / PAGE).read_text()
SWEEPS = PAGES.parent / "analyses" / "sweeps"


def cells_of(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_the_page_says_what_the_files_say() -> None:
    # Where they differ, python -m analyses.reproductions writes the page anew.
    assert put(TEXT, tables(RESULTS)) == TEXT


def test_every_task_of_the_paper_has_its_row() -> None:
    shown = (row.strip("| ").split(" | ") for row in six_tasks().split("\n")[2:])
    rows = {row[0]: row for row in shown}
    assert [*rows] == [*SIX]
    for name in SIX:
        assert ("no recipe yet" in rows[name]) == (RECIPE_OF.get(name, name) not in list_recipes())


def test_what_is_kept_of_sweeps_is_of_those_that_ship() -> None:
    kinds = ("contrast", "baselines", "ablations")
    files = [file for kind in kinds for file in sorted(RESULTS.glob(f"{kind}_*.csv"))]
    assert files
    for file in files:
        sweep, stored = Sweep.read(SWEEPS / f"{file.stem}.json").at(), pd.read_csv(file)
        assert {*stored["setting"]} == {*sweep.changes}
        assert {*stored["length"]} == {*sweep.evaluation.lengths}
        assert stored["n_seeds"].max() <= len(sweep.seeds)


def test_the_error_is_that_of_the_seeds_where_the_mean_is_lowest() -> None:
    shares = {"uniform": {8: (1.0, 1.0), 12: (1.0, 1.0)}, "chain": {8: (0.5, 0.75)}}
    measured = Measurement(seeds=(0, 1), samples=4, exact_match=shares, minutes=1, on="x")
    se = np.std([0.5, 0.75], ddof=1) / np.sqrt(2)
    assert lowest(measured, 8) == f"0.625 ± {se:.3f}"
    assert lowest(measured, 12) == lowest(measured, 9) == "-"  # not measured on every distribution
    single = {"uniform": {8: (0.5,)}}
    single = Measurement(seeds=(0,), samples=4, exact_match=single, minutes=1, on="x")
    assert lowest(single, 8) == "0.500"


def test_a_sweep_that_is_not_done_shows_the_settings_that_are(tmp_path: Path) -> None:
    cells = {
        "setting": ["one", "one", "two", "two"],
        "distribution": ["uniform"] * 4,
        "length": [4, 8, 4, 8],
        "exact_match": [1.0, 0.25, np.nan, np.nan],
        "exact_match_se": [np.nan] * 4,
        "n_seeds": [1, 1, 0, 0],
    }
    pd.DataFrame(cells).to_csv(tmp_path / "baselines_copy.csv")
    rows = sweeps([tmp_path / "baselines_copy.csv"], "baselines_").split("\n")[2:]
    (row,) = map(cells_of, rows)
    assert row == ["copy", "one", "1.000", "0.250", "uniform alone", "1"]


def test_a_recipe_stands_above_what_differs_from_it(tmp_path: Path) -> None:
    sweep, measured = Sweep.read(SWEEPS / "contrast_binary_sum.json"), ["biased", "uniform"]
    lengths = [*sweep.evaluation.lengths]
    cells = {
        "setting": ["next token"] * 6,
        "distribution": [d for d in measured for _ in lengths],
        "length": lengths * 2,
        "exact_match": [0.5, 0.25, 0.0, 1.0, 0.125, 0.0],
        "exact_match_se": [0.0] * 6,
        "n_seeds": [3] * 6,
    }
    pd.DataFrame(cells).to_csv(tmp_path / "contrast_binary_sum.csv")
    recipe, row = map(cells_of, contrast([tmp_path / "contrast_binary_sum.csv"]).split("\n")[2:])
    config, shares = get_recipe("binary_sum").config, get_recipe("binary_sum").measured
    assert recipe[:3] == ["binary_sum", "recipe", str(config.steps)]
    assert float(recipe[3].split(" ")[0]) == min(shares.mean(d, 20).value for d in measured)
    assert row[1:] == [
        *("next token", str(sweep.config_of("next token", 0).steps)),
        *("0.500 ± 0.000", "0.125 ± 0.000", "0.000 ± 0.000", "biased, uniform", "3"),
    ]


def test_every_row_without_a_loop_has_at_most_five_times_the_steps_of_its_recipe() -> None:
    for file in sorted(SWEEPS.glob("contrast_*.json")):
        sweep = Sweep.read(file)
        for setting in sweep.changes:
            config, ours = sweep.config_of(setting, 0), sweep.base
            assert config.distribution == ours.distribution
            assert config.curriculum == ours.curriculum
            most = ours.steps * (1 if config.objective.n_loops is None else 5)
            assert ours.steps // 2 < config.steps <= most


def test_a_setting_is_shown_where_it_is_lowest(tmp_path: Path) -> None:
    cells = {
        "setting": ["one"] * 4,
        "distribution": ["uniform", "uniform", "biased", "biased"],
        "length": [4, 8, 4, 8],
        "exact_match": [1.0, 0.25, 0.5, 0.75],
        "exact_match_se": [0.0, 0.1, 0.2, 0.3],
        "n_seeds": [3] * 4,
    }
    pd.DataFrame(cells).to_csv(tmp_path / "ablations_copy.csv")
    (row,) = sweeps([tmp_path / "ablations_copy.csv"], "ablations_").split("\n")[2:]
    assert cells_of(row) == [
        "copy", "one", "0.500 ± 0.200", "0.250 ± 0.100", "uniform, biased", "3"
    ]  # fmt: skip


def test_what_is_said_of_the_notebooks_looped_model_is_the_mean_of_its_seeds() -> None:
    stored = pd.read_csv(RESULTS / "notebook_source.csv")
    assert stored["seed"].nunique() == 7
    for n, accuracies in NOTEBOOK["looped"].items():
        at = stored.query(f"length == {n}")
        means = (at["bit_accuracy"].mean(), at["exact_match"].mean())
        assert accuracies == pytest.approx(means, abs=6e-4)


def test_ours_stands_below_the_notebooks(tmp_path: Path) -> None:
    lengths = [8, 16, 24, 32, 40, 48]
    cells = {"model": "looped", "distribution": "chain", "length": lengths, "bit_accuracy": 0.5}
    table = pd.DataFrame(cells | {"exact_match": 0.25, "exact_match_se": 0.125})
    table.to_csv(tmp_path / "notebook.csv")
    standard, _, ours = map(cells_of, notebook(tmp_path / "notebook.csv").split("\n")[2:])
    assert ("1.00 / 1.00", "0.73 / 0.06") in itertools.pairwise(standard)
    assert ours[:2] == ["looped: ours", "chains"]
    assert re.findall(r"[\d.]+", ours[2]) == ["0.50", "0.25", "0.12"]


def test_a_grid_is_kept_as_its_means(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = AbacusAddition()
    config = LoopedTransformerConfig(
        d_model=8, n_heads=2, d_vocab=task.d_vocab, d_vocab_out=task.d_vocab_out
    )
    model = LoopedTransformer(config, seed=0)
    grid = operand_grid(model, task, 3, loops=[1, 2], n_samples=2, trained_up_to=2)
    grid.data["exact_match"][{"estimate": 0}] = np.arange(18).reshape(2, 3, 3) / 18
    means = means_of(grid)
    assert means["within"].tolist() == pytest.approx([(0 + 1 + 3 + 4) / 4 / 18, 11 / 18])
    assert means["whole"].tolist() == pytest.approx([4 / 18, 13 / 18])
    page = Path(shutil.copy(PAGES / PAGE, tmp_path))
    file = grid.save(tmp_path)
    results = ["--results", str(tmp_path / "results"), "--page", str(page)]
    arguments = ["--keep", f"abacus-plain={file}"]
    monkeypatch.setattr(sys, "argv", ["reproductions", *results, *arguments])
    reproductions.main()
    # A grid is read from its file, whose first loop's means are those of what was measured.
    shown = pd.read_csv(tmp_path / "results" / "abacus-plain.csv")
    assert shown["loop"].tolist() == [1, 2] and shown["to"].tolist() == [3, 3]
    cells = "| ours, plain, 2 x 2 | 2 |"
    assert cells in page.read_text()


def test_a_name_of_no_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        keep("something", tmp_path / "file", tmp_path)
    assert (caught.value.what, caught.value.given) == ("--keep", "'something'")
    named = ("notebook", "published_loss_TASK", "abacus-SETTING")
    assert all(name in caught.value.expected for name in named)
