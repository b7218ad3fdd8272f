"""The grid of recall x norm x loop norm: does the fixed-point framework say which models go far?

    python -m analyses.fixed_point_grid --task prefix_sum --out runs/grid --jobs 2

Trains what ``analyses/sweeps/recall_and_norm*.json`` say (resumable), and looks at every model: has
each input a limit, is it the same from every start (reachability), does it know the input (input
dependence), is it stable and well conditioned (geometry), and what has become of the answers after
500 loops? A row for each model goes to ``analyses/results/fixed_point_grid.csv``; the table of the
settings and the verdicts on the framework's claims (``analyses/grid_claims.py``) go into a page of
the documentation, and accuracy against loops, a panel a setting, to ``OUT/TASK/grid.html``.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from joblib import Parallel, delayed

from analyses.grid_claims import RECALL, SETTING, mean_and_error, verdicts
from analyses.tables_in_pages import PAGES, RESULTS, ROOT, rewrite, table, with_error
from loopinterp.core.results import load_result
from loopinterp.core.storage import read_json_object, write_json
from loopinterp.dynamics import (
    extrapolation_study,
    input_dependence_study,
    local_stability_study,
    reachability_study,
)
from loopinterp.figures import LinePanel, Series, line_panels
from loopinterp.models import LoopedModel
from loopinterp.tasks import Batch
from loopinterp.training import Run, Sweep, run_sweep

FILE, PAGE = "fixed_point_grid.csv", "results/recall-and-norm.md"
EVALUATION = Path("results", "generalisation.safetensors")
"""What a cell that came to its end has."""

LOOPS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 500)


@dataclass(frozen=True)
class Grid:
    """What is measured of one task's models.

    Attributes:
        sweep: File of the settings.
        trained: Longest problems of the training.
        limits: Length at which limits are sought: problems that most models can solve.
        far: Length of the harder problems that the claims are about.
    """

    sweep: str
    trained: int
    limits: int
    far: int


GRIDS = {
    "prefix_sum": Grid("recall_and_norm.json", trained=16, limits=16, far=64),
    "sudoku": Grid("recall_and_norm_sudoku.json", trained=10, limits=10, far=12),
    "maze": Grid("recall_and_norm_maze.json", trained=5, limits=5, far=9),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="The framework's measures on the whole grid.")
    parser.add_argument("--task", choices=GRIDS, default="prefix_sum")
    parser.add_argument("--out", type=Path, default=Path("runs/grid"))
    parser.add_argument("--only", action="append", default=[], help="Train this setting alone.")
    parser.add_argument("--set", action="append", default=[], help="Changes of the training.")
    parser.add_argument("--seeds", type=int, nargs="+", help="In place of the file's.")
    parser.add_argument("--examples", type=int, default=12, help="Whose limits are sought.")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGES / PAGE)
    parser.add_argument("--jobs", type=int, default=1, help="Processes.")
    args = parser.parse_args()
    torch.set_num_threads(1)
    grid, out = GRIDS[args.task], args.out / args.task
    sweep = Sweep.read(ROOT / "analyses" / "sweeps" / grid.sweep).at()
    changes = {"set": [*sweep.set, *args.set], "seeds": args.seeds or sweep.seeds}
    sweep = Sweep.from_dict({**sweep.to_dict(), **changes})
    run_sweep(sweep, out, only=args.only, jobs=args.jobs)
    cells = [
        (setting, seed, folder)
        for setting in sweep.pick(args.only)
        for seed in sweep.seeds
        if (folder := out / "cells" / setting / f"seed-{seed}" / EVALUATION).exists()
    ]
    measured: Any = Parallel(n_jobs=args.jobs)(
        delayed(kept)(folder.parents[1], grid, args.examples) for *_, folder in cells
    )
    rows = [
        {"task": args.task, **axes(setting), "seed": seed} | found
        for (setting, seed, _), found in zip(cells, measured, strict=True)
    ]
    path = args.results / FILE
    known = [pd.read_csv(path)] if path.exists() else []
    args.results.mkdir(parents=True, exist_ok=True)
    anew = pd.concat([*known, pd.DataFrame(rows)])
    anew = anew.drop_duplicates(["task", *SETTING, "seed"], keep="last")
    anew = anew.sort_values(["task"], kind="stable")
    anew.to_csv(path, index=False, float_format="%.4g")
    found = pd.read_csv(path)
    shared = {"grid-claims": claims_table(found), "loop-norm": loop_norm_table(found)}
    rewrite(args.page, {**tables(found, args.task), **shared})
    figure(found.query("task == @args.task")).write_html(out / "grid.html", include_plotlyjs=True)
    print(found.query("task == @args.task").to_string(), *shared.values(), sep="\n")


def axes(setting: str) -> dict[str, Any]:
    """The three axes that the name of a setting says."""
    recall, norm, loop_norm = setting.split(", ")
    return {"recall": recall.split()[0], "norm": norm, "loop_norm": loop_norm == "loop norm"}


def kept(folder: Path, grid: Grid, n_examples: int) -> dict[str, float]:
    """What was measured of a model, read back where it is there."""
    path = folder / "grid.json"
    options = {"examples": n_examples, "limits": grid.limits, "loops": [*LOOPS]}
    if not path.exists() or read_json_object(path).get("options") != options:
        torch.set_num_threads(1)
        found = measure(Run.load(folder), grid, n_examples)
        write_json(path, {"options": options, "found": found})
    return read_json_object(path)["found"]


def measure(run: Run, grid: Grid, n_examples: int) -> dict[str, float]:
    """The framework's measures, and right answers by length and by loops, of one model."""
    model = run.model()

    def draw(n: int, number: int) -> Batch:
        generator = torch.Generator().manual_seed(1)
        return run.task.sample(n, batch_size=number, generator=generator)

    found = limits(model, draw(grid.limits, n_examples))
    evaluation = load_result(run.folder / EVALUATION)
    scores = evaluation.data["exact_match"].sel(estimate="value", extra_loop=0)
    answers = scores.min("distribution")
    for name, n in {"trained": grid.trained, "far": grid.far}.items():
        found[f"exact_{name}"] = float(answers.sel(length=n))
        exact = extrapolation_study(model, draw(n, 64), n_loops=max(LOOPS)).data["exact"]
        found |= {f"{name}_at_{loop}": float(exact.sel(loop=loop).mean()) for loop in LOOPS}
    return found


