"""Papers' claims on small models: the page, the parts that scripts share, and one script."""

from __future__ import annotations

import importlib
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr

from analyses.cell_relations import relations, shares
from analyses.papers import (
    claims,
    doubling,
    failed_puzzles,
    locality,
    stages_of_inference,
    state_regimes,
)
from analyses.papers.claims import (
    FILE,
    PAGE,
    SCRIPTS,
    SECTIONS,
    above,
    below,
    claims_table,
    hop,
    over_examples,
    read_claims,
    right_at,
)
from analyses.small_language_models import TASK
from analyses.tables_in_pages import PAGES, RESULTS, put
from analyses.train_huginn_small import build_ouro
from analyses.train_trm_small import draw
from loopinterp.zoo import load_pretrained

FOLDER = Path(claims.__file__).parent


def test_the_page_says_what_the_files_say() -> None:
    text, known = (PAGES / PAGE).read_text(), read_claims(RESULTS / FILE)
    tables = {"papers": claims_table(known)}
    for name in SCRIPTS:
        script = importlib.import_module(f"analyses.papers.{name}")
        tables[name] = script.as_table(pd.read_csv(RESULTS / f"papers_{name}.csv"))
    assert put(text, tables) == text, "run the scripts of analyses/papers"
    assert {*known["status"]} <= {"yes", "no", "not decided"}
    assert [*known["script"].unique()] == [*SCRIPTS, *SECTIONS]


