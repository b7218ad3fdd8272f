"""Runs on disk: stopped and resumed, refused, damaged."""

from __future__ import annotations

import json
import math
import pickle
import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from loopinterp.app.session import open_run
from loopinterp.core.errors import CheckpointError, ConfigError, InputError
from loopinterp.core.results import config_hash
from loopinterp.core.storage import (
    _temporary_prefix,
    read_json,
    read_tensors,
    read_tensors_and_metadata,
    write_json,
    write_tensors,
)
from loopinterp.models import LoopedTransformer
from loopinterp.models.study_examples import examples_for
from loopinterp.tasks import get_task, list_tasks
from loopinterp.training import (
    ObjectiveConfig,
    OptimiserConfig,
    Run,
    Trainer,
    TrainingConfig,
    evaluate,
    train,
)
from loopinterp.training.run import LoopsByLength, RunError, RunFault
from tests.refusals import naming
from tests.tasks.answers import ONE_EACH
from tests.training.tiny_run import refused

CHECKPOINT = "state/checkpoint.safetensors"
WEIGHTS = "model/model.safetensors"


class Stopped(Exception):
    """Stands in for a kill."""


@pytest.fixture(scope="module")
def _run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run") / "whole"


@pytest.fixture
def run_folder(tiny: TrainingConfig, _run_folder: Path) -> Path:
    """The folder of an uninterrupted run, made once; it is not to be changed."""
    if not _run_folder.exists():
        train(tiny, _run_folder, progress=False)
    return _run_folder


@pytest.fixture
def copy(run_folder: Path, tmp_path: Path) -> Path:
    """A finished run that may be spoiled."""
    return Path(shutil.copytree(run_folder, tmp_path / "copy"))


def train_until(
    config: TrainingConfig, folder: Path, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Train, and stop without warning after that step's metrics were made."""
    real = Trainer.advance

    def stopping(self: Trainer) -> None:
        if self.steps_done == step:
            raise Stopped
        real(self)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "advance", stopping)
        with pytest.raises(Stopped):
            train(config, folder, progress=False)


def assert_same_run(one: Path, other: Path) -> None:
    for name in ("config.json", "metrics.jsonl", "model/model.safetensors", "model/config.json"):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    left, right = read_tensors(one / CHECKPOINT), read_tensors(other / CHECKPOINT)
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


def test_a_run_leaves_what_it_promises(tiny: TrainingConfig, run_folder: Path) -> None:
    run = Run.load(run_folder)
    assert run.config == tiny
    assert run.finished
    assert run.steps_done == 24
    assert run.seconds > 0
    metrics = run.metrics()
    assert metrics["step"].tolist() == list(range(2, 25, 2))
    assert {"loss", "exact_match", "longest_n", "lr", "grad_norm"} < set(metrics.columns)
    assert run.model().config == tiny.model
    assert run.task.name == "addition"
    files = {str(p.relative_to(run_folder)) for p in run_folder.rglob("*") if p.is_file()}
    assert files == {
        "config.json",
        "metrics.jsonl",
        "model/config.json",
        "model/model.safetensors",
        CHECKPOINT,
        "state/lock",
    }


def test_the_model_of_a_run_knows_its_loops(run_folder: Path) -> None:
    run = Run.load(run_folder)
    model, task = run.model(), run.task
    assert model.n_loops == task.n_loops(run.cutoff) == 4
    generator = torch.Generator().manual_seed(0)
    for n in (1, 3, 6):
        batch = task.sample(n, batch_size=5, generator=generator)
        with torch.no_grad():
            logits, explicit = model(batch.inputs), model(batch.inputs, n_loops=task.n_loops(n))
        assert torch.equal(logits, explicit)
    mixed = task.sample(torch.tensor([2, 5, 3]), generator=generator)
    with torch.no_grad():
        logits = model(mixed.inputs, n_loops=mixed.n_loops)
        for row, (n, n_loops) in enumerate(zip(mixed.n.tolist(), mixed.n_loops.tolist())):
            single = model(mixed.inputs[row : row + 1, : task.n_positions(n)], n_loops=n_loops)
            torch.testing.assert_close(logits[row, : single.shape[1]], single[0])
    again = deepcopy(model)
    assert again.loop_rule == model.loop_rule


