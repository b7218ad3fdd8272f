"""Where the cells of a sweep run: processes of this machine, or jobs of a cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from loopinterp.errors import InputError

T = TypeVar("T")
Work = Callable[[T], str]
"""From a cell to what went wrong, "" if nothing; it raises nothing."""

_KILLED = "its process was killed; the machine may be out of memory"


def in_processes(work: Work[T], cells: Sequence[T], *, jobs: int) -> Iterator[tuple[int, str]]:
    """Work on cells in processes of this machine, with joblib; in this process for one job.

    A cell whose process dies (as for want of memory) takes those beside it along. What is left is
    then worked on one by one, each in a process of its own, so that no other is blamed.

    Args:
        work: What is done with each.
        cells: The cells.
        jobs: Processes.

    Yields:
        Place of a cell, and what went wrong with it, as they end.
    """
    from joblib import Parallel, delayed
    from joblib.externals.loky.process_executor import TerminatedWorkerError

    left = dict(enumerate(cells))
    try:
        pool: Any = Parallel(n_jobs=jobs, return_as="generator_unordered")
        for place, error in pool(delayed(_numbered)(work, *each) for each in enumerate(cells)):
            del left[place]
            yield place, error
    except TerminatedWorkerError:
        for place, cell in left.items():
            try:
                alone: Any = Parallel(n_jobs=2)([delayed(_numbered)(work, place, cell)])
                yield from alone
            except TerminatedWorkerError:
                yield place, _KILLED


def _numbered(work: Work[T], place: int, cell: T) -> tuple[int, str]:
    return place, work(cell)


def on_cluster(
    work: Work[T],
    cells: Sequence[T],
    *,
    cluster: str,
    folder: Path,
    jobs: int | None,
    options: Mapping[str, Any],
) -> Iterator[tuple[int, str]]:
    """Work on cells in jobs of a cluster, with submitit: one array of jobs, a cell each.

    A job that is preempted or runs out of time is queued again, and goes on where it was. The
    folders of the cells have to be on a file system that the nodes share.

    Args:
        work: What is done with each.
        cells: The cells.
        cluster: ``slurm``, or another name that submitit knows (``local``).
        folder: Where submitit keeps scripts and logs.
        jobs: Most jobs that run at the same time; None for no bound.
        options: Parameters of submitit, as ``timeout_min`` and ``slurm_partition``.

    Yields:
        Place of a cell, and what went wrong with it, as they end.

    Raises:
        InputError: If submitit is not installed, or refuses the cluster or an option.
    """
    submitit = _submitit()
    bound = {} if jobs is None else {"slurm_array_parallelism": jobs}
    try:
        executor = submitit.AutoExecutor(folder=folder, cluster=cluster)
        executor.update_parameters(name="loopinterp-sweep", **bound, **options)
    except (ValueError, NameError, TypeError, RuntimeError) as error:
        raise InputError(
            f"cluster {cluster!r}",
            expected="one that submitit has here, with options that it takes",
            given=f"another ({error})",
            fix="See submitit.AutoExecutor for the names.",
        ) from error
    submitted = executor.map_array(_Requeued(work), cells)
    places = {id(job): place for place, job in enumerate(submitted)}
    for job in submitit.helpers.as_completed(submitted):
        try:
            error = job.result()
        except Exception as failed:  # submitit's own kinds: killed, timed out too often, lost
            error = f"its job failed: {str(failed).strip().splitlines()[-1]}"
        yield places[id(job)], error


class _Requeued:
    """Work that goes on in a new job when its own is taken away."""

    def __init__(self, work: Work[Any]) -> None:
        self._work = work

    def __call__(self, cell: Any) -> str:
        return self._work(cell)

    def checkpoint(self, cell: Any) -> Any:
        """What submitit is to run next; the cell's own checkpoint is on disk."""
        return _submitit().helpers.DelayedSubmission(self, cell)


def _submitit() -> Any:
    try:
        import_module("submitit.helpers")
        return import_module("submitit")
    except ImportError as error:
        raise InputError(
            "cluster",
            expected="submitit, which talks to it",
            given="a Python without it",
            fix="Install it where the jobs will run too: pip install 'loopinterp[cluster]'.",
        ) from error
