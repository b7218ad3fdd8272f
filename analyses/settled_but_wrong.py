"""Convergence is not correctness: which inputs a model settles on wrongly, model by model.

    python -m analyses.settled_but_wrong                # every model of the zoo: some minutes
    python -m analyses.settled_but_wrong --name parity  # one anew, the others as they were

Every example is run for four times T(n) at 1, 2 and 4 times the training cutoff, on every input
distribution, and falls into one of six classes, by whether all positions that are asked come to
rest and whether the answer is right at T(n) and at the end. Beside them stands what tells the
wrong ones best: of a few properties of an answer and its input, the one whose rank separates wrong
from right best (area under the curve; .5 says nothing). What was found is kept in
analyses/results/settled_but_wrong.csv; the table goes into a page of the documentation.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise

import numpy as np
import pandas as pd
import torch
from sklearn.metrics import roc_auc_score

from analyses.tables_in_pages import table
from analyses.zoo_tables import measure_zoo
from loopinterp.dynamics import FATES, convergence_study
from loopinterp.tasks import Addition, Batch, Task
from loopinterp.zoo import pretrained_run

FILE, PAGE, NAME = "settled_but_wrong.csv", "results/convergence.md", "convergence-and-accuracy"
TIMES = (1, 2, 4)
FEWEST = 5
"""Wrong and right answers that it takes to say what the wrong ones have in common."""


def main() -> None:
    measure_zoo(
        "Where settling and being right part.", measure, as_table,
        file=FILE, page=PAGE, table=NAME, times=TIMES, samples=50,
    )  # fmt: skip


def measure(name: str, times: Sequence[int], samples: int) -> pd.DataFrame:
    """Shares of the classes, and what tells the wrong answers, by length and distribution."""
    run = pretrained_run(name)
    model, task, rows = run.model(), run.task, []
    for n in (run.cutoff * k for k in times):
        for distribution in task.distributions:
            batch = task.sample(
                n,
                batch_size=samples,
                generator=torch.Generator().manual_seed(0),
                distribution=distribution,
            )
            n_loops = max(64, 4 * int(batch.n_loops.max()))
            result = convergence_study(model, batch, n_loops=n_loops, n_spectral=0, limit_steps=1)
            fates = result.fates().values
            shares = {fate: float((fates == fate).mean()) for fate in FATES}
            wrong = np.char.find(fates, "wrong") >= 0
            told = dict(zip(("told_by", "auc"), telling(task, batch, wrong)))
            rows.append(
                {"model": name, "length": n, "distribution": distribution, "samples": samples}
                | shares
                | told
            )
    return pd.DataFrame(rows)


def telling(task: Task, batch: Batch, wrong: np.ndarray) -> tuple[str, float]:
    """The property that separates wrong answers from right ones best, and how well."""
    if min(wrong.sum(), (~wrong).sum()) < FEWEST:
        return "", np.nan
    scores = {
        name: float(roc_auc_score(wrong, values))
        for name, values in properties(task, batch).items()
        if np.ptp(values) > 0
    }
    best = max(scores, key=lambda name: abs(scores[name] - 0.5))
    return best, scores[best]


def properties(task: Task, batch: Batch) -> dict[str, np.ndarray]:
    """What may tell an example: numbers of its answer and of its input."""
    asked, inputs = batch.targets >= 0, batch.inputs
    rows = list(zip(batch.targets, asked))
    answers = [target[own].tolist() for target, own in rows]
    found = {
        "sum of the answer's symbols": [sum(a) for a in answers],
        "changes along the answer": [sum(x != y for x, y in pairwise(a)) for a in answers],
        "longest run in the answer": [longest_run(a) for a in answers],
        "longest run in the input": [longest_run(x.tolist()) for x in inputs],
        "changes along the input": [int((x[1:] != x[:-1]).sum()) for x in inputs],
    }
    if isinstance(task, Addition):
        # A carry that is handed on: a bit pair of one 1, with a carry coming in.
        a, b = task.operands(batch)
        handed = (a + b == 1) & (task.carry_in(batch) == 1)
        found["longest way of a carry"] = [longest_run(x.tolist(), of=True) for x in handed]
    return {name: np.array(values, dtype=float) for name, values in found.items()}


def longest_run(values: list, of: object = None) -> int:
    """Length of the longest run of one value, of a given one if it is said."""
    runs = (len([*run]) for value, run in groupby(values) if of is None or value == of)
    return max(runs, default=0)


def as_table(known: pd.DataFrame) -> str:
    """A row for each model and length, on the distribution where the fewest rest right."""
    rows = []
    for name, n in known[["model", "length"]].drop_duplicates().values.tolist():
        cells = known.query("model == @name and length == @n")
        right = [fate for fate in FATES if "wrong" not in fate or "was right" in fate]
        cells = cells.assign(ever_right=cells[right].sum(axis=1))
        at = cells.sort_values([FATES[0], "ever_right"], kind="stable").iloc[0]
        shown = [f"{at[fate]:.2f}" if at[fate] else "" for fate in FATES]
        told = "" if pd.isna(at["auc"]) else f"{at['told_by']} ({at['auc']:.2f})"
        rows.append([f"{name}, {at['distribution']}", n, *shown, told])
    return table(["model, inputs", "n", *FATES, "wrong ones are told by"], rows)


if __name__ == "__main__":
    main()
