"""Runs a sweep, each cell as a run, and resumes an interrupted one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field

from loopinterp.core.boundary import checked
from loopinterp.core.errors import CheckpointError, InputError, need, spell_error
from loopinterp.core.results import SUFFIX
from loopinterp.core.run_files import Owner, record_training
from loopinterp.core.storage import in_turn, need_writable, write_bytes, write_json
from loopinterp.core.text import showing, track
from loopinterp.training.config import TrainingConfig
from loopinterp.training.device import cpu_threads
from loopinterp.training.evaluation import EvaluationResult, evaluate
from loopinterp.training.fitting import check_same, train
from loopinterp.training.run import CHECKPOINT, CONFIG, Run
from loopinterp.training.seeds import SweepResult, gather
from loopinterp.training.sweep_file import Sweep, SweepEvaluation

T = TypeVar("T")
_Work = Callable[[T], str | None]  # from a cell to its error message, or None
RESULT = f"results/generalisation{SUFFIX}"  # where evaluate and the report look too


@checked
def run_sweep(
    sweep: Sweep,
    out: str | Path,
    *,
    scale: str | None = None,
    only: Sequence[str] = (),
    jobs: Annotated[int, Field(ge=1, le=1024)] | None = None,
    cluster: str | None = None,
    options: Mapping[str, Any] | None = None,
    progress: bool = True,
) -> SweepResult:
    """Train and evaluate all settings and seeds of a sweep, or resume an interrupted one.

    ::

        OUT/sweep.json           the sweep, at its scale
        OUT/cells/SETTING/seed-0 an ordinary run, with its results/generalisation.safetensors
        OUT/sweep.csv            the table
        OUT/sweep.safetensors    the result

    A cell that fails (an invalid setting, a loss that is not finite) does not stop the others; the
    result lists it in ``failed``. Finished cells are not run again.

    Args:
        scale: ``laptop`` or ``paper``, if the sweep has it; ``laptop`` if None.
        only: Settings to run now; all if empty. The table has all finished ones.
        jobs: Processes of this machine, 1 if None; on a cluster, most simultaneous jobs, unlimited
            if None.
        cluster: ``slurm``, to run each cell as a job there.
        options: Parameters of submitit, such as ``timeout_min`` and ``slurm_partition``.
    """
    out, chosen = Path(out), sweep.at(scale)
    need_writable(out)
    picked = chosen.pick(only)
    here, fix = cluster is None, "Leave them out, or name a cluster."
    need(not (options and here), "options", "none on this machine", repr(options), fix)
    cells, invalid = _plan(chosen, out)
    write_json(out / "sweep.json", chosen.to_dict())
    left = [cell for cell in cells if cell.setting in picked and _finished(cell) is None]
    if cluster is None:
        errors = _in_processes(run_cell, left, jobs=jobs or 1)
    else:
        more = {"cluster": cluster, "folder": out / "jobs", "jobs": jobs, "options": options or {}}
        errors = _on_cluster(run_cell, left, **more)
    # An invalid setting fails without being run; it stops no other.
    failed = {name: why for name, why in invalid.items() if name[0] in picked}
    with showing(progress):
        for place, error in track(errors, "sweep", total=len(left)):
            if error:
                failed[left[place].setting, left[place].seed] = error
    ends = {(cell.setting, cell.seed): _finished(cell) for cell in cells}
    finished = {name: end for name, end in ends.items() if end and name not in failed}
    result = gather(chosen, finished, failed)
    result.save(out)
    write_bytes(out / "sweep.csv", result.table().to_csv(index=False).encode())
    return result


def _plan(sweep: Sweep, out: Path) -> tuple[list[SweepCell], dict[tuple[str, int], str]]:
    coords = sweep.evaluation.coords(sweep.base.make_task())
    cells, invalid = [], {}
    for setting, seed in product(sweep.changes, sweep.seeds):
        folder = out / "cells" / setting / f"seed-{seed}"
        try:
            config = sweep.config_of(setting, seed)
        except InputError as error:
            invalid[setting, seed] = str(error)
            continue
        with suppress(CheckpointError):  # a damaged run is a cell that fails
            saved = Run.load(folder).config if (folder / CONFIG).exists() else None
            if isinstance(saved, TrainingConfig):  # where it was trained makes no difference
                check_same(saved, config.replace(device=saved.device), folder)
        cells.append(SweepCell(setting, seed, folder, config, sweep.evaluation, coords))
    return cells, invalid


def _finished(cell: SweepCell) -> tuple[Run, EvaluationResult] | None:
    with suppress(CheckpointError):
        if (result := cell.result()) is not None:
            return Run.load(cell.folder), result
    return None


def _in_processes(
    work: _Work[T], cells: Sequence[T], *, jobs: int
) -> Iterator[tuple[int, str | None]]:
    """Work on cells in processes of this machine, with joblib; in this process for one job.

    If a process dies (of lack of memory), the remaining cells run one by one, to identify the
    failing one. Yields a cell's index and its error message or None.
    """
    from joblib import Parallel, delayed
    from joblib.externals.loky.process_executor import TerminatedWorkerError

    @delayed
    def numbered(place: int, cell: T) -> tuple[int, str | None]:
        return place, work(cell)

    left = dict(enumerate(cells))
    try:
        pool: Any = Parallel(n_jobs=jobs, return_as="generator_unordered")
        for place, error in pool(numbered(*each) for each in enumerate(cells)):
            del left[place]
            yield place, error
    except TerminatedWorkerError:
        for place, cell in left.items():
            try:
                single: Any = Parallel(n_jobs=2)([numbered(place, cell)])
                yield from single
            except TerminatedWorkerError:
                yield place, "its process was killed; the machine may be out of memory"


def _on_cluster(
    work: _Work[T],
    cells: Sequence[T],
    *,
    cluster: str,
    folder: Path,
    jobs: int | None,
    options: Mapping[str, Any],
) -> Iterator[tuple[int, str | None]]:
    """Work on cells in jobs of a cluster, with submitit: one array of jobs, one per cell.

    Preempted jobs are requeued and resume. The cells' folders must be on a shared file system.
    Yields as :func:`_in_processes`.
    """
    try:
        submitit: Any = import_module("submitit")
        helpers: Any = import_module("submitit.helpers")
    except ImportError as error:
        fix = "Install it where the jobs will run too: pip install 'loopinterp[cluster]'."
        got = "a Python without it"
        raise InputError("cluster", expected="submitit", given=got, fix=fix) from error
    bound = {} if jobs is None else {"slurm_array_parallelism": jobs}
    try:
        executor = submitit.AutoExecutor(folder=folder, cluster=cluster)
        executor.update_parameters(name="loopinterp-sweep", **bound, **options)
    except (ValueError, NameError, TypeError, RuntimeError) as error:
        what, got = f"cluster {cluster!r}", f"another ({error})"
        expected = "one that submitit has here, with options that it takes"
        fix = "See submitit.AutoExecutor for the names."
        raise InputError(what, expected=expected, given=got, fix=fix) from error
    submitted = executor.map_array(_Requeued(work), cells)
    places = {id(job): place for place, job in enumerate(submitted)}
    for job in helpers.as_completed(submitted):
        try:
            error = job.result()
        except Exception as failed:  # submitit's own kinds: killed, timed out too often, lost
            error = f"its job failed: {str(failed).strip().splitlines()[-1]}"
        yield places[id(job)], error


@dataclass(frozen=True)
class _Requeued:
    work: _Work[Any]

    def __call__(self, cell: Any) -> str | None:
        return self.work(cell)

    def checkpoint(self, cell: Any) -> Any:
        """The job that submitit runs next; the cell's own checkpoint is on disk."""
        return import_module("submitit.helpers").DelayedSubmission(self, cell)


