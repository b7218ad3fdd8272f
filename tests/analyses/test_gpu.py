"""Slices are done once, and gone on with; what needs a GPU says so. No GPU is needed for that."""

from __future__ import annotations

import ast
import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

from analyses import gpu
from analyses.benchmarks import timing
from analyses.benchmarks.timing import parser, settle
from analyses.gpu import (
    ROOT,
    SEEDS,
    Slice,
    marked_tests,
    run,
    show_scores,
    slices,
    sweep_slice,
    train_slice,
)
from analyses.published_settings import ABACUS, PAPER, abacus_config, paper_config
from loopinterp import models
from loopinterp.core.results import load_result
from loopinterp.models import LoopedTransformer
from loopinterp.tasks import AbacusAddition
from loopinterp.training import Run, Trainer, fitting
from loopinterp.training import trainer as trainer_module
from loopinterp.training.seeds import advance_together
from tests.pretend_gpu import DEVICE, pretend_gpu
from tests.warm_python import WarmPython

WRITES = "import pathlib; pathlib.Path(r'{result}').write_text('done')"


def test_without_a_gpu_one_sentence_says_so(tmp_path: Path, warm_python: WarmPython) -> None:
    environment = os.environ | {"OUT": str(tmp_path / "out"), "CUDA_VISIBLE_DEVICES": ""}
    command = ["-m", "analyses.gpu", "--slice", "benchmark-forward"]
    done = warm_python.run(*command, cwd=ROOT, env=environment, timeout=120)
    assert done.returncode == 2
    assert done.stderr.startswith("make gpu: ") and done.stderr.count("\n") == 1
    assert "no GPU" in done.stderr
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
    slow = Slice("slow", ("-c", "import time; '{result}'; time.sleep(60)"), limit=0.2)
    for part, why in ((failing, "status 3"), (silent, "status 0"), (slow, "begins anew")):
        assert not run(part, tmp_path)
        assert why in capsys.readouterr().out
        assert not part.result(tmp_path).exists()
    assert run(Slice("slow", ("-c", WRITES)), tmp_path)


def test_each_file_with_a_test_for_a_gpu_is_a_slice() -> None:
    def marks(file: Path) -> bool:
        text = file.read_text()
        nodes = ast.walk(ast.parse(text)) if "gpu" in text else ()
        return "pytest.mark.gpu" in {ast.unparse(n) for n in nodes if isinstance(n, ast.Attribute)}

    marked = {file for file in (ROOT / "tests").rglob("test_*.py") if marks(file)}
    assert marked == {*marked_tests()} and len(marked) > 4
    named = {part.command[-1] for part in slices() if part.name.startswith("tests-")}
    assert named == {*map(str, marked)}


def test_a_sweep_at_paper_scale_is_a_slice_whose_result_is_its_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = json.loads((ROOT / "analyses/sweeps/smoke.json").read_text())
    del sweep["grid"]
    sweep |= {
        "seeds": [0],
        "settings": {"small": []},
        "scales": {"paper": {"set": ["steps=3"], "about": "."}},
    }
    (tmp_path / "tiny.json").write_text(json.dumps(sweep))
    monkeypatch.setattr(gpu, "SWEEPS", tmp_path)
    part = next(part for part in slices() if part.name == "sweep-tiny")
    assert part.resumes and part.command[-3:] == ("tiny", "--result", "{result}")
    result = part.result(tmp_path)
    sweep_slice("tiny", result, device="cpu")
    assert {*pd.read_csv(result)["setting"]} == {"small"}
    run = next((tmp_path / "tiny-runs").rglob("seed-0"))
    assert Run.load(run).steps_done == 3

    result.unlink()
    sweep["settings"]["broken"] = ["model.n_heads=7"]
    (tmp_path / "tiny.json").write_text(json.dumps(sweep))
    with pytest.raises(SystemExit, match="broken"):
        sweep_slice("tiny", result, device="cpu")
    assert not result.exists()