@pytest.mark.parametrize("name", list_tasks())
def test_loops_by_length_are_those_of_the_task(name: str) -> None:
    task = get_task(name, **ONE_EACH[name])
    rule = LoopsByLength(task)
    batches = (
        task.sample(n, batch_size=2, generator=torch.Generator().manual_seed(n))
        for n in (1, 2, 3, 7, 12)
    )
    for batch in batches:
        assert rule(batch.inputs.shape[1]) == int(batch.n_loops[0])


def test_a_run_of_an_ordinary_transformer_is_one_loop_deep(
    tiny: TrainingConfig, tmp_path: Path
) -> None:
    config = tiny.replace(objective=ObjectiveConfig(kind="last", n_loops=1), steps=2)
    trained = train(config, tmp_path / "trained", progress=False)
    model, task = trained.model(), trained.task
    by_hand = Run.from_model(model, task, tmp_path / "given", max_n=3, origin="trained elsewhere")
    inputs = task.sample(5, batch_size=2, generator=torch.Generator().manual_seed(0)).inputs
    for run in (trained, Run.load(by_hand.folder)):
        one = run.model()
        assert one.n_loops == one.cfg.n_layers == 1
        assert torch.equal(one(inputs), one(inputs, n_loops=1))
        assert evaluate(one, task, [2], n_samples=4).depth == 1
    looped = Run.from_model(model.unroll(2), task, tmp_path / "looped", max_n=3, origin="x")
    assert evaluate(looped.model(), task, [2], n_samples=4).depth is None


def test_a_run_is_asked_after_the_loops_that_it_was_trained_for(
    tiny: TrainingConfig, tmp_path: Path
) -> None:
    """T = 2(n + 1) - 1 in place of n + 1: alone, evaluated, studied, and as a given model."""
    objective = ObjectiveConfig(loop_scale=2.0, extra_loops=-1)
    trained = train(tiny.replace(objective=objective, steps=2), tmp_path / "a", progress=False)
    model, task = trained.model(), trained.task
    Run.from_model(model, task, tmp_path / "b", max_n=3, origin="x")
    inputs = task.sample(5, batch_size=2, generator=torch.Generator().manual_seed(0)).inputs
    tables = []
    for run in (trained, Run.load(tmp_path / "b")):
        one = run.model()
        assert one.n_loops == 7
        assert torch.equal(one(inputs), one(inputs, n_loops=11))
        result = evaluate(one, task, [5], n_samples=40, extra_loops=[0, 2])
        tables.append(result.data)
        assert result.depth is None
        caption = result.figures()[0].caption
        assert "2 T(n)" in caption and str(one.loop_rule) in caption
        studied = open_run(run.folder)
        assert studied.n_loops(5) == 11
        examples = examples_for(one, studied.sample(5, 3))
        assert examples.n_loops.tolist() == [11] * 3
    assert tables[0].equals(tables[1])
    plain = evaluate(model.unroll(7), task, [5], n_samples=40, extra_loops=[5, 7]).data
    same = plain.assign_coords(extra_loop=[0, 2])[["exact_match", "bit_accuracy"]]
    assert same.equals(tables[0][["exact_match", "bit_accuracy"]])


