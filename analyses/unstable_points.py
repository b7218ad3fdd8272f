"""Has a model fixed points that its loop cannot reach? Solvers look for them, not the loop.

    python -m analyses.unstable_points --name parity --name addition
    python -m analyses.unstable_points --run "external recall, pre, loop norm=runs/grid/…/seed-0"

Plain iteration comes to a fixed point only where it is stable, so the limits that iteration finds
say nothing of stability. Broyden's and Newton's method solve f(h) = h whatever the spectrum is. Of
each input they start at the model's own initial state, at some of its later states, at zeros, at
noise and at the limits of other inputs; of what they find, the spectral radius is measured. What is
found goes to analyses/results/unstable_points.csv and into docs/results/recall-and-norm.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import pandas as pd
import torch
from torch import Tensor

from analyses.tables_in_pages import PAGES, RESULTS, rewrite, table
from loopinterp.dynamics import find_fixed_point, spectral_radius
from loopinterp.models import LoopedModel, bind, iterate
from loopinterp.training import Run
from loopinterp.zoo import list_pretrained, pretrained_run

FILE, PAGE, NAME = "unstable_points.csv", "results/recall-and-norm.md", "unstable-points"
SOLVERS = ("broyden", "newton-krylov")
TOL, LOOPS, LATER, NOISES = 1e-4, 200, (1, 4, 16), 2
"""Relative residual of a fixed point, loops of the iteration, and which starts there are."""

CLEAR = 1.02
"""Spectral radius from which on a point is unstable; its estimate is good to a percent."""

Stability = Literal["contradicted", "not decided"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Fixed points that repel the loop.")
    parser.add_argument("--name", action="append", default=[], choices=[*list_pretrained().index])
    parser.add_argument("--run", action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--inputs", type=int, default=4)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGES / PAGE)
    args = parser.parse_args()
    torch.set_num_threads(1)
    runs = {name: pretrained_run(name) for name in args.name}
    runs |= {name: Run.load(folder) for name, _, folder in (x.rpartition("=") for x in args.run)}
    path = args.results / FILE
    known = pd.read_csv(path) if path.exists() else pd.DataFrame(columns=["model"])
    for name, run in runs.items():
        row = {"model": name, "recall": recall_of(run), "n": run.cutoff}
        found = pd.DataFrame([row | measure(run, args.inputs)])
        print(found.to_string(index=False), flush=True)
        others = known[known["model"] != name]
        known = pd.concat([others, found]) if len(others) else found
        known = pd.DataFrame(known).sort_values(by=["model"], kind="stable")
        known.to_csv(path, index=False, float_format="%.4g")
    rewrite(args.page, {NAME: as_table(pd.read_csv(path))})


def recall_of(run: Run) -> str:
    """How the input enters each loop: none, or the name of the injection, and whether normed."""
    model = run.model().config
    return f"{model.injection}, {'loop norm' if model.loop_norm else 'no loop norm'}"


def measure(run: Run, n_inputs: int) -> dict[str, float]:
    """Shares of inputs with a limit of the loop, a fixed point of a solver, and an unstable one."""
    model = run.model()
    generator = torch.Generator().manual_seed(1)
    batch = run.task.sample(run.cutoff, batch_size=n_inputs, generator=generator)
    return unstable_points(model, batch.inputs)


def unstable_points(model: LoopedModel, inputs: Tensor) -> dict[str, float]:
    """What solvers find from many starts, beside what the loop itself comes to.

    Args:
        model: The model.
        inputs: Inputs of one length, [batch, pos].
    """
    iteration = bind(model, inputs)
    limit = find_fixed_point(iteration.step, iteration.h0, TOL, LOOPS)
    solved = torch.zeros(len(inputs), dtype=torch.bool)
    unstable, largest = solved.clone(), torch.zeros(len(inputs))
    for start in starts(model, inputs, limit.state).values():
        for solver in SOLVERS:
            point = find_fixed_point(iteration.step, start, TOL, 60, solver=solver)
            if not point.converged.any():
                continue
            rows = point.converged.nonzero().flatten()
            some = iteration.select(rows)
            radius = spectral_radius(some.step, point.state[rows], tol=1e-2, max_vectors=40).radius
            solved[rows] = True
            unstable[rows] |= radius > CLEAR
            largest[rows] = torch.maximum(largest[rows], radius.float())
    return {
        "inputs": len(inputs),
        "limit": float(limit.converged.double().mean()),
        "solved": float(solved.double().mean()),
        "unstable": float(unstable.double().mean()),
        "largest_radius": float(largest.max()) if solved.any() else float("nan"),
    }


def starts(model: LoopedModel, inputs: Tensor, limit: Tensor) -> Mapping[str, Tensor]:
    """States from which each input's fixed points are looked for, by name."""
    states = dict(iterate(model, inputs, max(LATER)))
    generator = torch.Generator().manual_seed(2)
    noise = {}
    for k in range(NOISES):
        drawn = torch.randn(limit.shape, generator=generator)
        scale = limit.norm(dim=-1, keepdim=True) / drawn.norm(dim=-1, keepdim=True)
        noise[f"noise {k}"] = drawn * scale
    return {
        "own": states[0],
        **{f"after {loop}": states[loop] for loop in LATER},
        "zeros": torch.zeros_like(limit),
        **noise,
        "other": limit.roll(1, 0),
    }


def stability(row: Mapping[str, float]) -> Stability:
    """The verdict on "its fixed points are stable": one unstable point contradicts it.

    That none was found proves nothing: the search has an end.
    """
    return "contradicted" if row["unstable"] > 0 else "not decided"


def as_table(found: pd.DataFrame) -> str:
    """A row a model."""
    rows = [
        [
            *(row[k] for k in ("model", "recall", "n", "inputs")),
            *(f"{row[k]:.2f}" for k in ("limit", "solved", "unstable")),
            "" if pd.isna(row["largest_radius"]) else f"{row['largest_radius']:.2f}",
            stability(row),
        ]
        for row in found.to_dict("records")
    ]
    header = ["model", "recall", "n", "inputs", "the loop comes to a fixed point"]
    header += ["a solver finds one", "a solver finds an unstable one", "largest spectral radius"]
    return table([*header, "all fixed points are stable"], rows)


if __name__ == "__main__":
    main()
