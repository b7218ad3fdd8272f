"""Training dynamics: against runs of known models, direct measurements, and arrays by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from loopinterp.app import Milestone, TrainingDynamics, training_dynamics_study
from loopinterp.compiler import compile_program
from loopinterp.core.errors import InputError
from loopinterp.core.results import load_result, study
from loopinterp.models import LoopRule
from loopinterp.probing.probe_grid import with_random_weights
from loopinterp.tasks import IGNORE, get_task
from loopinterp.training import RECIPES, Run, SnapshotConfig, apply_settings, evaluate, train
from loopinterp.training.run import RunFault
from tests.refusals import naming
from tests.training.tiny_run import TINY, refused


@dataclass(frozen=True)
class Known:
    """A run whose snapshots are given: a program with shuffled weights, then the program."""

    models: dict[int, Any]
    task: Any
    cutoff: int = 4
    folder: Path = Path("known")

    @property
    def config(self) -> Any:
        return SimpleNamespace(distribution=None)

    @property
    def snapshots(self) -> tuple[int, ...]:
        return tuple(self.models)

    def model_at(self, step: int) -> Any:
        return self.models[step]


@cache
def studied(program: str = "ripple") -> TrainingDynamics:
    """Of a program: shuffled, whole, shuffled, whole, whole."""
    whole = compile_program(program, max_length=12).model
    shuffled = with_random_weights(whole, seed=0)
    run: Any = Known(dict(zip((0, 10, 20, 30, 40), (shuffled, whole, shuffled, whole, whole))),
                     get_task("addition"))  # fmt: skip
    return training_dynamics_study(run, lengths=[4, 10], n_samples=48, programs=["ripple"])


def test_a_known_program_is_found_in_the_snapshots_that_have_it() -> None:
    result = studied()
    has = np.array([False, True, False, True, True])
    for milestone in (Milestone.RIGHT, Milestone.GENERALISES, Milestone.CONVERGES_RIGHT,
                      Milestone.READABLE, Milestone.PROGRAM):  # fmt: skip
        reached = result.reached(milestone)
        assert reached is not None and reached.values.tolist() == has.tolist(), milestone
        assert result.step_of(milestone) == 30
    # The carry of a ripple moves one position a loop.
    loops = result.front.sel(step=40)
    assert np.diff(loops.values).tolist() == [1.0] * (loops.size - 1)
    assert result.speed.sel(step=[10, 40]).values == pytest.approx([1, 1])
    assert np.isnan(result.speed.sel(step=0))
    assert result.closest_program == "ripple"
    # The control has nothing in any snapshot.
    assert not (result.data["probe_random"].max("loop") >= 0.95).all("distance").any()


def test_equal_snapshots_have_equal_rows_and_loops_are_those_of_an_evaluation() -> None:
    result = studied()
    data = result.data.drop_vars("step")
    for name in ("exact_match", "residual", "converged", "probe", "whole_run"):
        np.testing.assert_array_equal(data[name][1], data[name][4])
    whole = compile_program("ripple", max_length=12).model
    direct = evaluate(whole, get_task("addition"), [4, 10], n_samples=48, loops=[3, 5],
                      distributions=[get_task("addition").distributions[0]])  # fmt: skip
    expected = direct.data["loop_exact_match"].sel(estimate="value").isel(distribution=0)
    got = result.data["loop_exact_match"].sel(step=40, loop=[3, 5])
    np.testing.assert_array_equal(got, expected)
    # A token converges once, and one that is right there has converged.
    assert (result.data["converged"].diff("loop") >= 0).all()
    assert (result.data["converged_right"] <= result.data["converged"]).all()


def test_a_run_is_studied_saved_and_drawn(tmp_path: Path) -> None:
    config = TINY.replace(snapshots=SnapshotConfig(kind="listed", steps=(0, 6, 24)))
    run = train(config, tmp_path / "run", progress=False)
    options: Any = {"lengths": [3, 6], "n_samples": 16, "programs": []}
    result = training_dynamics_study(run, **options)
    assert result.data["step"].values.tolist() == [0, 6, 24]
    assert "whole_run" not in result.data and "cells" not in result.data
    again = training_dynamics_study(run, steps=[6], **options)
    assert again.data["probe"].sel(step=6).equals(result.data["probe"].sel(step=6))
    read = load_result(result.save(tmp_path, "dynamics"))
    assert isinstance(read, TrainingDynamics)
    assert read.data.equals(result.data)
    assert len(read.findings()) == 1 + sum(read.reached(m) is not None for m in Milestone)
    maps, lines = read.figures()
    assert len(list(maps.plot.select_traces({"type": "heatmap"}))) == 4
    assert len(lines.plot.data) >= 6
    weights = result.provenance.weights
    assert len(set(weights)) == 3
    with refused(RunFault.NO_SNAPSHOT):
        training_dynamics_study(run, steps=[7])


def test_the_tables_of_a_finite_state_model(tmp_path: Path) -> None:
    changes = ["steps=6", "curriculum.max_n=3", "snapshots.kind=even", "snapshots.every=3"]
    config = apply_settings(RECIPES["parity-finite"], changes).replace(device="cpu")
    run = train(config, tmp_path, progress=False)
    options: Any = {"n_samples": 8, "lengths": [3], "programs": []}
    result = training_dynamics_study(run, variable=running_parity, **options)
    assert result.data["final_table"].isel(step=-1) == 1
    assert (result.data["cells"] >= 1).all()
    assert result.variable == "running_parity"
    assert result.data["distance"].values.tolist() == [1, 2, 3]
    assert result.step_of(Milestone.AUTOMATON) is not None
    with naming("variable"):
        training_dynamics_study(run, variable=lambda x: torch.full_like(x, IGNORE), **options)


def running_parity(inputs: Tensor) -> Tensor:
    is_bit = inputs < 2
    return ((inputs * is_bit).cumsum(1) % 2).masked_fill(~is_bit, IGNORE)


def test_a_run_without_snapshots_or_loops_is_refused(tmp_path: Path) -> None:
    run = train(TINY.replace(steps=1), tmp_path, progress=False)
    with pytest.raises(InputError, match="snapshots of run"):
        training_dynamics_study(Run.load(tmp_path))
    model = run.model()
    model.loop_rule = LoopRule(1)
    one: Any = Known({0: model}, run.task)
    with naming("model"):
        training_dynamics_study(one)


def by_hand(shares: Sequence[float], probe: np.ndarray | None = None) -> TrainingDynamics:
    """A result whose exact match is given by step."""
    n = len(shares)
    exact = np.repeat(np.array(shares, float)[:, None, None], 3, -1)  # [step, length, estimate]
    probe = np.zeros((n, 9, 4)) if probe is None else probe
    zeros = np.zeros((n, 9))
    with study(0) as watch:
        return TrainingDynamics.of(
            watch,
            coords={"step": [10 * k for k in range(n)], "length": [4], "loop": range(9),
                    "distance": range(1, 5)},
            exact_match=exact, loop_exact_match=np.zeros((n, 9, 1)), residual=zeros,
            converged=zeros, converged_right=zeros, probe=probe, probe_random=probe * 0,
            majority=np.zeros(4),
            task="addition", cutoff=4, variable="carry", distance="chain length", threshold=0.9,
            n_samples=8,
        )  # fmt: skip


@given(shares=st.lists(st.sampled_from([0.0, 0.5, 0.9, 1.0]), min_size=1, max_size=8))
@settings(max_examples=40)
def test_a_milestone_is_the_first_step_from_which_all_snapshots_have_it(
    shares: list[float],
) -> None:
    result = by_hand(shares)
    good = [k for k in range(len(shares)) if min(shares[k:]) >= 0.9]
    assert result.step_of(Milestone.RIGHT) == (10 * good[0] if good else None)
    assert result.step_of(Milestone.AUTOMATON) is None


@pytest.mark.parametrize("per_loop", [0.5, 1, 2])
def test_the_speed_of_a_front_drawn_by_hand(per_loop: float) -> None:
    loops, distance = np.arange(9)[:, None], np.arange(1, 5)
    moving = (distance <= per_loop * loops).astype(float)[None]
    result = by_hand([0, 0], np.concatenate([np.zeros_like(moving), moving]))
    assert np.isnan(result.speed[0])
    # Whole loops only: a front of two positions a loop reaches 1 and 2, then 3 and 4.
    first = np.ceil(distance / per_loop)
    assert result.front[1].values.tolist() == first.tolist()
    slope = np.polyfit(distance, first, 1)[0]
    assert float(result.speed[1]) == pytest.approx(1 / slope)
    at_once = replace(result, data=result.data.assign(probe=result.data["probe"] * 0 + 1))
    assert np.isinf(at_once.speed).all()