@pytest.mark.parametrize("task", PAPER)
def test_the_published_settings_are_those_of_a_model(task: str) -> None:
    config = paper_config(task)
    assert (config.model.d_model, config.steps, config.batch_size) == (256, 100_000, 64)
    assert config.model.n_heads * config.model.head_width == 256
    assert (config.objective.kind, config.objective.hold_loops) == ("step_dependent", 0)
    assert (config.curriculum.first_longest, config.precision) == (1, "bf16")


@pytest.mark.parametrize("block", ABACUS)
def test_an_abacus_model_is_sixteen_layers_deep_and_learns_sums_of_twenty_digits(
    block: str,
) -> None:
    config = abacus_config(block)
    model, objective = config.model, config.objective
    assert (model.d_model, model.n_heads, model.mlp_width) == (1024, 16, 2048)
    assert model.n_layers * model.n_loops == 16 and objective.n_loops == model.n_loops
    assert (objective.kind, objective.alpha, model.injection) == ("progressive", 0.5, "sublayer")
    # The table has a place for the last digit of the longest answer, and of a grid far beyond it.
    assert model.n_ctx is not None and model.n_ctx > model.abacus_max_offset + 20 + 1
    assert (model.abacus_max_offset, config.offset_per_example) == (99, False)
    drawn = config.make_task().sample(
        20, batch_size=4000, generator=torch.Generator().manual_seed(0), distribution="independent"
    )
    texts = config.make_task().decode(drawn.inputs)
    lengths = np.array([[len(x) for x in re.findall("[0-9]+", text)[:2]] for text in texts])
    # Each of the lengths 1 to 20 is drawn as often, and the two operands' lengths independently.
    assert np.all(np.bincount(lengths[:, 0], minlength=21)[1:] > 120)
    assert abs(np.corrcoef(lengths.T)[0, 1]) < 0.05


def stopped_at_six(monkeypatch: pytest.MonkeyPatch, what: str, result: Path) -> None:
    """A slice whose time is over after six steps."""
    real = Trainer.finish

    def stopping(self: Trainer, *arguments: object) -> None:
        if self.steps_done == 6:
            raise KeyboardInterrupt
        real(self, *arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "finish", stopping)
        with pytest.raises(KeyboardInterrupt):
            train_slice(what, result, device="cpu", small=True)


