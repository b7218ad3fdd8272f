"""One setting and seed of a sweep: an ordinary run, trained and then evaluated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from loopinterp.errors import CheckpointError, InputError
from loopinterp.file_locks import in_turn
from loopinterp.progress import showing
from loopinterp.results import SUFFIX
from loopinterp.saved_results import Owner
from loopinterp.stages import record_training
from loopinterp.training.config import TrainingConfig
from loopinterp.training.device import cpu_threads, resolve_device
from loopinterp.training.evaluation import EvaluationResult, evaluate
from loopinterp.training.fitting import train
from loopinterp.training.run import CHECKPOINT, Run
from loopinterp.training.sweep_file import SweepEvaluation

RESULT = f"results/generalisation{SUFFIX}"
"""Where ``loopinterp evaluate`` and the report have it too."""

_AXES = ("extra_loop", "distribution", "length", "loop")


@dataclass(frozen=True)
class SweepCell:
    """What a worker is told.

    Attributes:
        setting: Name of the setting.
        seed: Seed of training.
        folder: The run.
        config: Its configuration.
        evaluation: What is measured of it.
        coords: The axes of what is found, each with its coordinates.
    """

    setting: str
    seed: int
    folder: Path
    config: TrainingConfig
    evaluation: SweepEvaluation
    coords: Mapping[str, list[Any]]

    def result(self) -> EvaluationResult | None:
        """What was found of the run as it is now; None if it is not trained or measured so far."""
        if not (self.folder / RESULT).exists() or not Run.load(self.folder).finished:
            return None
        try:
            found = EvaluationResult.load(self.folder / RESULT)
        except CheckpointError:  # damaged, or of another kind: it is made anew
            return None
        owned = not Owner.of_run(self.folder).disowns(found.provenance)
        return found if owned and self._measured(found) else None

    def _measured(self, found: EvaluationResult) -> bool:
        """Whether an evaluation is the one that is asked for."""
        asked = (self.evaluation.samples, self.evaluation.seed)
        axes = {axis: c.values.tolist() for axis, c in found.data.coords.items() if axis in _AXES}
        return asked == (found.n_samples, found.provenance.seed) and axes == dict(self.coords)


def run_cell(cell: SweepCell) -> str:
    """Train and evaluate, or go on with what is there; returns what went wrong, "" if nothing.

    A cell that another process works on, as one that outlived a killed sweep, is waited for.
    """
    try:
        with showing(False):
            _train_and_evaluate(cell)
    except InputError as error:
        return str(error)
    except Exception as error:  # whatever it is, the other cells can do without this one
        return f"{type(error).__name__}: {str(error) or 'no more is said'}"
    return ""


def _train_and_evaluate(cell: SweepCell) -> None:
    state = (cell.folder / CHECKPOINT).parent
    state.mkdir(parents=True, exist_ok=True)
    with in_turn(state), cpu_threads(cell.config.threads):
        if cell.result() is not None:
            return
        run = train(cell.config, cell.folder, progress=False)
        record_training(run.folder, run.seconds)
        result = evaluate(
            run.model(resolve_device(cell.config.device)).eval(),
            run.task(),
            cell.coords["length"],
            distributions=cell.coords["distribution"],
            extra_loops=cell.coords["extra_loop"],
            loops=cell.evaluation.loops,
            n_samples=cell.evaluation.samples,
            trained_up_to=run.cutoff,
            seed=cell.evaluation.seed,
        )
        provenance = replace(result.provenance, run=Owner.of_run(run.folder).config)
        path = run.folder / RESULT
        replace(result, provenance=provenance).save(path.parent, path.name.removesuffix(SUFFIX))
