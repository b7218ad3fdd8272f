"""A run as a folder: a model that was trained or put there."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopinterp.core.errors import CheckpointError, InputError
from loopinterp.core.results import config_hash
from loopinterp.core.run_files import (
    CONFIG,
    IN_MEMORY,
    Mismatch,
    Owner,
    Seal,
    check_lines,
    read_run_config,
    spell_mismatch,
)
from loopinterp.core.storage import (
    digest_tensors,
    parse_json_object,
    read_bytes,
    read_json_object,
    read_tensors_and_metadata,
    write_json,
)
from loopinterp.core.text import ShortRepr
from loopinterp.training.config import GivenModelConfig, TrainingConfig

if TYPE_CHECKING:
    import pandas as pd
    import torch

    from loopinterp.adapters import PublishedModel
    from loopinterp.models import LoopedTransformer, LoopRule
    from loopinterp.tasks.task import Task

METRICS = "metrics.jsonl"
MODEL = "model"
WEIGHTS = "model/model.safetensors"
CHECKPOINT = "state/checkpoint.safetensors"
_SNAPSHOTS = "snapshots"


class UnsealedRunWarning(UserWarning):
    """A run of an earlier version has no digests of its files."""


class OlderWeightsWarning(UserWarning):
    """A run's model is older than its checkpoint."""


_RESTORE = "Restore it from a copy, or train into a new folder."
_RESTORE_ALL = "The files do not belong together: restore them, or train into a new folder."


class RunFault(Enum):
    """Faults of a run's folder: expected, given, fix, with values in braces."""

    OTHER_JSON = ("the configuration of a run", "other JSON", "Point to the run's own folder.")
    MODEL_IN_MEMORY = (
        "a run with its model",
        "the results of a {model}, which stayed in memory",
        "Call loopinterp.analyze_model with that model again; reports need no model.",
    )
    NO_SNAPSHOT = (
        "one of its snapshots (steps {steps})",
        "step {step}",
        "Train a run with snapshots.kind=even or log; a run cannot add them later.",
    )
    NO_MODEL = (f"a model in {MODEL}/", "none before the first checkpoint", "Resume the training.")
    OTHER_ARCHITECTURE = ("the architecture in the run's config.json", "another one", _RESTORE_ALL)
    OTHER_WEIGHTS = ("the weights of the run's config.json", "those of another run", _RESTORE_ALL)
    OTHER_LINES = ("the lines that training wrote", "a file that {mismatch}", _RESTORE)
    DAMAGED_LINE = ("a JSON object with the metrics of a step", "{line!r}", _RESTORE)
    LINES_MISSING = ("{n_lines} lines, one for every {log_every} steps", "{n_given}", _RESTORE)
    NO_STATE = ("the state of a training run", "a safetensors file of another kind", _RESTORE)
    OTHER_STATE = ("the state of the run beside it", "that of another configuration", _RESTORE_ALL)
    NO_COUNTERS = ("the counters of a training run", "none that can be read ({error!r})", _RESTORE)
    TAKEN = (
        "a folder without a run",
        "one that holds a run",
        "Choose another folder, or resume the run if it is one of training.",
    )
    NOT_RESUMABLE = ("a run to go on with", f"no {CHECKPOINT}", "Train into a new folder.")
    NO_CONFIG = ("a new folder, or a run", f"{{file}} without {CONFIG}", "Choose another folder.")
    OTHER_START = ("the one that the run began with", "another one", _RESTORE)


class RunError(CheckpointError):
    """A run's folder cannot be used; ``values`` fill the fault's texts."""

    def __init__(self, fault: RunFault, what: str, **values: object) -> None:
        self.fault = fault
        expected, got, fix = (text.format(**values) for text in fault.value)
        super().__init__(what, expected=expected, given=got, fix=fix)


