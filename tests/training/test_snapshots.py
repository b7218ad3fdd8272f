"""Snapshots of a run: which steps, what they hold, stopped and resumed."""

from __future__ import annotations

import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loopinterp.core.errors import ConfigError
from loopinterp.models import LoopedTransformer
from loopinterp.training import Run, SnapshotConfig, Trainer, TrainingConfig, train, train_seeds
from loopinterp.training.run import RunFault
from tests.refusals import naming
from tests.training.test_fitting import train_until
from tests.training.tiny_run import TINY, refused

STEPS = (0, 1, 7, 10, 13, 16)
SHORT = TINY.replace(steps=16)
CONFIG = SHORT.replace(snapshots=SnapshotConfig(kind="listed", steps=STEPS))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(CONFIG, tmp_path_factory.mktemp("run") / "whole", progress=False)


def files_of(run: Path) -> dict[str, bytes]:
    """All that a run keeps, but its lock and the checkpoint, which holds a time."""
    files = (path for path in run.rglob("*") if path.is_file() and path.parent.name != "state")
    return {str(path.relative_to(run)): path.read_bytes() for path in files}


@given(n_steps=st.integers(1, 500), every=st.integers(1, 600), ratio=st.floats(1.1, 50))
def test_steps_go_from_the_untrained_model_to_the_last_one(
    n_steps: int, every: int, ratio: float
) -> None:
    even = SnapshotConfig(kind="even", every=every).at(n_steps)
    assert even == (*range(0, n_steps, every), n_steps)
    log = SnapshotConfig(kind="log", ratio=ratio).at(n_steps)
    assert log[0] == 0 and log[-1] == n_steps and 1 in log
    assert list(log) == sorted(set(log))
    # No gap is wider than the ratio, up to rounding to whole steps.
    assert all(b <= (a + 0.5) * ratio + 0.5 for a, b in pairwise(log[1:]))
    assert SnapshotConfig().at(n_steps) == ()


def test_each_snapshot_is_the_averaged_model_of_that_step(run: Run) -> None:
    trainer = Trainer(CONFIG)
    for step in range(CONFIG.steps + 1):
        if step in STEPS:
            expected, kept = trainer.averaged_model(), run.model_at(step)
            for name, weight in expected.state_dict().items():
                assert torch.equal(kept.state_dict()[name], weight), (step, name)
        if step < CONFIG.steps:
            trainer.step()
    assert run.snapshots == STEPS
    inputs = run.task.sample(5, batch_size=2, generator=torch.Generator().manual_seed(0)).inputs
    assert torch.equal(run.model_at(16)(inputs), run.model()(inputs))  # with its loops
    folder = run.folder / "snapshots/step-7"
    alone = LoopedTransformer.from_pretrained(folder)  # a model's folder like any other
    assert torch.equal(alone(inputs, n_loops=6), run.model_at(7)(inputs))


def test_snapshots_change_nothing_else(run: Run, tmp_path: Path) -> None:
    plain = files_of(train(SHORT, tmp_path / "plain", progress=False).folder)
    kept = files_of(run.folder)
    assert plain["metrics.jsonl"] == kept["metrics.jsonl"]
    assert {name for name in kept if not name.startswith("snapshots")} == set(plain)
    plain_model = Run.load(tmp_path / "plain").model().state_dict()
    for name, weight in run.model().state_dict().items():
        assert torch.equal(weight, plain_model[name])


@pytest.mark.parametrize("step", [0, 1, 7, 8, 12])
def test_a_stopped_run_has_the_same_snapshots(
    run: Run, step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints are after 5 and 10 steps: what came after them is made again."""
    train_until(CONFIG, tmp_path, step, monkeypatch)
    assert Run.load(tmp_path).snapshots == tuple(k for k in STEPS if k <= step)
    train(CONFIG, tmp_path, progress=False)
    assert files_of(tmp_path) == files_of(run.folder)


def test_seeds_that_train_together_have_snapshots(tmp_path: Path) -> None:
    for one in train_seeds(CONFIG, [0, 1], tmp_path, progress=False):
        assert one.snapshots == STEPS
        last = one.model().state_dict()
        assert all(torch.equal(x, last[name]) for name, x in one.model_at(16).state_dict().items())


def test_what_is_not_there_is_refused(run: Run, tmp_path: Path) -> None:
    with refused(RunFault.NO_SNAPSHOT):
        run.model_at(2)
    copy = Path(shutil.copytree(run.folder, tmp_path / "copy"))
    (copy / "snapshots/step-7/config.json").unlink()  # as a kill leaves it
    assert Run.load(copy).snapshots == (0, 1, 10, 13, 16)
    other = train(CONFIG.replace(seed=1), tmp_path / "other", progress=False)
    shutil.copytree(
        other.folder / "snapshots/step-1", copy / "snapshots/step-1", dirs_exist_ok=True
    )
    with refused(RunFault.OTHER_WEIGHTS):
        Run.load(copy).model_at(1)


@pytest.mark.parametrize(
    ("setting", "snapshots"),
    [
        ("every", {"kind": "even"}),
        ("every", {"kind": "log", "every": 5}),
        ("ratio", {"kind": "even", "every": 5, "ratio": 3.0}),
        ("steps", {"kind": "listed"}),
    ],
)
def test_a_setting_without_effect_is_refused(setting: str, snapshots: dict[str, object]) -> None:
    with naming(setting, ConfigError):
        SnapshotConfig.from_dict(snapshots)


def test_a_snapshot_after_the_end_is_refused(tiny: TrainingConfig) -> None:
    with naming("snapshots.steps", ConfigError):
        tiny.replace(snapshots=SnapshotConfig(kind="listed", steps=(0, 25)))