@dataclass(frozen=True)
class SweepCell:
    """One setting and seed of a sweep, as a run; ``coords`` are the axes of its result."""

    setting: str
    seed: int
    folder: Path
    config: TrainingConfig
    evaluation: SweepEvaluation
    coords: Mapping[str, list[Any]]

    def result(self) -> EvaluationResult | None:
        """The run's result, if it is trained and evaluated like this."""
        # Of another run, or made with other options, a result is made anew.
        if not (self.folder / RESULT).exists() or not Run.load(self.folder).finished:
            return None
        try:
            result = EvaluationResult.load(self.folder / RESULT)
        except CheckpointError:  # damaged, or of another kind: it is made anew
            return None
        axes = ("extra_loop", "distribution", "length", "loop")
        coords = {k: c.values.tolist() for k, c in result.data.coords.items() if k in axes}
        options = (result.n_samples, result.provenance.seed)
        same = coords == self.coords and options == (self.evaluation.samples, self.evaluation.seed)
        return result if same and not Owner.of_run(self.folder).disowns(result.provenance) else None


def run_cell(cell: SweepCell) -> str | None:
    """Train and evaluate, or resume, a cell; return the message of an error.

    If another process (of a killed sweep) works on the cell, wait for it.
    """
    state, config, evaluation = (cell.folder / CHECKPOINT).parent, cell.config, cell.evaluation
    try:
        state.mkdir(parents=True, exist_ok=True)
        with showing(False), in_turn(state), cpu_threads(config.threads):
            if cell.result() is not None:
                return None
            run = train(config, cell.folder, progress=False)
            record_training(run.folder, run.seconds)
            result = evaluate(
                run.model(config.device),
                run.task,
                cell.coords["length"],
                distributions=cell.coords["distribution"],
                extra_loops=cell.coords["extra_loop"],
                loops=evaluation.loops,
                n_samples=evaluation.samples,
                trained_up_to=run.cutoff,
                seed=evaluation.seed,
            )
            provenance = replace(result.provenance, run=Owner.of_run(run.folder).config)
            path = run.folder / RESULT
            result = replace(result, provenance=provenance)
            result.save(path.parent, path.name.removesuffix(SUFFIX))
    except Exception as error:  # whatever it is, the other cells can do without this one
        return spell_error(error)
    return None
