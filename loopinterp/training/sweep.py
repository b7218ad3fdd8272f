"""Running a sweep: every cell a run, in any order, killed and gone on with at any moment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loopinterp.errors import CheckpointError, InputError, check_integer
from loopinterp.file_locks import need_writable
from loopinterp.progress import showing, track
from loopinterp.storage import write_bytes, write_json
from loopinterp.training.config import TrainingConfig
from loopinterp.training.fitting import check_same
from loopinterp.training.run import CONFIG, Run
from loopinterp.training.sweep_cells import SweepCell, run_cell
from loopinterp.training.sweep_file import Sweep
from loopinterp.training.sweep_result import Ended, SweepResult, cell_name, gather
from loopinterp.training.sweep_workers import in_processes, on_cluster

CELLS, PLAN, TABLE, LOGS = "cells", "sweep.json", "sweep.csv", "jobs"


def run_sweep(
    sweep: Sweep,
    out: str | Path,
    *,
    scale: str | None = None,
    only: Sequence[str] = (),
    jobs: int | None = None,
    cluster: str | None = None,
    options: Mapping[str, Any] | None = None,
    progress: bool = True,
) -> SweepResult:
    """Train and evaluate all settings and seeds of a sweep, or go on with one that was stopped.

    ::

        OUT/sweep.json           the sweep, at its scale
        OUT/cells/SETTING/seed-0 an ordinary run, with its results/generalisation.safetensors
        OUT/sweep.csv            the table
        OUT/sweep.safetensors    the result

    A cell that fails, as for a setting that cannot be or a loss that is not finite, stops no
    other: it is named in the result (``failed``). A cell that has come to its end is not run
    again, so that a sweep that was killed goes on, and ends with the same table.

    Args:
        sweep: The sweep (:meth:`Sweep.read` reads one).
        out: Its folder.
        scale: ``laptop`` or ``paper``, of those that it has; ``laptop`` if None.
        only: Settings to run now; the table has the others as far as they are there. All if empty.
        jobs: Processes of this machine, 1 if None; most jobs at the same time on a cluster, any
            number if None.
        cluster: ``slurm``, to have each cell run as a job there.
        options: Parameters of submitit, as ``timeout_min`` and ``slurm_partition``.
        progress: Whether to show a bar over the cells.

    Raises:
        InputError: If a name is unknown, the folder cannot be written or holds another sweep's
            runs, or the cluster is not to be had.
    """
    out, chosen = Path(out), sweep.at(scale)
    need_writable(out)
    picked = chosen.pick(only)
    if jobs is not None:
        check_integer("jobs", jobs, least=1, most=1024)
    if options and cluster is None:
        fix = "Leave them out, or name a cluster."
        raise InputError("options", expected="none on this machine", given=repr(options), fix=fix)
    plan = _plan(chosen, out)
    write_json(out / PLAN, chosen.to_dict())
    picked_cells = [cell for cell in plan.cells if cell.setting in picked]
    left = [cell for cell in picked_cells if _ended(cell) is None]
    if cluster is None:
        ends = in_processes(run_cell, left, jobs=jobs or 1)
    else:
        more = {"cluster": cluster, "folder": out / LOGS, "jobs": jobs, "options": options or {}}
        ends = on_cluster(run_cell, left, **more)
    failed = {name: why for name, why in plan.failed.items() if name[0] in picked}
    with showing(progress):
        for place, error in track(ends, "sweep", total=len(left)):
            if error:
                failed[left[place].setting, left[place].seed] = error
    cells = (cell for cell in plan.cells if (cell.setting, cell.seed) not in failed)
    result = gather(
        chosen,
        plan.coords,
        [ended for cell in cells if (ended := _ended(cell)) is not None],
        {cell_name(*name): failed[name] for name in plan.order if name in failed},
    )
    result.save(out)
    write_bytes(out / TABLE, result.table().to_csv(index=False).encode())
    return result


@dataclass(frozen=True)
class _Plan:
    """The cells that can be, and why others cannot."""

    coords: dict[str, list[Any]]
    order: list[tuple[str, int]]
    cells: list[SweepCell] = field(default_factory=list)
    failed: dict[tuple[str, int], str] = field(default_factory=dict)


def _plan(sweep: Sweep, out: Path) -> _Plan:
    """What there is to do; refused as a whole if a folder holds the run of another sweep."""
    plan = _Plan(
        sweep.evaluation.coords(sweep.base.make_task()),
        [(name, seed) for name in sweep.changes for seed in sweep.seeds],
    )
    for setting, seed in plan.order:
        folder = out / CELLS / setting / f"seed-{seed}"
        try:
            config = sweep.config_of(setting, seed)
        except InputError as error:
            plan.failed[setting, seed] = str(error)
            continue
        _need_same(config, folder)
        plan.cells.append(SweepCell(setting, seed, folder, config, sweep.evaluation, plan.coords))
    return plan


def _need_same(config: TrainingConfig, folder: Path) -> None:
    """Raise if a run is there that is configured otherwise; where it is trained is left to it."""
    with suppress(CheckpointError):  # a damaged run is a cell that fails
        if (folder / CONFIG).exists() and isinstance(
            saved := Run.load(folder).config, type(config)
        ):
            check_same(saved, config.replace(device=saved.device), folder)


def _ended(cell: SweepCell) -> Ended | None:
    with suppress(CheckpointError):
        if (result := cell.result()) is not None:
            run = Run.load(cell.folder)
            return Ended(cell.setting, cell.seed, result, run.seconds, run.cutoff)
    return None
