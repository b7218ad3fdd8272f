from __future__ import annotations

import itertools
import json
import shutil
import sys
from functools import partial
from pathlib import Path

import pandas as pd
import pytest

from analyses import fixed_point_grid
from analyses.fixed_point_grid import FILE, GRIDS, PAGE, axes, claims_table, tables
from analyses.tables_in_pages import PAGES, RESULTS, put
from loopinterp.dynamics import (
    input_dependence_study,
    local_stability_study,
    reachability_study,
)
from loopinterp.training import Sweep

SWEEPS = Path(fixed_point_grid.__file__).parent / "sweeps"


@pytest.mark.parametrize("task", GRIDS)
def test_the_settings_are_all_combinations_and_are_what_their_names_say(task: str) -> None:
    sweep = Sweep.read(SWEEPS / GRIDS[task].sweep).at()
    settings = {tuple(axes(name).values()) for name in sweep.changes}
    recalls = {"no", "external"} | ({"internal"} if task == "prefix_sum" else set())
    corners = itertools.product(recalls, ("pre", "peri"), (True, False))
    assert settings.issuperset(corners)
    assert len(settings) == len(sweep.changes) == (24 if task == "prefix_sum" else 8)
    kinds = {"no": "none", "external": "concat", "internal": "internal"}
    norms = {"peri": "sandwich"}
    for name in sweep.changes:
        at, model = axes(name), sweep.config_of(name, seed=0).model
        assert model.injection == kinds[at["recall"]] and model.loop_norm == at["loop_norm"]
        assert model.norm == norms.get(at["norm"], at["norm"])
    evaluated = sweep.evaluation.lengths
    assert {GRIDS[task].trained, GRIDS[task].far} <= {*evaluated}


@pytest.mark.slow
def test_it_trains_measures_and_writes_its_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, out = Path(shutil.copy(PAGES / PAGE, tmp_path)), tmp_path / "runs"
    where = ["--out", str(out), "--results", str(tmp_path), "--page", str(page)]
    tiny = ["--set", "steps=2", "--set", "model.d_model=8", "--set", "model.n_heads=2"]
    only = ["--only", "external recall, pre, loop norm", "--seeds", "0", "--examples", "3"]
    monkeypatch.setattr(fixed_point_grid, "LOOPS", (1, 16))
    small = partial(local_stability_study, max_vectors=8, max_products=24)
    monkeypatch.setattr(fixed_point_grid, "local_stability_study", small)
    for study in (reachability_study, input_dependence_study):
        monkeypatch.setattr(fixed_point_grid, study.__name__, partial(study, n_loops=64))
    monkeypatch.setattr(sys, "argv", ["x", "--task", "sudoku", *where, *tiny, *only])
    fixed_point_grid.main()
    row = pd.read_csv(tmp_path / FILE).iloc[0]
    cell = json.loads(next(out.rglob("grid.json")).read_text())["found"]
    assert row["found"] == pytest.approx(cell["found"], abs=1e-3) and 0 <= row["reached"] <= 1
    cells = "| external | pre | yes | 1 |"
    assert cells in page.read_text()
    assert "Plotly.newPlot" in (out / "sudoku" / "grid.html").read_text()


def test_the_page_is_what_the_file_says() -> None:
    stored = pd.read_csv(RESULTS / FILE)
    written = {"grid-claims": claims_table(stored)}
    for task in stored["task"].unique():
        written |= tables(stored, task)
    text = (PAGES / PAGE).read_text()
    assert put(text, written) == text