def limits(model: LoopedModel, batch: Batch) -> dict[str, float]:
    """Reachability, input dependence and geometry at the limits of some examples.

    ``reached``: share of the examples whose own limit is found and reached from every start.
    ``input_share``: share of the spread of limits that is the input's, 0 where all limits are one.
    """
    reach = reachability_study(model, batch, kicks=(0.1,), n_draws=1)
    inputs = input_dependence_study(model, batch, n_substituted=0, n_sensitivity=0)
    stability = local_stability_study(model, batch[:4], k=1, growth_loops=1, lyapunov_loops=16)
    at = stability.radius().sel(where="limit"), stability.condition().sel(where="limit")
    right = reach.has_limit() & (reach.data["exact"].sel(start="own", drop=True) > 0)
    radius, condition = (float(values.median()) for values in at)
    share = float(inputs.share_of_input().sel(estimate="value"))
    one_for_all = inputs.spread() <= 0.01
    return {
        "found": float(reach.has_limit().mean()),
        "cycles": float((reach.data["period"].sel(start="own") > 1).mean()),
        "reached": float(reach.one_limit().sel(estimate="value")),
        "recovered": float(reach.recovered().sel(estimate="value")[0]),
        "right_at_limit": float(right.mean()),
        "input_share": 0.0 if one_for_all else share,
        "radius": radius,
        "condition": condition,
    }


def tables(found: pd.DataFrame, task: str) -> dict[str, str]:
    """The table of one task, a row a setting: means over the seeds, +- the standard error."""
    grid, rows = GRIDS[task], []
    shown = {
        "exact_trained": f"right at {grid.trained}", "exact_far": f"right at {grid.far}",
        f"far_at_{LOOPS[-1]}": f"at {grid.far} after {LOOPS[-1]} loops", "found": "has a limit",
        "reached": "one limit from every start", "input_share": "share of the input",
        "radius": "spectral radius", "condition": "condition of I - J",
    }  # fmt: skip
    of_task = found.query("task == @task")
    for _, of in of_task.groupby(SETTING, sort=False):
        recall, norm, loop_norm = of[SETTING].iloc[0]
        cells = [said(of[name]) for name in shown]
        rows.append([recall, norm, "yes" if loop_norm else "no", len(of), *cells])
    return {f"grid-{task}": table(["recall", "norm", "loop norm", "seeds", *shown.values()], rows)}


def said(values: pd.Series) -> str:
    """A mean and its standard error over the seeds that have one; empty if none has."""
    mean, error, number = mean_and_error(values)
    if not number:
        return ""
    return with_error(mean, error, 2 if abs(mean) < 100 else 0)


def claims_table(found: pd.DataFrame) -> str:
    """The verdict on each claim, task by task."""
    rows = []
    for task, claim, v in verdicts(found):
        at = f"{v.value:.2f} ({v.low:.2f} to {v.high:.2f})" if v.low == v.low else "not known"
        p = "" if np.isnan(v.p) else f"{v.p:.3f}" if v.p >= 0.0005 else "< .001"
        rows.append([claim.text, task, claim.measure, at, p, v.models, v.word])
    header = ["claim", "task", "what is compared", "found (simultaneous 95%)", "p (Holm)"]
    return table([*header, "models", "verdict"], rows)


def loop_norm_table(found: pd.DataFrame) -> str:
    """What the loop norm changes in each setting with recall; no test, three seeds each."""
    rows = []
    for _, of in found.query(RECALL).groupby(["task", "recall", "norm"]):
        task, recall, norm = of[["task", "recall", "norm"]].iloc[0]
        grid = GRIDS[task]
        sides = [of.query(f"loop_norm == {on}")["exact_far"] for on in (True, False)]
        less = sides[0].mean() - sides[1].mean()
        rows.append([task, f"{recall}, {norm}", grid.far, *map(said, sides), f"{less:+.2f}"])
    header = ["task", "recall, norm", "length", "with loop norm", "without", "difference"]
    return table(header, rows)


def figure(found: pd.DataFrame) -> Any:
    """Right answers to the harder problems against loops: small multiples by recall and norm."""
    panels = []
    for _, of in found.groupby(["recall", "norm"], sort=False):
        recall, norm = of[["recall", "norm"]].iloc[0]
        lines = []
        for loop_norm, some in of.groupby("loop_norm", sort=False):
            values = some[[f"far_at_{loop}" for loop in LOOPS]].to_numpy()
            error = values.std(axis=0, ddof=1) / len(values) ** 0.5 if len(values) > 1 else 0
            mean = values.mean(axis=0)
            low, high = (np.clip(mean + side * error, 0, 1) for side in (-1, 1))
            name = "loop norm" if loop_norm else "no loop norm"
            lines.append(Series(name, np.array(LOOPS), mean, low=low, high=high))
        title = f"{recall} recall, {norm} norm"
        panels.append(LinePanel(lines, "right answers", title=title, y_range=(0, 1.04)))
    return line_panels(panels, x_title="loops", x_log=True, columns=4)


if __name__ == "__main__":
    main()
