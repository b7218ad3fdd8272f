"""Device, random streams, processes."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from loopinterp.core.errors import ConfigError
from loopinterp.models import LoopedTransformer
from loopinterp.training import Run, Trainer, TrainingConfig, train, train_seeds
from loopinterp.training.device import (
    Processes,
    cpu_threads,
    joined,
    make_bind,
    stream,
    with_noise,
)
from tests.refusals import naming
from tests.warm_python import WarmPython


def test_threads_are_set_for_a_while_only() -> None:
    before = torch.get_num_threads()
    with cpu_threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before
    with cpu_threads(None):
        assert torch.get_num_threads() == before


def test_noise_enters_before_each_step(tiny: TrainingConfig) -> None:
    model = LoopedTransformer(tiny.model)
    inputs = torch.tensor([[4, 1, 2], [4, 0, 3]])
    plain = model.bind(inputs)
    noise = torch.randn((3, *plain.h0.shape), generator=torch.Generator().manual_seed(3))
    noisy = with_noise(plain, iter(noise))
    torch.testing.assert_close(noisy.step(plain.h0), plain.step(plain.h0 + noise[0]))
    one = noisy.select(slice(0, 1))
    assert one.step(one.h0).shape == (1, 3, 8)
    assert not torch.equal(one.step(one.h0), plain.step(plain.h0)[:1])


def check_compiled(config: TrainingConfig, device: str) -> None:
    model = LoopedTransformer(config.model).to(device)
    plain, compiled = model.bind, make_bind(model, compiled=True)
    for inputs in (
        torch.tensor([[4, 1, 2], [4, 0, 3]] * 2),
        torch.tensor([[4, 1, 2, 3, 0]] * 3),
    ):
        inputs = inputs.to(device)
        one, other = plain(inputs), compiled(inputs)
        torch.testing.assert_close(one.h0, other.h0)
        state = one.step(one.h0).detach()  # a state with a gradient would be compiled again
        torch.testing.assert_close(other.step(other.h0), state)
        part = other.select(slice(0, 2))
        torch.testing.assert_close(part.step(state[:2]), one.step(state)[:2])
        torch.testing.assert_close(part.readout(state), one.readout(state))


@pytest.mark.slow
# PyTorch's compiler warns of PyTorch's own deprecations, and cannot trace the type checks.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.usefixtures("no_type_checks")
def test_the_traced_step_is_the_step(tiny: TrainingConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    traced = functools.partial(torch.compile, backend="eager")
    monkeypatch.setattr(torch, "compile", traced)
    check_compiled(tiny, "cpu")


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.usefixtures("no_type_checks")
def test_the_compiled_step_is_the_step(tiny: TrainingConfig) -> None:
    check_compiled(tiny, "cuda")


def draw(seed: int, purpose: str) -> list[float]:
    return torch.rand(4, generator=stream(seed, purpose)).tolist()


def test_a_stream_is_repeatable() -> None:
    assert draw(3, "data") == draw(3, "data")


def test_seeds_and_purposes_give_different_streams() -> None:
    drawn = [draw(seed, purpose) for seed in (0, 1) for purpose in ("data", "noise")]
    assert len({tuple(values) for values in drawn}) == 4


def test_the_global_generator_is_left_alone() -> None:
    before = torch.random.get_rng_state()
    draw(0, "data")
    assert torch.equal(before, torch.random.get_rng_state())


ROOT = Path(__file__).resolve().parent.parent.parent
ABACUS = {
    "positions": "abacus",
    "relative_window": None,
    "digit_tokens": [0, 1, 2, 3],
    "n_ctx": 40,
    "abacus_max_offset": 30,
}
KINDS: dict[str, dict[str, Any]] = {
    "noise, interval": {},
    "held": {"objective": {"hold_loops": 2, "hold_share": 0.5}},
    "last": {"objective": {"kind": "last"}},
    "progressive": {"objective": {"kind": "progressive"}},
    "every": {"objective": {"kind": "every", "n_loops": 2, "weights": [1.0, 3.0]}},
    "drawn": {"objective": {"kind": "drawn", "n_loops": 4}},
    "an offset each": {"model": ABACUS, "offset_per_example": True},
}


class Table:
    """Where those in step lay what they have, and take what all have."""

    def __init__(self, count: int) -> None:
        self.laid: list[list[Tensor]] = [[] for _ in range(count)]
        self.barrier = threading.Barrier(count, timeout=60)


@dataclass(frozen=True)
class InStep(Processes):
    """One of several threads that does what a process would."""

    table: Table = field(default_factory=lambda: Table(1))

    def add_up(self, tensors: Any) -> None:
        self.table.laid[self.rank] = [x.clone() for x in tensors]
        self.table.barrier.wait()
        for x, parts in zip(tensors, zip(*self.table.laid, strict=True)):
            x.copy_(sum(parts))
        self.table.barrier.wait()


def configured(tiny: TrainingConfig, kind: str) -> TrainingConfig:
    values = tiny.to_dict()
    values |= {key: value for key, value in KINDS[kind].items() if key != "model"}
    values["model"] |= KINDS[kind].get("model", {})
    return TrainingConfig.from_dict(values | {"batch_size": 5})


@pytest.mark.parametrize(
    ("kind", "count"), [*((kind, 3) for kind in KINDS), ("noise, interval", 2)]
)
def test_shares_of_a_batch_make_the_step_of_the_whole(
    tiny: TrainingConfig, kind: str, count: int
) -> None:
    config, table = configured(tiny, kind), Table(count)
    single = Trainer(config)
    expected = [single.step() for _ in range(4)]
    shares = [Trainer(config, InStep(rank, count, table)) for rank in range(count)]
    with ThreadPoolExecutor(count) as threads:
        metrics = list(threads.map(lambda t: [t.step() for _ in range(4)], shares))
    assert all(one == metrics[0] for one in metrics)  # to the last bit: none needs another's state
    for one, other in zip(metrics[0], expected):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-6)
    generator = torch.Generator().manual_seed(0)
    inputs = config.make_task().sample(3, batch_size=5, generator=generator).inputs
    with torch.no_grad():
        # Weights that change nothing, as biases of keys, are moved by rounding alone.
        ours, theirs = (t.averaged_model()(inputs, n_loops=3) for t in (shares[-1], single))
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    states = [share.state() for share in shares]
    for name, tensor in states[0][0].items():
        assert all(torch.equal(tensor, state[0][name]) for state in states), name
    for name in ("objective", "noise"):
        assert torch.equal(*(t.generators[name].get_state() for t in (single, shares[0])))


def test_a_step_that_is_not_finite_for_one_is_so_for_all(tiny: TrainingConfig) -> None:
    table = Table(2)
    shares = [Trainer(tiny, InStep(rank, 2, table)) for rank in range(2)]
    with torch.no_grad():
        shares[1].model.unembedding.weight[0, 0] = torch.nan

    def said(trainer: Trainer) -> str:
        with naming("loss at step 1") as error:
            trainer.step()
        return str(error.value)

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(said, shares)
    assert first == second


TORCHRUN = """\
import torch.distributed.run
from loopinterp import cli
launch = torch.distributed.run.elastic_launch
def forked(config, entrypoint, **options):
    config.start_method = "fork"
    run = launch(config, cli.main, **options)
    return lambda *words: run(list(words[words.index("loopinterp") + 1:]))