@dataclass(frozen=True, repr=False)
class Run(ShortRepr):
    """A run on disk.

    ::

        config.json                    the TrainingConfig, or the GivenModelConfig
        model/                         configuration and (averaged) weights of the model
        metrics.jsonl                  one line per ``log_every`` steps of training
        state/checkpoint.safetensors   weights, optimiser, random streams, curriculum
        state/lock                     held by the process that trains here, if one does
        snapshots/step-100/            the model after that step, if the configuration asks for it

    A model not trained here (:meth:`from_model`) has only the first two. Every file is replaced in
    one step, and names its run by digests (:mod:`loopinterp.core.run_files`).
    """

    folder: Path
    config: TrainingConfig | GivenModelConfig

    @classmethod
    def load(cls, folder: str | Path) -> Run:
        """Open a run; a folder without one is a ``CheckpointError``."""
        folder = Path(folder)
        values = read_run_config(folder)
        if "task" not in values:
            raise RunError(RunFault.OTHER_JSON, f"file {folder / CONFIG}")
        if IN_MEMORY in values:
            raise RunError(RunFault.MODEL_IN_MEMORY, f"run {folder}", model=values[IN_MEMORY])
        kind = GivenModelConfig if "origin" in values else TrainingConfig
        return cls(folder, kind.from_dict(values))

    @classmethod
    def from_model(
        cls,
        model: LoopedTransformer | PublishedModel,
        task: Task,
        folder: str | Path,
        *,
        max_n: int,
        origin: str,
        distribution: str | None = None,
    ) -> Run:
        """Make a run of a model that was not trained here, for use in all studies.

        Args:
            model: Run for T(n) loops, or by its ``loop_rule``, such as ``LoopRule(1)`` for an
                ordinary transformer. A published model must be of an architecture of
                :class:`~loopinterp.adapters.AdaptedModelConfig`.
            max_n: Greatest problem length that it was made for, in place of a training cutoff.
            origin: Where it comes from; continues "The model was".
            distribution: Input distribution that studies draw from; the task's first if None.

        Raises:
            InputError: If the folder holds a run, the model does not fit the task, or
                configuration, weights and T(n) do not rebuild it.
        """
        need_free_folder(Path(folder))
        config = given_model_config(
            model, task, max_n=max_n, origin=origin, distribution=distribution
        )
        return cls.of_given_model(model, folder, config)

    @classmethod
    def of_given_model(
        cls,
        model: LoopedTransformer | PublishedModel,
        folder: str | Path,
        config: GivenModelConfig,
    ) -> Run:
        """Write a model, then the configuration that makes the folder a run."""
        from loopinterp.models.checkpoints import write_model

        folder = Path(folder)
        seal = Seal(config_hash(config.to_dict()))
        write_model(model, folder / MODEL, seal.texts(), config.model.to_dict())
        write_json(folder / CONFIG, config.to_dict())
        return cls(folder, config)

    @property
    def is_trained(self) -> bool:
        """Whether the model is trained here."""
        return isinstance(self.config, TrainingConfig)

    @property
    def cutoff(self) -> int:
        """Greatest problem length in training, or that the model was made for."""
        if isinstance(self.config, GivenModelConfig):
            return self.config.max_n
        return self.config.curriculum.max_n

    def model(self, device: torch.device | str = "cpu") -> Any:
        """The model with its averaged weights, which knows its task and its numbers of loops.

        It is a :class:`~loopinterp.models.LoopedTransformer`, or a given
        :class:`~loopinterp.adapters.PublishedModel`. ``model.task`` is None if its data have
        changed.

        ``model(inputs)`` runs T(n), as changed by ``objective.loop_scale``, ``extra_loops`` or
        ``n_loops``. Hooks, layers and blocks are those of T(n) at the training cutoff, or of
        ``model.unroll(n_loops)``.
        """
        path = self.folder / WEIGHTS
        if not path.exists():
            raise RunError(RunFault.NO_MODEL, f"run {self.folder}")
        model, seal = self._read(path, device)
        checkpoint = Seal.of_file(self.folder / CHECKPOINT)  # written before the model beside it
        if seal is None:
            text = (
                f"{path} {spell_mismatch(Mismatch.UNSEALED)}: these may be the weights of another "
                "run. To seal the run, call the training into its folder again."
            )
            warnings.warn(text, UnsealedRunWarning, stacklevel=2)
        elif checkpoint not in (None, seal):
            text = (
                f"{path} was written after {seal.n_lines} lines of {METRICS}, the checkpoint after "
                f"{checkpoint.n_lines}: the model is not that of the last step. To write it, call "
                "the training into its folder again."
            )
            warnings.warn(text, OlderWeightsWarning, stacklevel=2)
        return model

    @property
    def snapshots(self) -> tuple[int, ...]:
        """Steps of the kept snapshots, in order; see :class:`.SnapshotConfig`."""
        # The configuration is written last: a folder with one is whole.
        folders = (path.parent for path in self.folder.glob(f"{_SNAPSHOTS}/step-*/{CONFIG}"))
        numbers = (folder.name.removeprefix("step-") for folder in folders)
        return tuple(sorted(int(number) for number in numbers if number.isdecimal()))

    def model_at(self, step: int, device: torch.device | str = "cpu") -> Any:
        """The model of a snapshot: :meth:`model` as it was after that many steps (0: untrained).

        Its averaged weights lag behind training.
        """
        if step not in (steps := self.snapshots):
            known = ", ".join(map(str, steps)) or "none"
            raise RunError(RunFault.NO_SNAPSHOT, f"run {self.folder}", steps=known, step=step)
        return self._read(snapshot_folder(self.folder, step) / Path(WEIGHTS).name, device)[0]

    def _read(self, path: Path, device: torch.device | str) -> tuple[Any, Seal | None]:
        from loopinterp.adapters import AdaptedModelConfig
        from loopinterp.adapters.architectures import read_adapted
        from loopinterp.models import LoopedTransformer
        from loopinterp.models.protocol import every_tensor

        folder, expected = path.parent, self.config.model
        model: Any
        if isinstance(expected, AdaptedModelConfig):
            fits = read_json_object(folder / CONFIG) == expected.to_dict()
            model = read_adapted(folder, device=device) if fits else None
        else:
            model = LoopedTransformer.from_pretrained(folder, device=device).eval()
            fits = model.config == expected
        if not fits:
            raise RunError(RunFault.OTHER_ARCHITECTURE, f"model {folder}")
        seal, weights = Seal.of_file(path), digest_tensors(every_tensor(model))
        owner = Owner(config=config_hash(read_run_config(self.folder)), weights=weights, seal=seal)
        # Runs of earlier versions have no digest and no seal, and are read with a warning.
        known = self.config.weights_sha256 if isinstance(self.config, GivenModelConfig) else None
        if known not in (None, weights) or owner.mismatch is Mismatch.OTHER_RUN:
            raise RunError(RunFault.OTHER_WEIGHTS, f"model {folder}")
        model.loop_rule = self._loop_rule()
        model.task = self.task if self.config.has_same_data else None
        return model, seal

    def _loop_rule(self) -> LoopRule:
        import torch

        from loopinterp.models import LoopRule

        if isinstance(self.config, GivenModelConfig):
            depth, shift = self.config.depth, self.config
        else:
            depth, shift = self.config.objective.n_loops, self.config.objective
        if depth is not None:
            return LoopRule(depth)
        # T(n) of an input's length, shifted as in training
        of_length = LoopsByLength(self.task)
        rule = LoopRule(1, of_length, scale=shift.loop_scale, extra=shift.extra_loops)
        return replace(rule, shown=int(rule.loops_for(torch.tensor(of_length.of(self.cutoff)))))

    @property
    def task(self) -> Task:
        """The task of the run; raise if one of its files is missing or replaced."""
        self.config.need_same_data()
        return self.config.make_task()

    def metrics(self) -> pd.DataFrame:
        """Metrics by step: loss, exact match, greatest length, learning rate, gradient norm.

        Lines that are damaged, or not those of the saved weights, are a ``CheckpointError``.
        """
        import pandas as pd

        path = self.folder / METRICS
        # Lines after the last checkpoint may be there, but none of a step that the run has not.
        last = getattr(self.config, "steps", 0)
        seal = Seal.of_file(self.folder / WEIGHTS)
        return pd.DataFrame(parse_metrics(path, complete_lines(path), seal, last=last))

    @property
    def steps_done(self) -> int:
        """Steps up to the last checkpoint."""
        return self._counters()[0]

    @property
    def seconds(self) -> float:
        """Training time up to the last checkpoint."""
        return self._counters()[1]

    @property
    def finished(self) -> bool:
        """Whether all steps were made (a given model has none), with the same task files."""
        return self.steps_done >= getattr(self.config, "steps", 0) and self.config.has_same_data

    def _counters(self) -> tuple[int, float]:
        path = self.folder / CHECKPOINT
        if not path.exists():
            return 0, 0.0
        metadata = read_tensors_and_metadata(path)[1]
        need_training_state(path, metadata, read_run_config(self.folder))
        with reading_counters(path):
            return int(json.loads(metadata["scalars"])["steps_done"]), float(metadata["seconds"])


