"""The model of a run as studies take it: with its task, and what there is to compare it with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopinterp.errors import CheckpointError, InputError, check_integer, check_seed
from loopinterp.short_repr import ShortRepr

if TYPE_CHECKING:
    from collections.abc import Callable

    from loopinterp.models import LoopedTransformer
    from loopinterp.results import Result
    from loopinterp.saved_results import Owner
    from loopinterp.tasks import Batch, Task
    from loopinterp.training import Run

RESULTS = "results"
"""The folder of saved results inside a run."""

MOST_LOOPS = 100
"""Studies that follow every loop take no longer inputs than need so many."""

MOST_WORK = 2**24
"""Lengths that ``evaluate`` chooses by itself take no more loops times pairs of positions.

That is addition without a window at some 250 bits, or a maze of 16 x 16 cells.
"""


@dataclass(frozen=True, kw_only=True, repr=False)
class StudiedModel(ShortRepr):
    """A model with its task, on the device it is studied on.

    Attributes:
        model: Any looped model; its attribute ``n_ctx``, if it has one, is its room for positions.
        task: What it is asked.
        folder: Where its results are saved, under ``results/``.
        owner: The run as it is now, to which results belong.
        cutoff: Greatest problem length that it was trained on, or made for.
        trained: Whether it was trained in that folder.
        distribution: Input distribution of the examples; the task's first if None.
        seed: Seed of the examples.
        asked_length: The problem length that studies draw, where one was asked for.
    """

    model: Any
    task: Task
    folder: Path
    owner: Owner
    cutoff: int
    trained: bool = False
    distribution: str | None = None
    seed: int = 0
    asked_length: int | None = None

    @property
    def name(self) -> str:
        """That of its folder."""
        return self.folder.resolve().name

    @property
    def results(self) -> Path:
        """Where its results are saved."""
        return self.folder / RESULTS

    def save(self, result: Result, name: str) -> Path:
        """Save a result among the run's; its provenance says that it is the run's."""
        provenance = replace(result.provenance, run=self.owner.config)
        return replace(result, provenance=provenance).save(self.results, name)

    def own_file(self, name: str) -> Path:
        """The file of a result among the run's.

        Raises:
            CheckpointError: If it is missing or damaged, or of other weights than the model's.
        """
        from loopinterp.results import SUFFIX
        from loopinterp.run_seal_views import spell_mismatch
        from loopinterp.saved_results import load_result

        path = self.results / f"{name}{SUFFIX}"
        if why := self.owner.disowns(load_result(path).provenance):
            raise CheckpointError(
                f"result {name!r}",
                expected="one of the model as it is now",
                given=f"one that {spell_mismatch(why)}",
                fix=f"Run the study {name!r} again.",
            )
        return path

    def with_room(self, n: int) -> int:
        """The greatest length up to n that its task can draw and its position table has room for.

        Where there is none, the shortest that its task can draw.
        """
        return self._greatest(n, lambda k: True)

    def length(self, n: int) -> int:
        """The greatest problem length up to n that it has room for, and that stays quick.

        Where one length was asked for (:attr:`asked_length`), that one.
        """
        if self.asked_length is not None:
            return self.asked_length
        return self._greatest(n, lambda k: self.n_loops(k) <= MOST_LOOPS)

    def affordable(self, n: int) -> int:
        """The greatest length up to n that it has room for, within :data:`MOST_WORK`.

        The work of an example is its loops times the pairs of positions that attention compares:
        without a window, the positions squared.
        """
        return self._greatest(n, lambda k: self._work(k) <= MOST_WORK)

    def _work(self, n: int) -> int:
        from loopinterp.models import reach

        positions, seen = self.task.n_positions(n), reach(self.model)
        width = positions if seen is None else min(seen + 1, positions)
        return max(self.n_loops(n), 1) * positions * width

    def _greatest(self, n: int, fits: Callable[[int], bool]) -> int:
        """The greatest length up to n with room that fits, or else the shortest of the task."""
        from loopinterp.models.model_description import said_of
        from loopinterp.tasks.sampling import longest_length

        room = said_of(self.model, "n_ctx")
        k = longest_length(self.task, n)
        while not fits(k) or (room is not None and self.task.n_positions(k) > room):
            shorter = longest_length(self.task, k - 1) if k > 1 else k
            if shorter >= k:
                break
            k = shorter
        return k

    def at_length(self, n: int) -> StudiedModel:
        """The same model, of which all studies that draw examples ask this one length.

        Raises:
            InputError: If its task has no such length, or it has no room for it.
        """
        from loopinterp.models.model_description import said_of
        from loopinterp.tasks.sampling import MOST_TOKENS, check_size, longest_length

        check_integer("length", n, least=1, far=MOST_TOKENS)
        check_size(self.task, n, 1, "length")
        longest, room = longest_length(self.task, n), said_of(self.model, "n_ctx")
        positions = self.task.n_positions(n)
        if longest != n or (room is not None and positions > room):
            has = f"length {longest}" if longest != n else f"{room} positions"
            raise InputError(
                "length",
                expected=f"one that the task and the model have, which go to {has} here",
                given=f"{n}, which takes {positions} positions",
                fix="Choose another length.",
            )
        return replace(self, asked_length=n)

    def n_loops(self, n: int) -> int:
        """Loops after which it answers problems of length n: T(n), or what its rule makes of it."""
        import torch

        from loopinterp.models.run_length import rule_of

        rule, asked = rule_of(self.model), self.task.n_loops(n)
        return asked if rule is None else int(rule.of(torch.tensor(asked)))

    def sample(self, n: int, batch_size: int, *, distribution: str | None = None) -> Batch:
        """Examples of one length; of the run's own distribution if None is given.

        They ask for T(n); each study asks them of the model after the loops that it makes.
        """
        import torch

        from loopinterp.models.model_description import device_of

        batch = self.task.sample(
            n,
            batch_size=batch_size,
            generator=torch.Generator().manual_seed(self.seed),
            distribution=distribution or self.distribution,
        )
        return replace(batch, task=self.task).to(device_of(self.model))

    def programs(self) -> list[str]:
        """The stock programs that solve its task, with its settings, from its tokens."""
        from loopinterp.rasp import get_program, list_programs
        from loopinterp.tasks import get_task

        def fits(name: str) -> bool:
            program = get_program(name)
            if program.task != self.task.name or len(program.inputs) != self.task.d_vocab:
                return False
            solved = get_task(program.task, **program.task_settings)
            return dict(solved.config()) == dict(self.task.config())

        return [name for name in list_programs() if fits(name)]


def open_run(folder: str | Path, *, seed: int = 0, device: str = "auto") -> StudiedModel:
    """A run's model and task, on a device, ready for studies.

    Raises:
        CheckpointError: If the folder holds no run, or its files are damaged.
        InputError: If the device is not there, or the seed is out of range.
    """
    from loopinterp.models.model_description import own_weights
    from loopinterp.results import config_hash
    from loopinterp.saved_results import Owner
    from loopinterp.storage import digest_tensors, read_json
    from loopinterp.training import Run
    from loopinterp.training.run import CONFIG

    check_seed(seed)
    run = Run.load(folder)
    model = _ready(run, device)
    # Of the weights that were read, not of the file, which a training may replace at any time.
    weights = digest_tensors(own_weights(model))
    return StudiedModel(
        model=model,
        task=model.task,
        folder=run.folder,
        owner=Owner(config=config_hash(read_json(run.folder / CONFIG)), weights=weights),
        cutoff=run.cutoff,
        trained=run.is_trained,
        distribution=run.config.distribution,
        seed=seed,
    )


def load(folder: str | Path, *, device: str = "cpu") -> LoopedTransformer:
    """The model of a run, ready to be run, with its task at hand as ``model.task``.

    :meth:`loopinterp.training.Run.load` gives the run itself: configuration, metrics, folder.

    Args:
        folder: What ``loopinterp train``, ``compile`` or ``demo`` wrote.
        device: ``cpu``, ``cuda``, or ``auto``.

    Raises:
        CheckpointError: If the folder holds no run, or its files are damaged.
        InputError: If the device is not there.
    """
    from loopinterp.training import Run

    return _ready(Run.load(folder), device)


def _ready(run: Run, device: str) -> LoopedTransformer:
    """The model of a run, on a device, with its task."""
    from loopinterp.training.device import resolve_device

    model = run.model(resolve_device(device)).eval()
    model.task = run.task()
    return model
