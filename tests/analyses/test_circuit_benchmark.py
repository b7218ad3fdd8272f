"""The leaderboards are what the files say; every tool is scored on every model; chance fails."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from analyses.circuit_benchmark import (
    DECOMPILED,
    FILE,
    PAGE,
    SCORES,
    WITHOUT,
    main,
    measured,
    tables,
)
from analyses.tables_in_pages import PAGES, RESULTS, put
from loopinterp.benchmark import (
    OWN_EDGE_METHODS,
    TRAINED,
    Exercise,
    benchmark_models,
    make_benchmark,
)
from loopinterp.core.errors import InputError

STORED = {kind: pd.read_csv(RESULTS / FILE.format(kind)) for kind in SCORES}
NAMES = {model.name for model in benchmark_models()}


def test_the_page_says_what_the_files_say() -> None:
    text = (PAGES / PAGE).read_text()
    assert put(text, tables(RESULTS)) == text


@pytest.mark.parametrize("kind", SCORES)
def test_every_tool_is_scored_on_every_model(kind: str) -> None:
    known = {name for name in NAMES if kind != "edges" or not name.endswith(TRAINED)}
    for method, rows in STORED[kind].groupby("method"):
        if ":" in str(method):  # code from outside, which needs a checkout to be run again
            assert {*rows["model"]} <= known
        else:
            assert {*rows["model"]} == known


def test_scores_are_shares() -> None:
    edges = STORED["edges"]
    assert edges[["auroc", "average_precision"]].stack().between(0, 1).all()
    assert (edges["n_true"] < edges["n_edges"]).all()
    assert {*edges["method"]} >= {*OWN_EDGE_METHODS}


def test_the_best_method_is_beyond_the_controls() -> None:
    edges = STORED["edges"].query("graph == 'tied' and truth == 'program'")
    auroc = {method: rows["auroc"].mean() for method, rows in edges.groupby("method")}
    best = max(auroc, key=lambda method: auroc[method])
    assert best not in ("magnitude", "random")
    assert auroc[best] >= 0.95
    assert abs(auroc["random"] - 0.5) < 0.1


def test_no_tool_of_ours_gives_a_false_name() -> None:
    assert (STORED["program"]["outcome"] != "false name").all()
    without = STORED["program"][STORED["program"]["method"] == WITHOUT]
    assert (without["outcome"] == "no program").mean() > 0.9  # others are equivalent


@pytest.mark.slow
def test_a_function_of_ones_own_is_scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(
        "def edges(exercise):\n    return {('input', 'block.0.mlp', 0): 1.0}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    make_benchmark(tmp_path / "made", ["prefix_xor.bare"])
    results, page = tmp_path / "results", tmp_path / "page.md"
    results.mkdir()
    for kind in SCORES:
        STORED[kind].to_csv(results / FILE.format(kind), index=False)
    pd.read_csv(RESULTS / DECOMPILED).to_csv(results / DECOMPILED, index=False)
    page.write_text((PAGES / PAGE).read_text())
    monkeypatch.setattr(
        "sys.argv",
        ["circuit_benchmark", "--folder", str(tmp_path / "made"), "--kind", "edges", "--method",
         "mine:edges", "--results", str(results), "--page", str(page)],
    )  # fmt: skip
    main()
    measured = pd.read_csv(results / FILE.format("edges"))
    mine = measured[measured["method"] == "mine:edges"]
    assert {*mine["model"]} == {"prefix_xor.bare"}
    assert len(measured) == len(STORED["edges"]) + len(mine)
    assert "mine:edges" in page.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("kind", SCORES)
def test_what_is_kept_is_found_again(kind: str, tmp_path: Path) -> None:
    make_benchmark(tmp_path, ["prefix_xor.noisy"])
    anew = measured(tmp_path, "prefix_xor.noisy", kind, "")
    stored = STORED[kind].query("model == 'prefix_xor.noisy'")
    keys = [name for name in ("method", "graph", "truth") if name in anew]
    both = anew.merge(stored, on=keys, suffixes=("", "_kept"))
    assert len(both) == len(anew)
    score = {"edges": "auroc", "program": "told_apart", "variables": "iia"}[kind]
    assert both[score].fillna(-1).tolist() == pytest.approx(
        both[f"{score}_kept"].fillna(-1).tolist(), abs=0.02
    )


def test_a_tool_that_is_not_there_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from analyses.outside_eap_ig import scores

    monkeypatch.setenv("EAP_IG", "/nowhere")
    about = benchmark_models()[0]
    exercise = Exercise(about.compiled.model, about.task, about.n, about.n_loops, *about.pairs())
    with pytest.raises(InputError) as caught:
        scores(exercise)
    assert (caught.value.what, caught.value.given) == ("EAP_IG", "'/nowhere'")
