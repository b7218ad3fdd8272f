"""Analysis and report of a run of any task: what means something there, and no empty section."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from loopinterp.app import runs, workflow
from loopinterp.app.catalogue import STUDIES
from loopinterp.app.study import SkipReason, spell_skip
from loopinterp.pages import write_report
from loopinterp.programs import list_programs
from loopinterp.training import RECIPES, GivenModelConfig, Run, TrainingConfig, apply_settings

pytestmark = pytest.mark.usefixtures("small_studies")

SMALL = ["steps=20", "curriculum.max_n=3", "model.d_model=16", "model.n_heads=2"]
OF_ADDITION = {"wavefront", "hold-time"}
OF_LIMITS = ("reachability", "input-dependence", "local-stability", "basins", "geometry")
"""Studies that ask for no program."""


def _config(task: str) -> TrainingConfig:
    plain = task not in RECIPES
    return apply_settings(runs.configure(task=task, without_recipe=plain), SMALL)


def _analysed(folder: Path, exclude: Sequence[str] = ()) -> tuple[workflow.Analysis, str]:
    """Every other study of a run, and the words of its report."""
    workflow.evaluate_run(folder, samples=8, progress=False)
    analysis = workflow.analyze_run(folder, exclude=exclude, progress=False)
    assert not analysis.failed
    page = write_report(folder).read_text()
    return analysis, page[page.index("<body>") : page.index('<script type="text/plain"')]


def _assert_no_empty_section(page: str) -> None:
    for section in re.findall(r"<section id=.*?</section>", page, flags=re.DOTALL):
        assert "<figure" in section or "<li>" in section
    assert "cannot be shown" not in page and "cannot be read and is not shown" not in page


@pytest.mark.slow
def test_a_trained_run_of_another_task_is_analysed_and_reported(tmp_path: Path) -> None:
    task = "parity"
    run = runs.train_run(_config(task), tmp_path / task, progress=False)
    analysis, page = _analysed(run.folder)
    applicable = {study.name for study in STUDIES} - OF_ADDITION
    assert set(analysis.results) | set(analysis.skipped) == applicable
    assert set(analysis.skipped) <= {"subspaces"}  # no exchange changes what always answers alike
    assert analysis.results["programs"].data.sizes["program"] == len(list_programs(task))
    assert not re.search(r"\b(a|the|its|each|every|of) carry\b", page.lower())
    _assert_no_empty_section(page)


@pytest.mark.slow
def test_a_compiled_model_is_analysed_and_reported_and_said_to_be_untrained(
    tmp_path: Path,
) -> None:
    out = tmp_path / "compiled"
    runs.compile_run("prefix_xor", out, max_length=8, disguises=["rotate"])
    analysis, page = _analysed(out)
    assert set(analysis.results) == {study.name for study in STUDIES} - OF_ADDITION
    assert analysis.skipped == {}
    verdicts = [f for f in workflow.in_reading_order(analysis.results.values()) if f.good]
    assert (verdicts[0].section, verdicts[0].value) == ("verdict", "prefix xor")
    config = Run.load(out).config
    assert isinstance(config, GivenModelConfig)
    origin = config.origin
    assert origin and origin in page
    assert "longest in training" not in page
    _assert_no_empty_section(page)


@pytest.mark.slow
def test_what_no_stock_program_solves_has_no_verdict_and_says_why(tmp_path: Path) -> None:
    config = _config("prefix_sum")
    wider = config.model.replace(d_vocab=5, d_vocab_out=3)
    config = config.replace(model=wider, task_settings={"modulus": 3})
    run = runs.train_run(config, tmp_path / "run", progress=False)
    analysis, page = _analysed(run.folder, exclude=OF_LIMITS)
    without = {"programs", "subspaces", "decodability", "heads", "ground-truth"}
    assert set(analysis.skipped) == without
    skip = analysis.skipped["programs"]
    assert skip.reason is SkipReason.NO_PROGRAM and spell_skip(skip) in page
    _assert_no_empty_section(page)
