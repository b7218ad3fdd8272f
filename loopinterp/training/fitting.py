"""Trains into a folder, and resumes an interrupted run."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, TextIO

from loopinterp.core.boundary import checked, resolve_device
from loopinterp.core.errors import ConfigError, InputError, need, need_distinct
from loopinterp.core.results import config_hash
from loopinterp.core.run_files import LinesDigest, Seal
from loopinterp.core.settings import Seed, Settings, flatten_settings
from loopinterp.core.storage import (
    digest_tensors,
    only_writer,
    read_json,
    read_tensors_and_metadata,
    write_bytes,
    write_json,
    write_tensors,
)
from loopinterp.core.text import bar
from loopinterp.models.checkpoints import write_model
from loopinterp.models.taps import recording_gradients
from loopinterp.training.config import TrainingConfig
from loopinterp.training.device import (
    ONE_PROCESS,
    Processes,
    cpu_threads,
    joined,
    n_processes,
)
from loopinterp.training.run import (
    CHECKPOINT,
    CONFIG,
    METRICS,
    MODEL,
    WEIGHTS,
    Run,
    RunError,
    RunFault,
    complete_lines,
    need_free_folder,
    need_training_state,
    parse_metrics,
    reading_counters,
    snapshot_folder,
)
from loopinterp.training.seeds import advance_together, read
from loopinterp.training.trainer import Trainer


@checked
def train(
    config: TrainingConfig,
    out: str | Path,
    *,
    progress: bool = True,
    resume: bool = True,
    on_log: Callable[[int, Mapping[str, float]], Any] | None = None,
) -> Run:
    """Train a model into a folder, or resume an interrupted run there.

    A resumed run ends with the metrics and weights of an uninterrupted one. Under ``torchrun``,
    each process runs its share of every batch, with the numbers of one process up to rounding.

    Args:
        config: The run; ``device="auto"`` is decided here and recorded.
        resume: Whether a run in the folder is resumed; it is never overwritten.
        on_log: Called with the step and its metrics (``loss``, ``exact_match``, ``longest_n``,
            ``lr``, ``grad_norm``) for each line of ``metrics.jsonl``, in the first process
            (:func:`log_to`). A resumed run calls it again for steps after its checkpoint. An error
            that it raises ends the training.

    Raises:
        InputError: If the folder holds another run or is being trained in, or the loss or a weight
            stops being finite.
    """
    with ExitStack() as stack:
        stack.enter_context(recording_gradients())  # or refused before anything is written
        processes = stack.enter_context(joined(config))
        part = stack.enter_context(_claimed(config, Path(out), resume, processes))
        part.on_log = on_log
        _fit([part], progress and processes.first)
    return part.run


def log_to(run: Any) -> Callable[[int, Mapping[str, float]], None]:
    """An ``on_log`` of :func:`train` that writes to a tracker.

    Args:
        run: A ``SummaryWriter`` of ``torch.utils.tensorboard``; or the run that ``wandb.init`` or
            ``trackio.init`` returns. It is neither made nor closed here.

    Example:
        >>> class Tracker:
        ...     def log(self, values, step):
        ...         print(step, values)
        >>> log_to(Tracker())(20, {"loss": 0.5})
        20 {'loss': 0.5}
    """
    if hasattr(run, "add_scalar"):

        def write(step: int, values: Mapping[str, float]) -> None:
            for name, value in values.items():
                run.add_scalar(name, value, step)

    elif hasattr(run, "log"):

        def write(step: int, values: Mapping[str, float]) -> None:
            run.log(dict(values), step=step)

    else:
        expected, got = "an object with add_scalar or log", type(run).__name__
        fix = "Pass a SummaryWriter, or what wandb.init or trackio.init returns."
        raise InputError("run", expected=expected, given=got, fix=fix)
    return write


@checked
def train_seeds(
    config: TrainingConfig,
    seeds: Sequence[Seed],
    out: str | Path,
    *,
    progress: bool = True,
    resume: bool = True,
) -> list[Run]:
    """Train several seeds of one configuration, their loops in one batch.

    Each folder ``out/seed-{seed}`` is an ordinary run with the numbers of one trained alone, up to
    rounding. The configuration's seed is ignored. Attention must be causal, and the loop not
    compiled.
    """
    need_distinct("seeds", seeds, "Pass e.g. seeds=[0, 1, 2, 3, 4].")
    fix = "Train the seeds one by one."
    need(n_processes() == 1, "processes", "one", str(n_processes()), fix)
    # Examples are padded to the longest of all seeds, which only a causal model ignores.
    needed = {"model.causal": True, "model.state_code": None, "compile": False}
    needed["model.abacus_window"] = None  # a mask for each example
    for setting, value in needed.items():
        if (got := attrgetter(setting)(config)) != value:
            expected = f"{value}, where seeds are trained together"
            raise ConfigError(setting, expected=expected, given=repr(got), fix=fix)
    configs = [config.replace(seed=seed) for seed in seeds]  # all are checked before one begins
    with ExitStack() as stack:
        stack.enter_context(recording_gradients())
        parts = [
            stack.enter_context(_claimed(one, Path(out) / f"seed-{one.seed}", resume))
            for one in configs
        ]
        _fit(parts, progress)
    return [part.run for part in parts]


@dataclass
class _Part:
    """A run in training, with its open metrics (None in other processes)."""

    run: Run
    trainer: Trainer
    seconds: float
    file: TextIO | None = None
    lines: LinesDigest = field(default_factory=LinesDigest)
    on_log: Callable[[int, Mapping[str, float]], Any] | None = None

    def record(self, metrics: Sequence[dict[str, float | int]]) -> None:
        # Metrics go before the checkpoint.
        trainer, config = self.trainer, self.trainer.config
        if self.file is None:
            return
        for row in metrics:
            if row["step"] % config.log_every == 0:
                line = json.dumps(row)
                self.file.write(f"{line}\n")
                self.lines.add(line)
                if self.on_log is not None:
                    values = {name: value for name, value in row.items() if name != "step"}
                    self.on_log(int(row["step"]), values)
        # Before the checkpoint: what is beside a checkpoint never lacks an earlier snapshot.
        self.keep_snapshot()
        if trainer.steps_done % config.checkpoint_every and trainer.steps_done < config.steps:
            return
        # The checkpoint first: the model beside it can be made from it, but not the reverse.
        seal = self.seal()
        tensors, metadata = trainer.state()
        metadata |= {
            "format": "loopinterp training state 1",
            "config": seal.run,
            "seconds": repr(self.seconds),
            **seal.texts(),
        }
        write_tensors(self.run.folder / CHECKPOINT, tensors, metadata)
        write_model(trainer.averaged_model(), self.run.folder / MODEL, seal.texts())

    def keep_snapshot(self) -> None:
        if self.file is not None and self.trainer.snapshot_due:
            folder = snapshot_folder(self.run.folder, self.trainer.steps_done)
            write_model(self.trainer.averaged_model(), folder, self.seal().texts())

    def seal(self) -> Seal:
        assert self.file is not None
        self.file.flush()
        os.fsync(self.file.fileno())
        # Of the configuration as it was written, perhaps before some settings existed.
        return self.lines.seal(config_hash(read_json(self.run.folder / CONFIG)))


@contextmanager
def _claimed(
    config: TrainingConfig, folder: Path, resume: bool, processes: Processes = ONE_PROCESS
) -> Iterator[_Part]:
    """A locked run, restored from its checkpoint; its model is saved at the end."""
    config = config.replace(device=str(resolve_device(config.device))).with_data()
    if config.start_from is not None:
        # The model is given no name, so it does not stay in memory for the whole training.
        digest = digest_tensors(Run.load(config.start_from).model().state_dict())
        config = config.replace(start_sha256=digest)
    run = Run(folder, config)
    if not processes.first:
        processes.wait()  # until the first has looked at the folder, and written what is missing
        trainer = _build(config, processes)
        with cpu_threads(config.threads):
            yield _Part(run, trainer, _restore(run, trainer))
        return processes.wait()  # until the run is whole
    _check_claim(folder, config, resume)
    trainer = _build(config, processes)
    fix = "Wait for the other training to end, stop it, or train into another folder."
    with (
        only_writer(folder / "state/lock", f"training in {folder}", fix=fix),
        cpu_threads(config.threads),
    ):
        _check_claim(folder, config, resume)  # again: another may have begun, and ended, meanwhile
        if not (folder / CONFIG).exists():
            write_json(folder / CONFIG, config.to_dict())
        seconds = _restore(run, trainer)  # refuses a checkpoint of another configuration
        # Known from the start, so that the weights that follow can be read from their first moment.
        write_json(folder / MODEL / "config.json", config.model.to_dict())
        lines = _truncate_metrics(run, trainer.steps_done, config.log_every)
        processes.wait()
        with open(folder / METRICS, "a", encoding="utf-8") as file:
            part = _Part(run, trainer, seconds, file, lines)
            if not trainer.steps_done:
                part.keep_snapshot()  # the untrained model
            yield part
            seal = part.seal()
        # A kill between the last checkpoint and its model would leave the older model.
        write_model(trainer.averaged_model(), folder / MODEL, seal.texts())
        processes.wait()
    return None


def _fit(parts: Sequence[_Part], progress: bool) -> None:
    """Make the remaining steps: first runs that are behind, then all together."""
    config = parts[0].trainer.config
    done = min(part.trainer.steps_done for part in parts)
    several = f", {len(parts)} seeds" if len(parts) > 1 else ""
    read_metrics = read if several else Trainer.read
    title = f"train {config.task}{several}"
    with bar(title, total=config.steps, initial=done, disable=not progress) as shown:
        while done < config.steps:
            behind = [part for part in parts if part.trainer.steps_done == done]
            started = time.perf_counter()
            advance_together([part.trainer for part in behind])
            due = [part for part in behind if part.trainer.due]
            metrics = [read_metrics(part.trainer) for part in due]
            # Seeds share the time of a step.
            took = (time.perf_counter() - started) / len(behind)
            for part in behind:
                part.seconds += took
            for part, of_part in zip(due, metrics):
                part.record(of_part)
            done = min(part.trainer.steps_done for part in parts)
            shown.update()
            if metrics and done % 20 == 0:
                last = [of_part[-1] for of_part in metrics]
                loss, exact = max(m["loss"] for m in last), min(m["exact_match"] for m in last)
                n = min(m["longest_n"] for m in last)
                shown.set_postfix(loss=f"{loss:.4f}", exact=f"{exact:.2f}", n=n, refresh=False)


def _build(config: TrainingConfig, processes: Processes) -> Trainer:
    try:
        return Trainer(config, processes)
    except (RuntimeError, MemoryError, OverflowError, TypeError) as error:
        expected = "one that can be made on this machine"
        got = f"one that cannot ({str(error).splitlines()[0] if str(error) else 'memory'})"
        fix = "Make it smaller (model.d_model, model.n_layers, model.d_mlp), or change device."
        raise ConfigError("model", expected=expected, given=got, fix=fix) from error


def _check_claim(folder: Path, config: TrainingConfig, resume: bool) -> None:
    if not resume:
        need_free_folder(folder)
    present = [name for name in (METRICS, WEIGHTS, CHECKPOINT) if (folder / name).exists()]
    if not (folder / CONFIG).exists():
        if present:
            raise RunError(RunFault.NO_CONFIG, f"output folder {folder}", file=present[0])
        return
    saved = Run.load(folder).config
    saved.need_same_data()  # names the file, not its digest
    check_same(saved if saved.data_sha256 else saved.with_data(), config, folder)
    if WEIGHTS not in present:
        return
    seal = Seal.of_file(folder / WEIGHTS)
    if seal is not None and seal.run != config_hash(read_json(folder / CONFIG)):
        # Weights of another run, which training would write over.
        raise RunError(RunFault.OTHER_WEIGHTS, f"model {folder / MODEL}")
    if CHECKPOINT not in present:
        # A copy from the zoo, whose model would be trained anew, and lost.
        raise RunError(RunFault.NOT_RESUMABLE, f"output folder {folder}")


def check_same(saved: Settings, config: TrainingConfig, folder: Path) -> None:
    old, new = map(flatten_settings, (saved.to_dict(), config.to_dict()))  # by dotted name
    for key in sorted(old.keys() | new.keys()):
        if old.get(key) != new.get(key):
            expected = f"{old.get(key)!r}, as the run in {folder} has it"
            fix = f"Leave {key} as it was, or train into a new folder."
            raise ConfigError(key, expected=expected, given=repr(new.get(key)), fix=fix)


def _restore(run: Run, trainer: Trainer) -> float:
    """Load the checkpoint, if any; return the seconds spent."""
    path = run.folder / CHECKPOINT
    if not path.exists():
        return 0.0
    tensors, metadata = read_tensors_and_metadata(path)
    need_training_state(path, metadata, read_json(run.folder / CONFIG))
    trainer.load(tensors, metadata, path)
    with reading_counters(path):
        return float(metadata["seconds"])


def _truncate_metrics(run: Run, steps_done: int, log_every: int) -> LinesDigest:
    """Drop the lines of undone steps; return the digest of the others."""
    path = run.folder / METRICS
    n_lines = steps_done // log_every
    lines = complete_lines(path)[:n_lines]
    if len(lines) < n_lines:
        counts = {"n_lines": n_lines, "log_every": log_every, "steps_done": steps_done}
        raise RunError(RunFault.LINES_MISSING, f"file {path}", **counts, n_given=len(lines))
    parse_metrics(path, lines, Seal.of_file(run.folder / CHECKPOINT))
    write_bytes(path, "".join(f"{line}\n" for line in lines).encode())
    return LinesDigest(lines)