def test_a_run_from_before_a_setting_existed_is_gone_on_with(
    tiny: TrainingConfig, run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_until(tiny, tmp_path / "run", 13, monkeypatch)
    values = json.loads((tmp_path / "run/config.json").read_text())
    for name in ("extra_loops", "loop_scale", "least_loops"):
        del values["objective"][name]
    (tmp_path / "run/config.json").write_text(json.dumps(values))
    for name in (CHECKPOINT, WEIGHTS):
        tensors, metadata = read_tensors_and_metadata(tmp_path / "run" / name)
        texts = metadata | {"loopinterp.run": config_hash(values)}
        texts |= {"config": config_hash(values)} if name == CHECKPOINT else {}
        write_tensors(tmp_path / "run" / name, tensors, texts)
    run = train(tiny, tmp_path / "run", progress=False)
    assert run.metrics().equals(Run.load(run_folder).metrics())


def test_saved_weights_are_the_average(tiny: TrainingConfig, run_folder: Path) -> None:
    trainer = Trainer(tiny)
    for _ in range(tiny.steps):
        trainer.step()
    for name, weight in Run.load(run_folder).model().named_parameters():
        assert torch.equal(weight, trainer.ema.shadow[name])


@pytest.mark.parametrize("stops", [(3,), (5,), (13, 13, 17), (23,)])
def test_a_stopped_run_ends_like_a_whole_one(
    tiny: TrainingConfig,
    run_folder: Path,
    stops: tuple[int, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for stop in stops:
        train_until(tiny, tmp_path / "run", stop, monkeypatch)
    train(tiny, tmp_path / "run", progress=False)
    assert_same_run(tmp_path / "run", run_folder)


@pytest.mark.parametrize("kind", ["progressive", "step_dependent"])
def test_drawn_loops_are_resumed_as_well(
    tiny: TrainingConfig, kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objective = ObjectiveConfig(kind=kind, hold_loops=2 if kind == "step_dependent" else 0)
    config = tiny.replace(objective=objective, steps=12)
    train(config, tmp_path / "whole", progress=False)
    train_until(config, tmp_path / "run", 8, monkeypatch)
    train(config, tmp_path / "run", progress=False)
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_momentum_of_matrices_is_resumed_as_well(
    tiny: TrainingConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny.replace(optimiser=OptimiserConfig(kind="muon", warmup_steps=4), steps=12)
    train(config, tmp_path / "whole", progress=False)
    train_until(config, tmp_path / "run", 8, monkeypatch)
    train(config, tmp_path / "run", progress=False)
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_a_half_written_line_of_metrics_is_made_again(
    tiny: TrainingConfig,
    run_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    train_until(tiny, tmp_path / "run", 14, monkeypatch)
    with open(tmp_path / "run" / "metrics.jsonl", "a") as file:
        file.write('{"step": 14, "lo')
    assert len(Run.load(tmp_path / "run").metrics()) >= 5
    train(tiny, tmp_path / "run", progress=False)
    assert_same_run(tmp_path / "run", run_folder)


def test_a_model_that_lags_its_checkpoint_is_caught_up(
    tiny: TrainingConfig, run_folder: Path, copy: Path
) -> None:
    (copy / "model/model.safetensors").unlink()
    with refused(RunFault.NO_MODEL):
        Run.load(copy).model()
    train(tiny, copy, progress=False)
    assert_same_run(copy, run_folder)


def test_leftovers_of_cut_writes_are_swept_up_and_nothing_of_the_users(
    tiny: TrainingConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    train_until(tiny, run, 13, monkeypatch)
    mine = [run / ".config.json.abc", run / "state/.checkpoint.safetensors.x1y2z3w4"]
    cut = [run / CHECKPOINT, run / "metrics.jsonl", run / "model/model.safetensors"]
    leftovers = [path.parent / (_temporary_prefix(path.name) + "0123456789abcdef") for path in cut]
    for path in (*mine, *leftovers):
        path.write_bytes(b"half")
    train(tiny, run, progress=False)
    assert sorted(run.rglob(".*")) == sorted(mine)


def test_the_second_trainer_in_a_folder_is_refused(
    tiny: TrainingConfig, run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, real = tmp_path / "run", Trainer.advance

    def meddled_with(self: Trainer) -> None:
        if self.steps_done == 7:
            with monkeypatch.context() as patch:
                patch.setattr(Trainer, "advance", lambda _: pytest.fail("two trainers"))
                with pytest.raises(InputError, match="training in"):
                    train(tiny, run, progress=False)
        real(self)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "advance", meddled_with)
        train(tiny, run, progress=False)
    assert_same_run(run, run_folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 2**64},
        {"model": {"init_std": math.nan}},
        {"model": {"noise_seed": 2**64, "initial_state": "noise"}},
        {"model": {"d_mlp": 2**60}},
        {"model": {"d_mlp": 10**25}},
    ],
)
def test_a_configuration_that_cannot_be_built_claims_no_folder(
    tiny: TrainingConfig, changes: dict[str, Any], tmp_path: Path
) -> None:
    values = tiny.to_dict()
    values["model"] |= changes.get("model", {})
    with pytest.raises(ConfigError):
        train(
            TrainingConfig.from_dict({**values, **changes, "model": values["model"]}),
            tmp_path / "run",
            progress=False,
        )
    assert not (tmp_path / "run").exists()


def test_a_run_without_checkpoint_has_no_steps(
    tiny: TrainingConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_until(tiny, tmp_path / "run", 2, monkeypatch)
    run = Run.load(tmp_path / "run")
    assert (run.steps_done, run.seconds, run.finished) == (0, 0.0, False)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"seed": 5}, "seed: expected 0"),
        ({"steps": 30}, "steps: expected 24"),
        ({"objective": ObjectiveConfig(kind="last")}, r"objective\.kind: expected 'step_dep"),
        ({"task_settings": {"format": "pairs"}}, r"task_settings\.format: expected None"),
    ],
)
def test_another_configuration_names_the_setting(
    tiny: TrainingConfig, run_folder: Path, changes: dict[str, Any], key: str
) -> None:
    before = {p: p.read_bytes() for p in run_folder.rglob("*") if p.is_file()}
    with pytest.raises(ConfigError, match=key):
        train(tiny.replace(**changes), run_folder, progress=False)
    assert {p: p.read_bytes() for p in run_folder.rglob("*") if p.is_file()} == before


def test_a_run_is_never_overwritten(tiny: TrainingConfig, run_folder: Path) -> None:
    with refused(RunFault.TAKEN):
        train(tiny, run_folder, progress=False, resume=False)


@pytest.mark.parametrize("name", ["metrics.jsonl", "model/model.safetensors", CHECKPOINT])
def test_a_folder_of_something_else_is_refused(
    tiny: TrainingConfig, name: str, tmp_path: Path
) -> None:
    (tmp_path / name).mkdir(parents=True)
    with refused(RunFault.NO_CONFIG):
        train(tiny, tmp_path, progress=False)


def test_a_model_folder_is_not_a_run(tiny: TrainingConfig, run_folder: Path) -> None:
    folder = run_folder / "model"
    with refused(RunFault.OTHER_JSON):
        Run.load(folder)
    with refused(RunFault.OTHER_JSON):
        train(tiny, folder, progress=False)


def test_no_run_at_all_is_explained(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nothing"):
        Run.load(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="loopinterp train"):
        Run.load(tmp_path)


def test_an_unwritable_folder_is_refused_before_training(
    tiny: TrainingConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trainer, "advance", lambda *_: pytest.fail("trained"))
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "run", Path("/proc/nowhere")):
        with naming("output folder .*"):
            train(tiny, out, progress=False)


def test_no_gpu_is_refused_before_anything_is_written(
    tiny: TrainingConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with naming("device 'cuda'"):
        train(tiny.replace(device="cuda"), tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


def test_auto_is_written_down_as_what_it_was(
    tiny: TrainingConfig, run_folder: Path, tmp_path: Path
) -> None:
    if torch.cuda.is_available():
        pytest.fail("this test expects a machine without a GPU")
    config = tiny.replace(device="auto")
    run = train(config, tmp_path / "run", progress=False)
    assert isinstance(run.config, TrainingConfig) and run.config.device == "cpu"
    assert_same_run(tmp_path / "run", run_folder)
    train(config, tmp_path / "run", progress=False)


@pytest.mark.parametrize("keep", [0, 7, 500, -1])
def test_truncated_checkpoints_are_refused(tiny: TrainingConfig, copy: Path, keep: int) -> None:
    path = copy / CHECKPOINT
    path.write_bytes(path.read_bytes()[:keep])
    before = (copy / "metrics.jsonl").read_bytes()
    with naming(f".*{CHECKPOINT}", CheckpointError):
        train(tiny, copy, progress=False)
    assert (copy / "metrics.jsonl").read_bytes() == before


def test_a_truncated_checkpoint_has_no_counters(copy: Path) -> None:
    path = copy / CHECKPOINT
    path.write_bytes(path.read_bytes()[:100])
    with naming(f".*{CHECKPOINT}", CheckpointError):
        _ = Run.load(copy).steps_done


def test_pickles_are_refused(tiny: TrainingConfig, copy: Path) -> None:
    (copy / CHECKPOINT).write_bytes(pickle.dumps({"weights": [1.0]}))
    with pytest.raises(CheckpointError, match="a pickle"):
        train(tiny, copy, progress=False)
    torch.save({"weights": torch.ones(1)}, copy / CHECKPOINT)
    with pytest.raises(CheckpointError, match="a pickle"):
        train(tiny, copy, progress=False)
    torch.save({"weights": torch.ones(1)}, copy / "model/model.safetensors")
    with pytest.raises(CheckpointError, match="a pickle"):
        Run.load(copy).model()


def test_files_of_another_run_are_refused(tiny: TrainingConfig, copy: Path, tmp_path: Path) -> None:
    other = train(tiny.replace(seed=1, steps=5), tmp_path / "other", progress=False).folder
    shutil.copy(other / CHECKPOINT, copy / CHECKPOINT)
    with refused(RunFault.OTHER_STATE):
        train(tiny, copy, progress=False)


def test_a_refused_run_keeps_the_configuration_of_its_weights(
    tiny: TrainingConfig, copy: Path
) -> None:
    changed = tiny.replace(model=tiny.model.replace(init_std=0.5))
    write_json(copy / "config.json", changed.to_dict())
    before = (copy / "model/config.json").read_bytes()
    with refused(RunFault.OTHER_WEIGHTS):
        train(changed, copy, progress=False)
    assert (copy / "model/config.json").read_bytes() == before


def test_a_safetensors_file_of_another_kind_is_refused(tiny: TrainingConfig, copy: Path) -> None:
    shutil.copy(copy / "model/model.safetensors", copy / CHECKPOINT)
    with refused(RunFault.NO_STATE):
        train(tiny, copy, progress=False)


def test_a_model_of_another_architecture_is_refused(tiny: TrainingConfig, copy: Path) -> None:
    smaller = tiny.model.replace(loop_norm=False)
    write_json(copy / "model/config.json", smaller.to_dict())
    with pytest.raises(CheckpointError):
        Run.load(copy).model()
    write_json(copy / "model/config.json", tiny.model.replace(act_fn="relu").to_dict())
    with pytest.raises(CheckpointError, match="saved with"):
        Run.load(copy).model()
    LoopedTransformer(tiny.model.replace(act_fn="relu")).save_pretrained(copy / "model")
    with refused(RunFault.OTHER_ARCHITECTURE):
        Run.load(copy).model()


@pytest.mark.parametrize("name", [CHECKPOINT, "model/model.safetensors"])
def test_a_flip_of_any_byte_of_a_checkpoint_is_found(
    tiny: TrainingConfig, copy: Path, name: str
) -> None:
    content = (copy / name).read_bytes()
    for place in range(0, len(content), len(content) // 40):
        flipped = bytearray(content)
        flipped[place] ^= 1
        (copy / name).write_bytes(flipped)
        with pytest.raises(CheckpointError):
            _ = Run.load(copy).steps_done if name == CHECKPOINT else Run.load(copy).model()
    if name == CHECKPOINT:
        with pytest.raises(CheckpointError):
            train(tiny, copy, progress=False)


def test_damaged_configurations_are_refused(copy: Path) -> None:
    values = read_json(copy / "config.json")
    (copy / "config.json").write_text(json.dumps(values)[:-20])
    with pytest.raises(CheckpointError, match="valid JSON"):
        Run.load(copy)
    write_json(copy / "config.json", {**values, "stepz": 3})
    with pytest.raises(ConfigError, match="stepz"):
        Run.load(copy)


def test_lost_metrics_are_refused(tiny: TrainingConfig, copy: Path) -> None:
    lines = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_text("".join(lines[:-2]))
    with refused(RunFault.LINES_MISSING):
        train(tiny, copy, progress=False)


def test_a_loss_that_is_not_finite_keeps_the_last_checkpoint(
    tiny: TrainingConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Trainer.advance

    def spoiled(self: Trainer) -> None:
        if self.steps_done == 12:
            with torch.no_grad():
                self.model.unembedding.weight.fill_(math.inf)
        real(self)

    monkeypatch.setattr(Trainer, "advance", spoiled)
    with naming("loss at step 13"):
        train(tiny, tmp_path / "run", progress=False)
    run = Run.load(tmp_path / "run")
    assert run.steps_done == 10
    assert all(torch.isfinite(p).all() for p in run.model().parameters())


def test_a_step_that_spoils_the_weights_is_the_last(
    tiny: TrainingConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its gradient is finite, and its step is one after which a checkpoint is due."""
    real = torch.optim.AdamW.step
    steps = 0

    def spoiling(self: torch.optim.AdamW) -> None:
        nonlocal steps
        real(self)
        steps += 1
        if steps == 15:
            self.param_groups[0]["params"][-1].data.view(-1)[0] = math.inf

    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", spoiling)
        with naming(r"weights \S+ after step 15"):
            train(tiny, tmp_path / "run", progress=False)
    run = Run.load(tmp_path / "run")
    assert run.steps_done == 10
    assert all(torch.isfinite(p).all() for p in run.model().parameters())


def test_the_progress_bar_can_be_switched_off(
    tiny: TrainingConfig,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = tiny.replace(steps=4)
    train(config, tmp_path / "by the environment", progress=True)
    monkeypatch.delenv("LOOPINTERP_PROGRESS")
    train(config, tmp_path / "quiet", progress=False)
    quiet = capsys.readouterr()
    assert quiet.out + quiet.err == ""
    train(config, tmp_path / "shown", progress=True)
    assert "train addition" in capsys.readouterr().err


def test_threads_are_given_back(
    tiny: TrainingConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, seen, real = torch.get_num_threads(), [], Trainer.advance

    def watching(self: Trainer) -> None:
        seen.append(torch.get_num_threads())
        real(self)

    monkeypatch.setattr(Trainer, "advance", watching)
    train(tiny.replace(steps=1, threads=before + 1), tmp_path / "run", progress=False)
    assert seen == [before + 1]
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("line", ['{"step": 4, "lo', "[1]", "3", "", "\x00\xff"])
def test_a_damaged_line_of_metrics_is_named(tiny: TrainingConfig, copy: Path, line: str) -> None:
    lines = (copy / "metrics.jsonl").read_text().splitlines()
    lines[1] = line
    damaged = "".join(f"{text}\n" for text in lines).encode("latin-1")
    (copy / "metrics.jsonl").write_bytes(damaged)
    with refused(RunFault.DAMAGED_LINE):
        Run.load(copy).metrics()
    with refused(RunFault.DAMAGED_LINE):
        train(tiny, copy, progress=False)
    assert (copy / "metrics.jsonl").read_bytes() == damaged


@pytest.mark.parametrize(
    "damage",
    [
        {"scalars": "{"},
        {"scalars": "[1]"},
        {"scalars": "{}"},
        {"scalars": '{"steps_done": "many"}'},
        {"scalars": '{"steps_done": Infinity}'},
        {"seconds": "long"},
    ],
)
def test_counters_that_cannot_be_read_are_one_clear_error(
    tiny: TrainingConfig, copy: Path, damage: dict[str, str]
) -> None:
    metadata = read_tensors_and_metadata(copy / CHECKPOINT)[1] | damage
    write_tensors(copy / CHECKPOINT, read_tensors(copy / CHECKPOINT), metadata)
    for read in (lambda: Run.load(copy).seconds, lambda: Run.load(copy).steps_done):
        with refused(RunFault.NO_COUNTERS):
            read()
    with refused(RunFault.NO_COUNTERS):
        train(tiny, copy, progress=False)


@pytest.mark.parametrize("curriculum", ["3", "[1]", '{"longest": 2}', "null"])
def test_a_curriculum_that_cannot_be_read_is_one_clear_error(
    tiny: TrainingConfig, copy: Path, curriculum: str
) -> None:
    scalars = f'{{"steps_done": 1, "ema_updates": 1, "curriculum": {curriculum}}}'
    metadata = read_tensors_and_metadata(copy / CHECKPOINT)[1] | {"scalars": scalars}
    write_tensors(copy / CHECKPOINT, read_tensors(copy / CHECKPOINT), metadata)
    with refused(RunFault.NO_COUNTERS):
        train(tiny, copy, progress=False)


@pytest.mark.parametrize("fault", RunFault)
def test_every_fault_of_a_folder_is_said_with_its_values(fault: RunFault) -> None:
    counts = {"n_lines": 12, "log_every": 2, "n_given": 10, "step": 3, "steps": "0, 4"}
    texts = {"model": "Net", "mismatch": "is cut", "line": "{", "file": "metrics.jsonl"}
    error = RunError(fault, "run x", error=KeyError("seconds"), **counts, **texts)
    assert (error.fault, error.what) == (fault, "run x")
    assert "{n" not in str(error) and error.expected and error.given and error.fix
