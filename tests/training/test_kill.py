"""A run killed with SIGKILL again and again ends like one that was never touched."""

from __future__ import annotations

import multiprocessing
import random
import signal
from pathlib import Path

import pytest
import torch

from loopinterp.storage import read_tensors
from loopinterp.training import Run, TrainingConfig, train
from loopinterp.training.fitting import train as target

KILLS = 20


def assert_whole(run: Run) -> int:
    """Everything that is there can be read; returns the steps behind the checkpoint."""
    if (run.folder / "model" / "model.safetensors").exists():
        run.model()
    if (run.folder / "metrics.jsonl").exists():
        run.metrics()
    return run.steps_done


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_killed_at_twenty_random_moments(tiny: TrainingConfig, tmp_path: Path) -> None:
    config = tiny.replace(steps=300, checkpoint_every=3, log_every=1)
    reference = train(config, tmp_path / "whole", progress=False)
    # Long enough to start and make some steps, short enough not to finish most of the time.
    longest = 0.15 * reference.seconds + 0.1
    # A fork has everything imported, so that most kills hit the training and not the start.
    processes = multiprocessing.get_context("fork")
    moments = random.Random(0)
    kills, kept, folders, in_the_middle = 0, 0, [tmp_path / "run0"], 0
    while kills < KILLS:
        arguments = {"progress": False}
        child = processes.Process(target=target, args=(config, folders[-1]), kwargs=arguments)
        child.start()
        child.join(timeout=moments.uniform(0.0, longest))
        child.kill()
        child.join()
        if child.exitcode == 0:
            folders.append(tmp_path / f"run{len(folders)}")
            kept = 0
            continue
        assert child.exitcode == -signal.SIGKILL
        kills += 1
        if not (folders[-1] / "config.json").exists():
            assert kept == 0
            continue
        steps = assert_whole(Run.load(folders[-1]))
        assert steps >= kept
        in_the_middle += kept < steps < config.steps
        kept = steps
    assert in_the_middle >= 3
    for folder in folders:
        run = train(config, folder, progress=False)
        assert len([p for p in folder.rglob("*") if p.is_file()]) == 6
        for name in ("metrics.jsonl", "model/model.safetensors"):
            assert (folder / name).read_bytes() == (reference.folder / name).read_bytes()
        ours, theirs = (
            read_tensors(r.folder / "state/checkpoint.safetensors") for r in (run, reference)
        )
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