@dataclass(frozen=True)
class LoopsByLength:
    """T(n) by the positions of an input, for the first n whose examples have at least as many."""

    task: Task

    def __call__(self, n_pos: int) -> int:
        # Positions grow with n, so that n is found by trying.
        fits = (n for n in range(1, n_pos) if self.task.n_positions(n) >= n_pos)
        return self.of(next(fits, n_pos))

    def of(self, n: int) -> int:
        return max(self.task.n_loops(n), 1)


def given_model_config(
    model: LoopedTransformer | PublishedModel,
    task: Task,
    *,
    max_n: int,
    origin: str,
    distribution: str | None = None,
) -> GivenModelConfig:
    from loopinterp.adapters import AdaptedModelConfig, PublishedModel
    from loopinterp.models import LoopedTransformer, LoopRule, WithVocabulary
    from loopinterp.models.protocol import every_tensor, need_model, own_depth
    from loopinterp.models.study_examples import need_model_of
    from loopinterp.tasks.sampling import need_task

    need_task(task)
    need_model(model)
    if type(model) is not LoopedTransformer and not isinstance(model, PublishedModel):
        fix = "Give it to loopinterp.analyze_model, which leaves it in memory."
        if isinstance(model, WithVocabulary):
            fix = "Put the task's tokens into its weights with loopinterp.models.fold_vocabulary."
        expected = "a LoopedTransformer itself, or a published model that adapt() opened"
        raise InputError("model", expected=expected, given=f"a {type(model).__name__}", fix=fix)
    need_model_of(task, model)
    rule = model.loop_rule or LoopRule(1)  # whose scale and extra are the defaults
    if rule.of_length is not None and rule.of_length != LoopsByLength(task):
        expected = f"T(n) of task {task.name!r}, or one number of loops, as a run keeps no other"
        fix = "Set model.loop_rule = None for T(n), or LoopRule(n_loops)."
        raise InputError("loop_rule of the model", expected=expected, given=repr(rule), fix=fix)
    return GivenModelConfig(
        task=task.name,
        model=AdaptedModelConfig.of(model) if isinstance(model, PublishedModel) else model.config,
        max_n=max_n,
        origin=origin,
        task_settings=dict(task.config()),
        distribution=distribution,
        depth=own_depth(model),
        loop_scale=rule.scale,
        extra_loops=rule.extra,
        weights_sha256=digest_tensors(every_tensor(model)),
    ).with_data()


