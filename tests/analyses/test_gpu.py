"""Slices are done once, and gone on with; what needs a GPU says so. No GPU is needed for that."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from analyses import gpu
from analyses.benchmarks import timing
from analyses.benchmarks.timing import parser, settle
from analyses.gpu import PAPER, ROOT, SEEDS, Slice, paper_config, run, slices, train_slice

WRITES = "import pathlib; pathlib.Path(r'{result}').write_text('done')"


def commanded(*arguments: str, out: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OUT": str(out), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, "-m", "analyses.gpu", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_without_a_gpu_one_sentence_says_so(tmp_path: Path) -> None:
    done = commanded("--slice", "tests", out=tmp_path / "out")
    assert done.returncode == 2
    assert done.stderr == "make gpu: this machine has no GPU that PyTorch can use\n"
    assert not (tmp_path / "out").exists()


def test_the_list_says_what_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "benchmark-forward.json").write_text("{}")
    monkeypatch.setattr(sys, "argv", ["gpu", "--list", "--out", str(tmp_path)])
    gpu.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [part.name for part in slices()]
    done = [line.split()[0] for line in lines if " done " in line]
    assert done == ["benchmark-forward"]


def test_a_slice_that_is_not_there_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu", "--slice", "paper-chess"])
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    assert ended.value.code == 2 and "got paper-chess" in capsys.readouterr().err


def test_every_slice_ends_within_ten_minutes() -> None:
    assert len({part.name for part in slices()}) == len(slices())
    for part in slices():
        assert part.limit < 600 and sum("{result}" in word for word in part.command) == 1


def test_a_slice_is_done_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    part = Slice("one", ("-c", f"{WRITES}; print('ran')"))
    assert run(part, tmp_path) and run(part, tmp_path)
    assert (tmp_path / "one.json").read_text() == "done"
    assert (tmp_path / "one.txt").read_text() == "ran\n"
    assert "is done already" in capsys.readouterr().out


def test_what_fails_or_takes_too_long_is_not_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failing = Slice("failing", ("-c", f"{WRITES}; raise SystemExit(3)"))
    silent = Slice("silent", ("-c", "'{result}'"))
    slow = Slice("slow", ("-c", "import time; '{result}'; time.sleep(60)"), limit=0.5)
    for part, why in ((failing, "status 3"), (silent, "status 0"), (slow, "begins anew")):
        assert not run(part, tmp_path)
        assert why in capsys.readouterr().out
        assert not part.result(tmp_path).exists()
    assert run(Slice("slow", ("-c", WRITES)), tmp_path)


@pytest.mark.parametrize("task", PAPER)
def test_the_published_settings_are_those_of_a_model(task: str) -> None:
    config = paper_config(task)
    assert (config.model.d_model, config.steps, config.batch_size) == (256, 100_000, 64)
    assert config.model.n_heads * config.model.head_width == 256
    assert (config.objective.kind, config.objective.hold_loops) == ("step_dependent", 0)
    assert (config.curriculum.first_longest, config.precision) == (1, "bf16")


def test_a_training_slice_goes_on_where_it_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from loopinterp.training import Run, Trainer

    real, result = Trainer.finish, tmp_path / "paper.json"

    def stopping(self: Trainer, *made: object) -> None:
        if self.steps_done == 6:
            raise KeyboardInterrupt
        real(self, *made)  # type: ignore[arg-type]

    monkeypatch.setattr(gpu, "SEEDS", SEEDS[:2])
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "finish", stopping)
        with pytest.raises(KeyboardInterrupt):
            train_slice("parity", result, device="cpu", small=True)
    run = Run.load(tmp_path / "parity-runs/seed-0")
    assert run.steps_done == 4 and not result.exists()
    train_slice("parity", result, device="cpu", small=True)
    said = json.loads(result.read_text())
    assert (run.steps_done, said["lengths"], len(said["exact_match"])) == (12, [3], 2)
    assert said["steps_per_second"] > 0 and said["at_full_length"]["milliseconds"] > 0


# The clock of benchmarks


def test_a_benchmark_without_its_device_ends_with_one_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = parser("", rounds=1, device=True).parse_args(["--device", "cuda"])
    monkeypatch.setattr(timing.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        settle(options)
    assert ended.value.code == 2 and capsys.readouterr().err.count("\n") == 1
    monkeypatch.setattr(timing.torch.cuda, "is_available", lambda: True)
    options.clock = "cpu"
    with pytest.raises(SystemExit):
        settle(options)


def test_the_clock_waits_for_the_device_before_it_starts_and_stops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(timing.torch.cuda, "synchronize", lambda device: seen.append(device))
    monkeypatch.setitem(timing.CLOCKS, "wall", lambda: seen.append("clock") or 0.0)
    timing._seconds(lambda: seen.append("run"), 2, "wall", "cuda")
    assert seen == ["run", "cuda", "clock", "run", "run", "cuda", "clock"]


def test_the_share_of_the_peak_counts_matrix_products(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(timing.torch.cuda, "get_device_name", lambda _: "NVIDIA A100-SXM4-40GB")
    a, b = torch.zeros(10, 20), torch.zeros(20, 30)
    found = timing.of_peak(lambda: a @ b, 0.5, "cuda")
    assert found["flops"] == 2 * 10 * 20 * 30 and found["per_second"] == 2
    assert found["share_of_bf16_peak"] == pytest.approx(12000 / 0.5 / 312e12)
    monkeypatch.setattr(timing.torch.cuda, "get_device_name", lambda _: "NVIDIA Riva 128")
    assert "share_of_bf16_peak" not in timing.of_peak(lambda: a @ b, 0.5, "cuda")