@pytest.mark.parametrize("what", ["parity", "1x16"])
def test_a_training_slice_goes_on_where_it_was_stopped(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = tmp_path / "slice.json"
    monkeypatch.setattr(gpu, "SEEDS", SEEDS[:2])
    stopped_at_six(monkeypatch, what, result)
    run = Run.load(tmp_path / f"{what}-runs/seed-0")
    assert run.steps_done == 4 and not result.exists()
    train_slice(what, result, device="cpu", small=True)
    document = json.loads(result.read_text())
    assert (run.steps_done, document["setting"]) == (8, what)
    assert document["steps_per_second"] > 0 and document["at_full_length"]["milliseconds"] > 0
    if what == "parity":
        assert (document["lengths"], len(document["exact_match"])) == ([3], 2)
    else:
        assert document["grid_mean"].keys() == {"1", "2", "8", "16", "32"}
        assert document["generated"].keys() == {"1", "3"}
        grid = load_result(run.folder / "results/operand-grid.safetensors")
        assert dict(grid.data.sizes)["n_a"] == 2


def test_an_abacus_model_is_scored_as_far_as_it_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped_at_six(monkeypatch, "8x2", tmp_path / "slice.json")
    show_scores("8x2", tmp_path, device="cpu", small=True)
    document = json.loads((tmp_path / "abacus-8x2-step-4.json").read_text())
    assert document["grid_mean"].keys() == {"1", "2", "4"}  # loops of eight layers: up to 32 layers
    assert "abacus-8x2-step-4.json" in capsys.readouterr().out


def test_what_is_generated_is_scored_by_the_right_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    config = abacus_config("1x16", device="cpu", small=True)
    task, model = config.make_task(), LoopedTransformer(config.model)
    assert isinstance(task, AbacusAddition)

    def knowing(_: object, prompts: Tensor, *, attention_mask: Tensor, **options: object) -> Tensor:
        answer, _ = task.answers(prompts)
        assert attention_mask.shape == prompts.shape
        assert (options["n_loops"], options["stop_token"]) == (16, task.end)
        assert options["max_new_tokens"] == 6 >= answer.shape[1]
        answer[0, 0] = (answer[0, 0] + 1) % 10
        return answer

    monkeypatch.setattr(models, "generate", knowing)
    assert gpu._generated(model, task, 4, 8) == 7 / 8


# A card that is not there


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The pretended device in place of ``cuda``; its arithmetic is that of the CPU, in float32."""
    real = Run.model
    monkeypatch.setattr(fitting, "resolve_device", lambda name: name)
    monkeypatch.setattr(trainer_module, "resolve_device", lambda _: torch.device(DEVICE.type))
    monkeypatch.setattr(Trainer, "autocast", lambda _: nullcontext())
    monkeypatch.setattr(Run, "model", lambda self, device: real(self).to(torch.device(DEVICE.type)))
    monkeypatch.setattr(timing.torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(timing.torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    with pretend_gpu():
        yield


@pytest.mark.parametrize("what", ["parity", "1x16"])
@pytest.mark.usefixtures("card")
def test_a_slice_runs_on_a_card(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "SEEDS", SEEDS[:2])
    monkeypatch.setattr(gpu, "DEPTHS", (1, 2))
    for configure in (paper_config, abacus_config):  # each operation takes long there
        short = lambda *a, configure=configure, **k: configure(*a, **k).replace(steps=2)  # noqa: E731
        monkeypatch.setattr(gpu, configure.__name__, short)
    train_slice(what, tmp_path / "slice.json", device="cuda", small=True)
    document = json.loads((tmp_path / "slice.json").read_text())
    assert 0 < document["at_full_length"]["share_of_bf16_peak"] < 1


@pytest.mark.parametrize("what", [*PAPER, *ABACUS])
def test_a_step_in_bfloat16_is_finite(what: str) -> None:
    make = abacus_config if what in ABACUS else paper_config
    config = make(what, device="cpu", small=True).replace(precision="bf16")
    both = [Trainer(config.replace(seed=seed)) for seed in (0, 1)]
    advance_together(both)
    single = Trainer(config).step()
    first = both[0].read()[0]
    assert first["loss"] == pytest.approx(single["loss"], rel=0.05)
    assert first["grad_norm"] == pytest.approx(single["grad_norm"], rel=0.2)


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


@pytest.mark.parametrize("rounds", ["1", "0", "-3", "many"])
def test_fewer_rounds_than_quartiles_need_end_with_exit_status_2(rounds: str) -> None:
    assert parser("", rounds=3).parse_args(["--rounds", "2"]).rounds == 2
    with pytest.raises(SystemExit) as ended:
        parser("", rounds=3).parse_args(["--rounds", rounds])
    assert ended.value.code == 2


def test_the_clock_waits_for_the_device_before_it_starts_and_stops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(timing.torch.cuda, "synchronize", lambda device: seen.append(device))
    monkeypatch.setitem(timing.CLOCKS, "wall", lambda: seen.append("clock") or 0.0)
    timing._seconds(lambda: seen.append("run"), 2, "wall", "cuda")
    assert seen == ["run", "cuda", "clock", "run", "run", "cuda", "clock"]


def test_the_share_of_the_peak_counts_matrix_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing.torch.cuda, "get_device_name", lambda _: "NVIDIA A100-SXM4-40GB")
    a, b = torch.zeros(10, 20), torch.zeros(20, 30)
    share = timing.of_peak(lambda: a @ b, 0.5, "cuda")
    assert share["flops"] == 2 * 10 * 20 * 30 and share["per_second"] == 2
    assert share["share_of_bf16_peak"] == pytest.approx(12000 / 0.5 / 312e12)
    monkeypatch.setattr(timing.torch.cuda, "get_device_name", lambda _: "NVIDIA Riva 128")
    assert "share_of_bf16_peak" not in timing.of_peak(lambda: a @ b, 0.5, "cuda")
