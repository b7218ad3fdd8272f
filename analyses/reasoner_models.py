"""The models of ``train_trm_small.py``, puzzles to measure them on, and the files of rows."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from analyses.tables_in_pages import replaced
from analyses.train_trm_small import KINDS, TASKS, build, fresh, opened, trained
from loopinterp.adapters import PublishedModel
from loopinterp.core.storage import write_bytes
from loopinterp.dynamics import exact_match, likeliest
from loopinterp.dynamics.measures import correctness
from loopinterp.tasks import Batch

LOOPS = 16
"""Loops of a run as in training."""
LATER = 64
"""Loops of a run that shows whether a state converges."""

Who = dict[str, Any]
"""Task, model and seed: the first columns of every table."""
Row = dict[str, Any]
Part = Callable[[Who, Any, int], Iterator[Row]]
"""Measures a model on some puzzles."""


def models(out: Path, seeds: list[int]) -> Iterator[tuple[Who, PublishedModel]]:
    """Every model of the folder, and untrained ones."""
    for task in TASKS:
        for kind in KINDS:
            for seed in seeds:
                who = {"task": task, "model": kind, "seed": seed}
                if (out / f"{kind}-{task}-seed-{seed}.safetensors").exists():
                    yield who, opened(trained(out, kind, task, seed), task)
            if kind != "unlooped":
                who = {"task": task, "model": f"untrained {kind}", "seed": 0}
                yield who, opened(build(kind, task, 0), task)


def is_looped(who: Who) -> bool:
    return who["model"] != "unlooped"


def is_trained(who: Who) -> bool:
    return not who["model"].startswith("untrained")


def answered(model: Any, batch: Batch, n_loops: int = LOOPS) -> Tensor:
    """Whether each puzzle is solved after so many loops, [batch]."""
    rights = []
    for rows in torch.arange(len(batch)).split(250):
        answer = likeliest(model(batch.inputs[rows], n_loops=n_loops))
        rights.append(exact_match(correctness(answer, batch.targets[rows])).bool())
    return torch.cat(rights)


def chosen(who: Who, model: Any, n: int, most: int) -> tuple[Batch, int]:
    """Puzzles wrong after the last loop, then as many right ones; how many are wrong."""
    batch = fresh(who["task"], n, seed=2 * 10**6)
    right = answered(model, batch)
    wrong, fine = ((right == x).nonzero()[:most, 0] for x in (False, True))
    return batch[torch.cat((wrong, fine))], len(wrong)


def measure_part(part: Part, who: Who, model: Any, n: int, results: Path) -> None:
    """Put what a part finds in a model into its file."""
    with torch.no_grad():
        rows = pd.DataFrame(list(part(who, model, n)))
    file = results / f"reasoners_{part.__name__}.csv"
    table = replaced(file, rows, [*who])
    write_bytes(file, table.to_csv(index=False, float_format="%.4f").encode())
    print(part.__name__, *who.values(), len(rows), flush=True)


def rows_of(
    part: Part,
    args: argparse.Namespace,
    wanted: Callable[[Who], bool] = lambda who: is_looped(who) and is_trained(who),
) -> pd.DataFrame:
    """The file of a paper's script, measured anew unless its saved rows are asked for."""
    if not (args.saved or [*args.weights.glob("*.safetensors")]):
        raise FileNotFoundError(f"{args.weights}: no weights; see train_trm_small, or --saved")
    for who, model in () if args.saved else models(args.weights, args.seed):
        if wanted(who):
            measure_part(part, who, model, args.samples, args.results)
    return pd.read_csv(args.results / f"reasoners_{part.__name__}.csv")


def models_of(rows: Any) -> list[tuple[str, Any]]:
    """The rows of each trained model, by its name."""
    trained_rows = rows[~rows["model"].str.startswith("untrained")]
    return [
        (f"{model.replace('trm', 'TRM').replace('hrm', 'HRM')}, {task}s, seed {seed}", each)
        for (task, model, seed), each in trained_rows.groupby(["task", "model", "seed"], sort=False)
    ]