torch.distributed.run.elastic_launch = forked
torch.distributed.run.main()
"""
"""What torchrun does, but that its processes are forked, with everything imported."""


def started(
    python: WarmPython, folder: Path, config: Path, count: int = 2
) -> subprocess.CompletedProcess[str]:
    launcher = ["--standalone", f"--nproc-per-node={count}", "-m", "loopinterp"]
    words = ["train", "--config", str(config), "--out", str(folder), "--json"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return python.run("-c", TORCHRUN, *launcher, *words, cwd=ROOT, env=environment, timeout=240)


@pytest.mark.slow
def test_torchrun_goes_on_with_a_run_of_one_process(
    tiny: TrainingConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    warm_python: WarmPython,
) -> None:
    """It ends as the one process would have; one process writes, and says so once."""
    full, real = train(tiny, tmp_path / "whole", progress=False), Trainer.advance

    def stopping(self: Trainer) -> None:
        if self.steps_done == 12:
            raise KeyboardInterrupt
        real(self)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "advance", stopping)
        with pytest.raises(KeyboardInterrupt):
            train(tiny, tmp_path / "run", progress=False)
    assert Run.load(tmp_path / "run").steps_done == 10
    (tmp_path / "config.json").write_text(json.dumps(tiny.to_dict()))
    done = started(warm_python, tmp_path / "run", tmp_path / "config.json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == 24
    run = Run.load(tmp_path / "run")
    ours, theirs = run.metrics(), full.metrics()
    assert ours["step"].tolist() == theirs["step"].tolist()
    for name in ("loss", "exact_match", "grad_norm", "longest_n", "lr"):
        assert ours[name].tolist() == pytest.approx(theirs[name].tolist(), rel=1e-4), name
    inputs = tiny.make_task().sample(3, batch_size=8, generator=torch.Generator()).inputs
    with torch.no_grad():
        logits = [one.model()(inputs) for one in (run, full)]
    torch.testing.assert_close(*logits, rtol=1e-3, atol=1e-4)


def test_one_process_alone_needs_no_group(tiny: TrainingConfig) -> None:
    with joined(tiny) as processes:
        assert processes == Processes(0, 1) and processes.first


def test_what_cannot_be_shared_is_refused(
    tiny: TrainingConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "5")
    with naming("batch_size", ConfigError):
        train(tiny, tmp_path / "run", progress=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with naming("device 'cuda:0'"):
        train(tiny.replace(device="cuda:0"), tmp_path / "run", progress=False)
    with naming("processes"):
        train_seeds(tiny, [0, 1], tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()
