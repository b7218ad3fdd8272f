"""The model of a run as studies take it: with its task, and what there is to compare it with."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from loopinterp.errors import CheckpointError

if TYPE_CHECKING:
    from loopinterp.models import LoopedTransformer
    from loopinterp.results import Result
    from loopinterp.saved_results import Owner
    from loopinterp.tasks import Batch, Task
    from loopinterp.training import Run

RESULTS = "results"
"""The folder of saved results inside a run."""

MOST_LOOPS = 100
"""Studies that follow every loop take no longer inputs than need so many."""


@dataclass(frozen=True, kw_only=True)
class StudiedModel:
    """A model with its task, on the device it is studied on."""

    run: Run
    model: LoopedTransformer
    task: Task
    seed: int
    owner: Owner

    @property
    def cutoff(self) -> int:
        """Greatest problem length that it was trained on, or made for."""
        return self.run.cutoff

    @property
    def results(self) -> Path:
        """Where its results are saved."""
        return self.run.folder / RESULTS

    def save(self, result: Result, name: str) -> Path:
        """Save a result among the run's; its provenance says that it is the run's."""
        provenance = dataclasses.replace(result.provenance, run=self.owner.config)
        return dataclasses.replace(result, provenance=provenance).save(self.results, name)

    def own_file(self, name: str) -> Path:
        """The file of a result among the run's.

        Raises:
            CheckpointError: If it is missing or damaged, or of other weights than the model's.
        """
        from loopinterp.results import SUFFIX
        from loopinterp.saved_results import load_result

        path = self.results / f"{name}{SUFFIX}"
        if why := self.owner.disowns(load_result(path).provenance):
            raise CheckpointError(
                f"result {name!r}",
                expected="one of the model as it is now",
                given=f"one that {why}",
                fix=f"Run the study {name!r} again.",
            )
        return path

    def with_room(self, n: int) -> int:
        """The greatest problem length up to n that its position table has room for."""
        room = self.model.config.n_ctx
        fits = (k for k in range(n, 1, -1) if room is None or self.task.n_positions(k) <= room)
        return next(fits, 1)

    def length(self, n: int) -> int:
        """The greatest problem length up to n that it has room for, and that stays quick."""
        fits = (k for k in range(n, 1, -1) if self.task.n_loops(k) <= MOST_LOOPS)
        return self.with_room(next(fits, 1))

    def sample(self, n: int, batch_size: int, *, distribution: str | None = None) -> Batch:
        """Examples of one length; of the run's own distribution if None is given."""
        import torch

        batch = self.task.sample(
            n,
            batch_size=batch_size,
            generator=torch.Generator().manual_seed(self.seed),
            distribution=distribution or self.run.config.distribution,
        )
        return batch.to(self.model.device)

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
        InputError: If the device is not there.
    """
    from loopinterp.models.model_description import own_weights
    from loopinterp.results import config_hash
    from loopinterp.saved_results import Owner
    from loopinterp.storage import digest_tensors, read_json
    from loopinterp.training import Run
    from loopinterp.training.device import resolve_device
    from loopinterp.training.run import CONFIG

    run = Run.load(folder)
    model = run.model(resolve_device(device))
    # Of the weights that were read, not of the file, which a training may replace at any time.
    weights = digest_tensors(own_weights(model))
    owner = Owner(config=config_hash(read_json(run.folder / CONFIG)), weights=weights)
    return StudiedModel(run=run, model=model, task=run.task(), seed=seed, owner=owner)
