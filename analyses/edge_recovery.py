"""Edges found in models whose circuit is known: which score tells them from others.

    python -m analyses.edge_recovery
    python -m analyses.edge_recovery --only ripple --only parity

Stock programs, compiled, bare and in disguises. Each is studied on pairs of inputs of its task, of
all lengths up to N, and every score of its edges, controls too, is held against the edges of its
circuit. A row for each model and score goes to ``analyses/results/edge_recovery.csv``, and the
tables into the documentation; what is there already is not done again, but for programs given
with --only. Bare models are studied on fewer pairs as well: what a single pair misses.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from analyses.tables_in_pages import PAGES, RESULTS, replaced, rewrite, table
from loopinterp.compiler import Compiled, add_noise, compile_program, distract, permute, rotate
from loopinterp.edges import edge_study, edges_recovered, program_edges, wiping_edges
from loopinterp.programs import get_program
from loopinterp.tasks import get_task

FILE, PAGE = "edge_recovery.csv", "results/edges.md"
PROGRAMS = ("ripple", "carry_save", "prefix_xor", "parity", "late_ripple", "latched_ripple")
DISGUISES: dict[str, Callable[[Compiled], Compiled]] = {
    "bare": lambda compiled: compiled,
    "distracted, permuted, rotated": lambda c: rotate(permute(distract(c, seed=0), seed=0), seed=0),
    "noisy": partial(add_noise, relative=0.01, seed=0),
}
N, PAIRS, FEW = 5, 48, (1, 4)
KEY = ["program", "disguise", "pairs"]
SCORES = ("exact", "edge_ig", "eap_ig", "eap", "magnitude", "random")
TRUTHS = {
    "program": "program's edges",
    "program, wiping wrong": "the same, wiping counted as wrong",
    "program or wiping": "edges that carry anything",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", action="append", default=[], help="Programs.")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGES / PAGE)
    args = parser.parse_args()
    torch.set_num_threads(1)
    path = args.results / FILE
    done = {*map(tuple, pd.read_csv(path)[KEY].to_numpy().tolist())} if path.exists() else set()
    args.results.mkdir(parents=True, exist_ok=True)
    for cell in cells():
        if cell[0] not in args.only if args.only else cell in done:
            continue
        rows = pd.DataFrame(measured(*cell))
        replaced(path, rows, KEY).to_csv(path, index=False, float_format="%.4g")
        best = rows.query("graph == 'tied' and truth == 'program' and by == 'size'")
        print(*cell, dict(zip(best["score"], best["auroc"].round(3))), flush=True)
    rewrite(args.page, tables(pd.read_csv(path)))


def cells() -> list[tuple[str, str, int]]:
    """Program, disguise and number of pairs of all models."""
    every = [(program, disguise, PAIRS) for program in PROGRAMS for disguise in DISGUISES]
    return every + [(program, "bare", pairs) for program in PROGRAMS for pairs in FEW]


def measured(name: str, disguise: str, pairs: int) -> list[dict[str, Any]]:
    """How well each score tells a model's edges, and what the circuits it chooses keep."""
    started = time.process_time()
    program = get_program(name)
    task = get_task(program.task, **program.task_settings)
    known = DISGUISES[disguise](compile_program(program, max_length=task.n_positions(N)))
    generator = torch.Generator().manual_seed(0)
    # The first pair is of full length, so that all inputs are as long as it.
    lengths = torch.randint(2, N + 1, (2, PAIRS), generator=generator)
    lengths[:, 0] = N
    base, source = (task.sample(n, generator=generator).inputs[:pairs] for n in lengths)
    found = edge_study(
        known.model, base, source, n_loops=program.n_loops(N), n_steps=8, curve_points=8,
        threshold=0.01,
    )  # fmt: skip
    scores = edges_recovered(found, known)
    scores = scores.merge(found.areas(), on=["graph", "score"])
    kept = found.tied_edges()
    true, wiping = program_edges(known), wiping_edges(known)
    pruning = {
        "pruned": len(kept),
        "pruned_program": len(kept & true),
        "pruned_wiping": len(kept & wiping),
        "n_program": len(true),
        "pruned_faithfulness": found.pruned_faithfulness,
        "random_faithfulness": found.random_faithfulness,
        "without": found.completeness.without,
        "seconds": time.process_time() - started,
    }
    row = dict(zip(KEY, (name, disguise, pairs))) | pruning
    return [row | dict(of) for of in scores.to_dict("records")]


def tables(found: pd.DataFrame) -> dict[str, str]:
    """Those of the page."""
    full = found[(found["pairs"] == PAIRS) & (found["by"] == "size")]
    models = full.groupby(["program", "disguise"], sort=False)
    tied = []
    for names, of in models:
        auroc = of.query("graph == 'tied' and truth == 'program'").set_index("score")
        counts = f"{auroc['n_true'].iloc[0]} of {auroc['n_edges'].iloc[0]}"
        tied.append([*names, counts, *(_shown(auroc["auroc"].get(s)) for s in SCORES)])  # type: ignore[misc]
    summary = []
    for (graph, truth), of in full.groupby(["graph", "truth"], sort=False):  # type: ignore[misc]
        for measure in ("auroc", "average_precision"):
            means = of.groupby("score")[measure].mean()
            lowest = of.groupby("score")[measure].min()
            both = [
                f"{means[s]:.2f} ({lowest[s]:.2f})" if s in means.index else "-" for s in SCORES
            ]
            words = {"auroc": "AUROC", "average_precision": "average precision"}[measure]
            summary.append([graph, TRUTHS[str(truth)], words, *both])
    areas = []
    of_program: Any = full[full["truth"] == "program"]
    for graph, of in of_program.groupby("graph", sort=False):
        for measure in ("cpr", "cmd", *(["cmd_of_curve"] if graph == "tied" else [])):
            means = of.groupby("score")[measure].mean()
            label = {"cpr": "CPR", "cmd": "CMD", "cmd_of_curve": "CMD, even curve"}[measure]
            areas.append([graph, label, *(_shown(means.get(s)) for s in SCORES)])
    pruned = [
        [*names, f"{one['pruned_program']:.0f} of {one['n_program']:.0f}",
         int(one["pruned_wiping"]),
         int(one["pruned"] - one["pruned_program"] - one["pruned_wiping"]),
         *(f"{round(one[name], 2) + 0.0:.2f}"
           for name in ("pruned_faithfulness", "random_faithfulness", "without"))]
        for names, of in models
        for one in [of.iloc[0]]
    ]  # type: ignore[misc]  # fmt: skip
    few = found.query("disguise == 'bare' and graph == 'tied' and by == 'size'")
    few = few[few["truth"] == "program"]
    by_pairs = [
        [pairs, *(f"{of[of['score'] == s]['auroc'].mean():.2f} "
                  f"({of[of['score'] == s]['auroc'].min():.2f})" for s in SCORES)]
        for pairs, of in few.groupby("pairs")
    ]  # fmt: skip
    return {
        "edges-tied": table(["program", "disguise", "true edges", *SCORES], tied),
        "edges-summary": table(["graph", "truth", "measure", *SCORES], summary),
        "edges-areas": table(["graph", "area", *SCORES], areas),
        "edges-pruned": table(
            ["program", "disguise", "program's edges kept", "wiping edges kept", "other edges kept",
             "faithfulness", "of as many random edges", "of all edges outside"],
            pruned,
        ),
        "edges-pairs": table(["pairs", *SCORES], by_pairs),
    }  # fmt: skip


def _shown(value: float | None) -> str:
    return "-" if value is None or value != value else f"{value:.3f}"


if __name__ == "__main__":
    main()