@pytest.mark.parametrize("name", SECTIONS)
def test_saved_rows_give_claims_and_pages_again(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages, results = tmp_path / "pages", tmp_path / "results"
    shutil.copytree((PAGES / PAGE).parent, pages)
    shutil.copytree(RESULTS, results, ignore=shutil.ignore_patterns("finite_programs"))
    saved = [] if name == "albert_orbits" else ["--saved"]
    where = ["--results", str(results), "--page", str(pages / "papers.md")]
    monkeypatch.setattr(sys, "argv", [name, *saved, *where, "--figures", str(tmp_path)])
    importlib.import_module(f"analyses.papers.{name}").main()
    for page in pages.glob("*.md"):
        assert page.read_text() == ((PAGES / PAGE).parent / page.name).read_text(), page.name
    assert (results / FILE).read_text() == (RESULTS / FILE).read_text()
    assert "Plotly" in (tmp_path / f"{name}.html").read_text()


def test_a_status_follows_from_the_interval() -> None:
    for estimate, status in (
        ((0.7, 0.6, 0.8), "yes"),
        ((0.6, 0.4, 0.8), "not decided"),
        ((0.3, 0.2, 0.4), "no"),
    ):
        assert above(estimate, 0.5) == status
        assert below([-x for x in (estimate[0], estimate[2], estimate[1])], -0.5) == status


def test_a_regime_counts_if_its_whole_interval_does() -> None:
    rows = pd.read_csv(RESULTS / "huginn_small_regimes.csv")
    rows = rows.query("part == 'hops' and seed == 0")
    columns, status = ["value", "low", "high"], {}
    for share in (0.2, 0.06, 0.01):
        moves = rows["regime"].isin(["orbit", "drift"])
        rows.loc[moves, columns] = [share, share - 0.02, share + 0.02]
        (claim,) = state_regimes.claims_of(rows)
        status[share] = claim.status
    assert status == {0.2: "yes", 0.06: "not decided", 0.01: "no"}


def test_failed_puzzles_converge_or_keep_moving_as_most_do() -> None:
    who = {"task": "maze", "model": "trm", "seed": 0, "wrong": True, "right_later": False}
    status = []
    for n in (0, 20, 40):  # of 40 at rest
        fates = ["rests wrong"] * n + ["moves on, wrong"] * (40 - n)
        (claim,) = failed_puzzles.claims_of(pd.DataFrame([{**who, "fate": x} for x in fates]))
        status.append(claim.status)
    assert status == ["no", "not decided", "yes"]
    rights = pd.DataFrame([{**who, "fate": "rests right", "right_later": True}] * 40)
    assert failed_puzzles.claims_of(rights)[0].status == "not decided"  # to right answers


@pytest.mark.parametrize(("task", "even"), [("sudoku", 7 / 15), ("maze", 1 / 5)])
def test_near_cells_have_a_share_of_the_influence(task: str, even: float) -> None:
    inputs = draw(task, 6, 5).inputs
    masks = relations(task, inputs)
    near = torch.stack([masks[x] for x in locality.NEAR[task]]).any(0).float()
    for weight, expected in ((torch.ones(6, 16, 16), even), (near, 1.0), (1 - near, 0.0)):
        rows = pd.DataFrame(shares({"task": task}, weight, inputs))
        assert locality.near_share(rows)[0] == pytest.approx(expected)


@pytest.mark.parametrize("name", [*SCRIPTS, *SECTIONS])
def test_a_script_is_short(name: str) -> None:
    assert len((FOLDER / f"{name}.py").read_text().splitlines()) <= 100


def test_hops_lead_to_the_answers_of_the_task() -> None:
    batch = TASK.sample(30, batch_size=16, seed=4)
    for at in (30, 17, 3):
        for hops in (1, 2, 5):
            asked = TASK.with_hops(batch, torch.full((16,), hops))
            end = hop(batch.inputs, torch.full((16,), at), hops)
            symbol = batch.inputs.gather(1, end[:, None])[:, 0]
            expected = asked.targets[:, at]
            assert torch.equal(expected == TASK.n_symbols, end == 0)
            assert torch.equal(symbol[end > 0], expected[end > 0])


def data(score: list[list[float]], exact: list[list[int]]) -> xr.Dataset:
    """Of one rule; loop 0 is added."""
    first = [0.0] * len(score[0])
    arrays: dict[str, Any] = {"score": (("rule", "loop", "row"), [[first, *score]])}
    arrays["exact"] = (("loop", "row"), [first, *exact])
    return xr.Dataset(arrays, coords={"rule": ["gate"]})


def test_a_rule_is_read_at_a_mean_number_of_loops() -> None:
    # Row k could stop from loop k + 1 on, and is right from there on.
    score = [[0.1, 0.9, 0.9], [0.1, 0.2, 0.9], [0.1, 0.2, 0.3]]
    exact = [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    of = data(score, exact)
    every = right_at(of, "gate", 3.0)
    assert every.tolist() == [1, 1, 1]
    stops = right_at(of, "gate", 2.0)  # each where it may
    assert stops.tolist() == pytest.approx([1, 1, 1])
    # Below, some rows stop too early, in a mixture of "as above" and "all at the first loop".
    early = right_at(of, "gate", 1.5)
    assert early.tolist() == pytest.approx([1, 0.5, 0.5])
    late = data([[9.0, 9.0], [9.0, 9.0], [0.1, 0.1]], [[0, 0]] * 3)
    late["score"][0, 1:3] = np.inf
    assert np.isnan(right_at(late, "gate", 2.0)).all()


def test_tokens_of_an_example_are_one_observation() -> None:
    values = np.array([1.0, 0.0, 1.0, 1.0, 0.0, 0.0])
    found = over_examples(values, np.array([0, 0, 1, 1, 2, 2]))
    means = np.array([0.5, 1.0, 0.0])
    half = 1.959964 * means.std(ddof=1) / 3**0.5
    np.testing.assert_allclose(found, [0.5, 0.5 - half, 0.5 + half])


@pytest.mark.slow
def test_a_script_finds_the_doubling_of_the_zoo_model_and_none_without_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = Path(shutil.copy(PAGES / PAGE, tmp_path))
    shutil.copy(RESULTS / FILE, tmp_path)
    model = load_pretrained("ouro-small")
    monkeypatch.setattr(doubling, "ouro_small", lambda args, seed: model)
    where = ["--results", str(tmp_path), "--page", str(page), "--figures", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["doubling", "--seed", "1", "--samples", "60", *where])
    doubling.main()
    assert capsys.readouterr().out.splitlines()[-1].endswith("yes.")
    rows = pd.read_csv(tmp_path / "papers_doubling.csv").query("site != 'state'")
    assert (rows.query("predicted")["follows"] > 0.7).all()
    assert (rows.query("not predicted")["changed"] < 0.15).all()
    assert "Plotly" in (tmp_path / "doubling.html").read_text()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(sys, "argv", ["doubling", "--seed", "1", "--samples", "8", *where])
    doubling.main()
    assert capsys.readouterr().out.splitlines()[-1].endswith("no.")


def test_stages_are_correlated_over_layers_and_other_orders_counted() -> None:
    a, b = np.random.default_rng(0).normal(size=(2, 5, 6, 3))  # [measure, layer, window]
    found = stages_of_inference.alike(a, b)
    by_window = [np.mean([np.corrcoef(a[m, :, w], b[m, :, w])[0, 1] for m in range(5)])
                 for w in range(3)]  # fmt: skip
    assert found["r"] == pytest.approx(np.mean(by_window))
    same, turned = (stages_of_inference.alike(a, x) for x in (a, a[:, ::-1]))
    assert same["r"] == pytest.approx(1) and same["orders"] == 0
    assert turned["orders"] > 0  # the true order is among the others


def test_measures_of_layers_are_those_of_the_run() -> None:
    published = build_ouro("ouro-6", 0).eval()
    tokens = torch.randint(50, (3, 12), generator=torch.Generator().manual_seed(0))
    found = stages_of_inference.measured(published, tokens)  # [loop, measure, layer, window]
    assert found.shape == (4, len(stages_of_inference.MEASURES), 6, 3)
    with torch.no_grad():
        p = published(tokens).logits.softmax(-1)
    entropy = -(p * p.log()).sum(-1).mean(1)
    at = stages_of_inference.MEASURES.index("lens entropy")
    torch.testing.assert_close(torch.tensor(found[-1, at, -1]), entropy)
    assert (found[:, 0] > 0).all() and (found[:, 0] < 1).all()  # even attention would have 1
    once = stages_of_inference.measured(build_ouro("feedforward-6", 0).eval(), tokens)
    np.testing.assert_allclose(once[0], found[0], atol=1e-5)  # the first loop of equal weights
