"""Recipes are measured, and only ``measured`` of their files is written."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analyses import measure_recipes
from analyses.measure_recipes import between, lengths, steps
from loopinterp.training import (
    RECIPES,
    Measurement,
    Recipe,
    Run,
    TrainingConfig,
    apply_settings,
    evaluate,
)

TINY = ["model.d_model=8", "model.n_heads=2", "steps=4", "curriculum.kind=none", "device=cpu"]


def tiny(*changes: str) -> TrainingConfig:
    return apply_settings(RECIPES["addition"], [*TINY, "curriculum.max_n=2", *changes])


def measured(right_up_to: int, measured_lengths: list[int]) -> Measurement:
    shares = {"uniform": {n: (1.0 if n <= right_up_to else 0.0,) for n in measured_lengths}}
    return Measurement(seeds=(0,), samples=1, exact_match=shares, minutes=1, on="paper")


@given(cutoff=st.integers(1, 40), right_up_to=st.integers(0, 400), near=st.integers(1, 9))
def test_the_end_is_found_by_halving(cutoff: int, right_up_to: int, near: int) -> None:
    measured_lengths = [cutoff, 2 * cutoff, 8 * cutoff]
    while (n := between(measured(right_up_to, measured_lengths), near)) is not None:
        assert n not in measured_lengths and n > 0
        measured_lengths = sorted([*measured_lengths, n])
    well, wrong = measured(right_up_to, measured_lengths).reach()
    if right_up_to >= 8 * cutoff:
        assert (well, wrong) == (8 * cutoff, None)
    else:
        assert wrong is not None and well <= right_up_to < wrong <= well + near


def test_lengths_are_left_out_that_cost_too_much() -> None:
    config = tiny("model.n_layers=3", "objective.extra_loops=2")
    task = config.make_task()
    assert steps(config, task, 4) == task.n_positions(4) * 3 * (task.n_loops(4) + 2)
    assert lengths(config, times=[1, 1.5, 8], samples=10, most=1e9) == (2, 3, 16)
    cheap = 10 * steps(config, task, 3)
    assert lengths(config, times=[1, 1.5, 8], samples=10, most=cheap) == (2, 3)
    assert lengths(config, times=[8], samples=10, most=1) == (2,)  # the cutoff is always measured
    fixed = tiny("objective.kind=last", "objective.hold_loops=0", "objective.n_loops=7")
    assert steps(fixed, task, 4) == task.n_positions(4) * 7


def test_what_is_written_is_what_the_runs_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    folder, out, config = tmp_path / "recipes", tmp_path / "out", tiny()
    folder.mkdir()
    file = folder / "tiny.json"
    before = {"about": "Tiny.", "config": config.to_dict(defaults=False), "tried": ["Nothing."]}
    file.write_text(json.dumps(before))
    arguments = ["--recipes", str(folder), "--out", str(out), "--seeds", "0", "3"]
    small = ["--samples", "8", "--times", "1", "2", "--on", "paper", "tiny"]
    monkeypatch.setattr(sys, "argv", ["measure_recipes", *arguments, *small])
    assert measure_recipes.main() == 0
    after = json.loads(file.read_text())
    assert list(after) == ["about", "config", "measured", "tried"]
    assert {k: v for k, v in after.items() if k != "measured"} == before
    measurement = Recipe.from_dict(after).measured
    assert (measurement.seeds, measurement.samples, measurement.on) == ((0, 3), 8, "paper")
    runs = [Run.load(out / "tiny" / "cells" / "base" / f"seed-{seed}") for seed in (0, 3)]
    assert [run.config.to_dict()["seed"] for run in runs] == [0, 3]
    by_length = measurement.exact_match["chain"]
    assert {2, 4} <= {*by_length}
    for k, run in enumerate(runs):
        evaluated = evaluate(run.model(), run.task, [*by_length], n_samples=8).data
        for n, shares in by_length.items():
            at = evaluated["exact_match"].sel(
                extra_loop=0, distribution="chain", length=n, estimate="value"
            )
            assert shares[k] == round(float(at), 4)
    assert capsys.readouterr().out.startswith("tiny: exact match ")
    times = {
        path: path.stat().st_mtime_ns for path in (out / "tiny" / "cells").rglob("*.safetensors")
    }
    assert measure_recipes.main() == 0
    # The second call resumes: it gives the same numbers, and writes no weights again.
    assert json.loads(file.read_text()) == after
    assert times == {path: path.stat().st_mtime_ns for path in times}


def test_a_recipe_that_fails_is_named_and_its_file_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    config = tiny("optimiser.lr=1e30", "optimiser.clip=none", "optimiser.warmup_steps=0")
    document = {"about": "Wild.", "config": config.to_dict(defaults=False)}
    (tmp_path / "wild.json").write_text(text := json.dumps(document))
    arguments = ["--recipes", str(tmp_path), "--out", str(tmp_path / "out"), "--seeds", "0"]
    monkeypatch.setattr(sys, "argv", ["measure_recipes", *arguments, "--times", "1"])
    assert measure_recipes.main() == 1
    error = capsys.readouterr().err
    assert "wild: " in error and "seed 0: " in error and "nan" in error
    assert (tmp_path / "wild.json").read_text() == text
    monkeypatch.setattr(sys, "argv", ["measure_recipes", *arguments, "nothing"])
    with pytest.raises(SystemExit):
        measure_recipes.main()