def snapshot_folder(run: Path, step: int) -> Path:
    return run / _SNAPSHOTS / f"step-{step}"


def need_free_folder(folder: Path) -> None:
    if (folder / CONFIG).exists():
        raise RunError(RunFault.TAKEN, f"output folder {folder}")


@contextmanager
def reading_counters(path: Path) -> Iterator[None]:
    try:
        yield
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise RunError(RunFault.NO_COUNTERS, f"checkpoint {path}", error=error) from error


def need_training_state(path: Path, metadata: Mapping[str, str], config: Mapping[str, Any]) -> None:
    if not {"scalars", "config", "seconds"} <= metadata.keys():
        raise RunError(RunFault.NO_STATE, f"checkpoint {path}")
    if metadata["config"] != config_hash(config):
        raise RunError(RunFault.OTHER_STATE, f"checkpoint {path}")


def complete_lines(path: Path) -> list[str]:
    """Complete lines of a file that may end within one; none if it is missing."""
    # What stands after the last line's end was cut by a kill.
    return read_bytes(path).decode(errors="replace").split("\n")[:-1] if path.exists() else []


def parse_metrics(
    path: Path, lines: list[str], seal: Seal | None, *, last: int | None = None
) -> list[dict[str, Any]]:
    """The metrics in the lines of ``metrics.jsonl``, checked by the seal."""
    rows = []
    for number, line in enumerate(lines, start=1):
        row = parse_json_object(line)
        if row is None:
            raise RunError(RunFault.DAMAGED_LINE, f"file {path}, line {number}", line=line[:40])
        rows.append(row)
    if mismatch := check_lines(lines, seal, last=last):
        raise RunError(RunFault.OTHER_LINES, f"file {path}", mismatch=spell_mismatch(mismatch))
    return rows
