from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from loopinterp.comparison import compare_programs
from loopinterp.compiler import compile_program
from loopinterp.core.errors import CheckpointError, InputError
from loopinterp.core.results import Result
from loopinterp.dynamics import convergence_study
from loopinterp.pages import explore, read_report, read_run, write_comparison, write_report
from loopinterp.pages.assets import tables_of
from loopinterp.pages.exploration import page_json
from loopinterp.pages.facts import Code, facts_of
from loopinterp.pages.report import _differing_settings, _fact_rows, _finding_rows
from loopinterp.pages.run_record import Problem, RunRecord, Trouble, spell_problem
from loopinterp.tasks import get_task
from tests.pages import synthetic


@pytest.fixture(scope="module")
def records() -> dict[str, RunRecord]:
    """A compiled model that was compared with programs, and two that were not."""
    task, records = get_task("addition"), {}
    generator = torch.Generator().manual_seed(0)
    for name, compared in (("ripple", True), ("late_ripple", False), ("plain", False)):
        model = compile_program("ripple" if name == "plain" else name, max_length=6).model
        batch = task.sample(4, batch_size=4, generator=generator)
        results: dict[str, Result] = {"convergence": convergence_study(model, batch, seed=0)}
        if compared:
            batch = task.sample(4, batch_size=24, generator=generator)
            results["programs"] = compare_programs(model, ["ripple", "late_ripple"], batch)
        config = {"task": "addition", "seed": len(records), "model": {"d_model": 8}}
        if name == "plain":
            config |= {"steps": 5}
        metrics = [{"step": k, "loss": 1 / (k + 1)} for k in range(5)]
        records[name] = RunRecord(name=name, config=config, results=results, metrics=metrics)
    return records


@pytest.fixture(scope="module")
def tables(records: dict[str, RunRecord]) -> dict[str, pd.DataFrame]:
    return tables_of(records)


def test_settings_that_differ_and_no_others(tables: dict[str, pd.DataFrame]) -> None:
    found = _differing_settings(tables, ["ripple", "late_ripple", "plain"])
    assert found.index.tolist() == [("run", "seed"), ("run", "steps")]
    assert found.loc[("run", "seed")].tolist() == ["0", "1", "2"]
    assert found.loc[("run", "steps")].isna().tolist() == [True, True, False]


def test_findings_that_differ_are_told_from_those_that_do_not(
    records: dict[str, RunRecord], tables: dict[str, pd.DataFrame]
) -> None:
    rows = _finding_rows(tables, [*records])
    for row in rows:
        assert row.differs == (len({cell.value for cell in row.cells}) > 1)
        assert len(row.cells) == 3 and row.about == next(c.text for c in row.cells if c.text)
        assert all(c.measured for c in row.cells) == ("programs" not in row.title)
    own = {f.value for f in records["ripple"].results["convergence"].findings() if f.value}
    assert own == {row.cells[0].value for row in rows if "convergence" in row.title}
    alike = _finding_rows(tables_of({"a": records["ripple"], "b": records["ripple"]}), ["a", "b"])
    assert alike and not any(row.differs for row in alike)


def test_facts_of_runs_stand_in_a_row_for_each_topic(records: dict[str, RunRecord]) -> None:
    facts = {run: facts_of(record.results) for run, record in records.items()}
    rows = _fact_rows(facts)
    assert all(len(cells) == len(records) for _, cells in rows)
    (program,) = (cells for title, cells in rows if title == "Program")
    assert [fact and fact.code for fact in program[:1]] == [Code.UNDECIDED]


def test_curves_are_the_numbers_of_the_results(
    records: dict[str, RunRecord], tables: dict[str, pd.DataFrame]
) -> None:
    curves = tables["curves"]
    of_programs = curves["figure"] == "Each program against each run"
    programs = curves[of_programs & (curves["run"] == "ripple")]
    data = records["ripple"].results["programs"].data["whole_run"].isel(model=0)
    for row in programs.itertuples():
        at = data.sel(program=row.x, stratum="all")
        assert row.value == float(at.sel(estimate="value"))
    settling = curves[(curves["panel"] == "whole answers right") & (curves["run"] == "plain")]
    right = records["plain"].results["convergence"].data["right"].values
    by_hand = [np.mean([(x[x >= 0] == 1).all() for x in loop]) for loop in right]
    assert settling["value"].tolist() == pytest.approx(by_hand)
    loss = curves[(curves["figure"] == "Training loss") & (curves["run"] == "plain")]
    assert loss["value"].tolist() == [1 / (k + 1) for k in range(5)]


def test_the_page_has_all_runs_and_gives_its_tables_back(tmp_path: Path) -> None:
    runs = [synthetic.write_run(tmp_path / name / "demo") for name in "ab"]
    config = json.loads((runs[1] / "config.json").read_text())
    (runs[1] / "config.json").write_text(json.dumps(config | {"seed": 7}))
    page = write_comparison(runs, tmp_path / "both.html")
    text = page.read_text()
    for words in ("2 runs side by side: addition", "Latched ripple", "demo (2)", "run.seed"):
        assert words in text
    back = read_report(page)
    expected = tables_of({"demo": read_run(runs[0]), "demo (2)": read_run(runs[1])})
    for name, table in expected.items():
        pd.testing.assert_frame_equal(back[name], table, check_dtype=False)
    own = read_report(write_report(runs[0], tmp_path / "one.html"))
    assert set(own["findings"]["run"]) == {"demo"} and len(own["settings"])


def test_explorers_are_given_what_was_kept_and_runs_without_are_told_how(tmp_path: Path) -> None:
    runs = [synthetic.write_run(tmp_path / name, sections=()) for name in ("<b>", "c", "d")]
    model = compile_program("ripple", max_length=4).model
    found = explore(model, get_task("addition"), n=3, examples=2, batch_size=4)
    found.save(runs[0] / "results", "explorer")
    replace(found, tokens=[]).save(runs[1] / "results", "explorer")
    text = write_comparison(runs, tmp_path / "all.html").read_text()
    given = re.findall(r'class="exploration-json">(.*?)</script>', text, re.DOTALL)
    assert given == [page_json(found)]
    assert "&lt;b&gt;</h3>" in text and "<b></h3>" not in text
    problem = spell_problem(Problem(Trouble.RESULT_VALUES, "explorer", "IndexError"))
    assert f"c: {problem}" in text
    sentence = "No examples are kept of <code>c</code>, <code>d</code>: <code>loopinterp analyze"
    assert sentence in text
    none = write_comparison(runs[1:], tmp_path / "none.html").read_text()
    assert "exploration-json" not in none and sentence in none


def test_what_cannot_be_compared_or_read_is_refused(tmp_path: Path, synthetic_run: Path) -> None:
    with pytest.raises(InputError, match=r"^runs:"):
        write_comparison([synthetic_run], tmp_path / "x.html")
    with pytest.raises(InputError, match=r"^runs:"):
        write_comparison([synthetic_run, synthetic_run], tmp_path / "x.html")
    with pytest.raises(CheckpointError, match=r"^run "):
        write_comparison([synthetic_run, tmp_path / "none"], tmp_path / "x.html")
    (tmp_path / "other.html").write_text("<p>mine</p>")
    with pytest.raises(CheckpointError, match=r"^page "):
        read_report(tmp_path / "other.html")
