"""The budget law: does a model work as many positions a loop as it was given in training?

    python -m analyses.budget_law --out runs/budget_law --jobs 2

A model that is trained to be done with n positions in T loops is said to resolve v = n / T of them
a loop ever after, and so to need n / v loops for any n (arXiv 2607.20594: v grows as n / T to the
power .98 +- .04). Here each task is learnt with several cutoffs and several loops a position, in a
window of four. v is n over the first loop after which nine answers in ten are wholly right, on the
input distribution where that is latest; a cutoff that was not learnt has none, and is shown as it
is. The table is kept in analyses/results/budget_law.csv.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from joblib import Parallel, delayed

from analyses.tables_in_pages import PAGES, RESULTS, rewrite, table
from loopinterp.dynamics import convergence_study, extrapolation_study
from loopinterp.tasks import as_batch
from loopinterp.training import Run, Sweep, SweepEvaluation, run_sweep

TASKS = ("parity", "addition", "prefix_sum")
CUTOFFS = (8, 12, 16)
SCALES = (1.0, 2.0, 3.0)
"""Loops of training over T(n). With half of T(n) parity and prefix sums are not learnt at all."""

CHANGES = (
    "model.attention_window=4", "model.relative_window=4", "state_noise=0.3",
    "objective.extra_loops=0", "objective.hold_loops=12", "steps=1600", "batch_size=32",
)  # fmt: skip
"""Answers are held for twelve loops and states are noisy: without, three prefix sums of nine are
learnt."""

TIMES = (0.5, 1, 1.5, 2)
"""Lengths asked, over the cutoff."""

ENOUGH, RESAMPLES = 0.9, 1000
LEAST_RANGE, LEAST_MODELS = 1.5, 5
"""Of the models that learnt: greatest n / T over the least, and how many they are. Below these they
say nothing of v: an interval over three models may have no width."""

FILE, PAGE, NAME = "budget_law.csv", "results/convergence.md", "budget-law"


def main() -> None:
    parser = argparse.ArgumentParser(description="Positions resolved a loop, against training.")
    parser.add_argument("--out", type=Path, default=Path("runs/budget_law"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGES / PAGE)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--cutoffs", type=int, nargs="+", default=CUTOFFS)
    parser.add_argument("--tasks", nargs="+", default=TASKS)
    parser.add_argument("--scales", type=float, nargs="+", default=SCALES, help="Loops over T(n).")
    parser.add_argument("--set", action="append", default=[], help="Changes of the training.")
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=1, help="Processes.")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for task in args.tasks:
        sweep = Sweep(
            about=f"How many positions a loop does {task} learn?",
            recipe=task,
            set=(*CHANGES, *args.set),
            grid={
                "curriculum.max_n": tuple(args.cutoffs),
                "objective.loop_scale": tuple(args.scales),
            },
            seeds=tuple(args.seeds),
            evaluation=SweepEvaluation(lengths=(max(args.cutoffs),), samples=32),
        )
        run_sweep(sweep, args.out / task, jobs=args.jobs)
        cells = sorted((args.out / task / "cells").glob("*/seed-*"))
        rows += Parallel(n_jobs=args.jobs)(delayed(speeds)(cell, args.samples) for cell in cells)
    found = pd.concat(rows)
    args.results.mkdir(parents=True, exist_ok=True)
    found.to_csv(args.results / FILE, index=False, float_format="%.4f")
    rewrite(args.page, {NAME: as_table(pd.read_csv(args.results / FILE))})
    print(as_table(found))


def speeds(folder: Path, samples: int) -> pd.DataFrame:
    """The least loops of one model at several lengths, and the loop at which its tokens settle."""
    torch.set_num_threads(1)
    run = Run.load(folder)
    model, task = run.model(), run.task
    config: Any = run.config
    model.loop_rule = None
    cutoff, scale = config.curriculum.max_n, config.objective.loop_scale
    rows = []
    for n in sorted({round(cutoff * k) for k in TIMES}):
        n_loops = 4 * max(int(task.n_loops(n) * max(scale, 1)), 8)
        needed, settled = 0.0, []
        for distribution in task.distributions:
            batch = task.sample(
                n,
                batch_size=samples,
                generator=torch.Generator().manual_seed(1),
                distribution=distribution,
            )
            exact = extrapolation_study(model, batch, n_loops=n_loops).data["exact"].mean("batch")
            enough = exact["loop"].values[exact.values >= ENOUGH]
            needed = max(needed, enough[0] if len(enough) else np.inf)
            few = as_batch(batch[:32])
            times = convergence_study(model, few, n_loops=max(n_loops, 24), n_spectral=0)
            settled.append(float(times.settling_times().where(times.data["counted"]).median()))
        rows.append({"n": n, "least_loops": needed, "settled": max(settled)})
    return pd.DataFrame(rows).assign(
        task=config.task,
        cutoff=cutoff,
        trained_loops=float(np.ceil(scale * task.n_loops(cutoff))),
        seed=config.seed,
    )


def exponent(x: Any, y: Any, of: Any = None) -> tuple[float, float, float]:
    """Slope of log y over log x, with a 95% bootstrap interval over points, or over models.

    Args:
        x: Numbers above 0.
        y: Numbers above 0.
        of: The model of each point, where one has several: it then has a level of its own.
    """
    x, y = np.log(np.asarray(x, float)), np.log(np.asarray(y, float))
    if not len(x):
        return np.nan, np.nan, np.nan
    groups = np.arange(len(x)) if of is None else np.unique(of, return_inverse=True)[1]
    rows = [np.flatnonzero(groups == g) for g in range(groups.max(initial=-1) + 1)]
    if of is not None:
        x, y = (np.concatenate([v[r] - v[r].mean() for r in rows]) for v in (x, y))
        rows = np.split(np.arange(len(x)), np.cumsum([len(r) for r in rows])[:-1])
    if np.ptp(x) == 0:
        return np.nan, np.nan, np.nan
    generator, slopes = np.random.default_rng(0), []
    for _ in range(RESAMPLES):
        drawn = np.concatenate([rows[k] for k in generator.integers(0, len(rows), len(rows))])
        if np.ptp(x[drawn]) > 0:
            slopes.append(np.polyfit(x[drawn], y[drawn], 1)[0])
    low, high = np.quantile(slopes, (0.025, 0.975))
    return float(np.polyfit(x, y, 1)[0]), float(low), float(high)


def as_table(found: pd.DataFrame) -> str:
    """A row for each task: the exponents, and of how many models they are."""
    rows = []
    for task, of in found.groupby("task", sort=False):
        at = of.query("n == cutoff")
        learnt = at.query("least_loops < inf")
        given = learnt["cutoff"] / learnt["trained_loops"]
        differ = len(given) >= LEAST_MODELS and given.max() >= LEAST_RANGE * given.min()
        speed = learnt["n"] / learnt["least_loops"]
        law = exponent(given, speed) if differ else (np.nan, np.nan, np.nan)
        models = ["cutoff", "trained_loops", "seed"]
        growth = _growth(of, "least_loops", models)
        settling = _growth(of, "settled", models)
        ratio = pd.Series(learnt["least_loops"] / learnt["trained_loops"]).median()
        share = f"{len(learnt)} of {len(at)}"
        rows.append([task, share, _said(law), f"{ratio:.2f}", _said(growth), _said(settling)])
    return table(
        ["task", "models that learnt", "v over n / T, exponent", "least loops / training loops",
         "least loops over n, exponent", "settling over n, exponent"],
        rows,
    )  # fmt: skip


def _growth(of: pd.DataFrame, what: str, models: list[str]) -> tuple[float, float, float]:
    """Exponent of a growth with n that all models of a task share, each from a level of its own."""
    known = of.query(f"{what} < inf")
    names = known[models].astype(str).agg(" ".join, axis="columns")
    return exponent(known["n"], known[what], of=names)


def _said(estimate: tuple[float, float, float]) -> str:
    value, low, high = estimate
    return "not known" if np.isnan(value) else f"{value:.2f} ({low:.2f} to {high:.2f})"


if __name__ == "__main__":
    main()
