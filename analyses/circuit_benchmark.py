"""Tools scored on the benchmark of looped models whose circuit is known.

    python -m analyses.circuit_benchmark --folder runs/benchmark --jobs 2
    python -m analyses.circuit_benchmark --kind edges --method my_module:my_scores --only ripple

Makes the benchmark, if it is not there, and scores every tool of the library that says something of
edges, of the program, or of where variables are: a row for each model and tool in
``analyses/results/circuit_benchmark_KIND.csv``, and the leaderboards into the documentation.
What is there already is not done again, but for models given with --only. ``--method`` scores a
function of one's own (``loopinterp.benchmark.score_edges`` and its neighbours say what it is given
and must return), under its name.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from joblib import Parallel, delayed

from analyses.decompiled_models import TO_IT
from analyses.tables_in_pages import PAGES, RESULTS, rewrite, table
from loopinterp.benchmark import (
    OWN_EDGE_METHODS,
    TRAINED,
    Benchmark,
    KnownCircuit,
    by_comparing,
    by_means,
    by_probing,
    make_benchmark,
    own_edge_method,
    score_edges,
    score_program,
    score_variables,
)

FILE, PAGE = "circuit_benchmark_{}.csv", "results/benchmark.md"
DECOMPILED = "decompiled_models.csv"
"""Where the rows of the decompiler are, which ``analyses/decompiled_models.py`` writes."""

SCORES: dict[str, Callable[..., pd.DataFrame]] = {
    "edges": score_edges,
    "program": score_program,
    "variables": score_variables,
}
WITHOUT = "comparison, without it on the list"
NAMES = {"analyses.outside_eap_ig:scores": "EAP-IG, its own code"}
"""What methods from elsewhere are called."""


def tools(kind: str, known: KnownCircuit) -> dict[str, Callable[..., Any]]:
    """The library's tools of a kind, by name."""
    return {
        "edges": {name: own_edge_method(name) for name in OWN_EDGE_METHODS},
        "program": {
            "comparison with stock programs": by_comparing,
            WITHOUT: partial(by_comparing, left_out=known.about.program_name),
        },
        "variables": {"probe": by_probing, "class means": by_means},
    }[kind]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/benchmark"))
    parser.add_argument("--kind", choices=SCORES, action="append", help="Default: all.")
    parser.add_argument("--method", help="A function of one's own, MODULE:NAME.")
    parser.add_argument("--only", action="append", default=[], help="Programs or models.")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGES / PAGE)
    parser.add_argument("--jobs", type=int, default=1, help="Processes.")
    args = parser.parse_args()
    torch.set_num_threads(1)
    there = (args.folder / "benchmark.json").exists()
    benchmark = Benchmark(args.folder) if there else make_benchmark(args.folder)
    print(benchmark)
    args.results.mkdir(parents=True, exist_ok=True)
    for kind in args.kind or SCORES:
        path = args.results / FILE.format(kind)
        known: Any = (
            pd.read_csv(path) if path.exists() else pd.DataFrame(columns=["model", "method"])
        )
        method = args.method or ""
        named = known[known["method"] == method] if method else known
        done = set(named["model"])
        wanted = [
            name
            for name in benchmark
            if (kind != "edges" or not name.endswith(TRAINED))
            and ({name, name.split(".")[0]} & {*args.only} if args.only else name not in done)
        ]
        found: Any = Parallel(n_jobs=args.jobs, return_as="generator_unordered")(
            delayed(measured)(args.folder, name, kind, method) for name in wanted
        )
        for rows in found:
            old = known.merge(
                rows[["model", "method"]].drop_duplicates(), indicator=True, how="left"
            )
            known = pd.concat([known[(old["_merge"] == "left_only").to_numpy()], rows])
            known = known.sort_values(["method", "model"], kind="stable", ignore_index=True)
            known.to_csv(path, index=False, float_format="%.4g")
            print(kind, rows["model"].iloc[0], f"{rows['seconds'].sum():.0f} s", flush=True)
    rewrite(args.page, tables(args.results))


def measured(folder: Path, name: str, kind: str, method: str) -> pd.DataFrame:
    """The rows of one model: of the library's tools, or of one from elsewhere."""
    torch.set_num_threads(1)
    known = Benchmark(folder)[name]
    chosen = {method: outside(method)} if method else tools(kind, known)
    rows = []
    for tool, function in chosen.items():
        started = time.process_time()
        found = SCORES[kind](function, known)
        seconds = (time.process_time() - started) / len(found)
        about = {"method": tool, "model": name, "task": known.about.task.name}
        rows.append(found.assign(**about, seconds=seconds))
    joined = pd.concat(rows, ignore_index=True)
    first = ["method", "model", "task"]
    return joined.reindex(columns=[*first, *(c for c in joined.columns if c not in first)])


def outside(name: str) -> Callable[..., Any]:
    """A function of one's own, from MODULE:NAME."""
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def tables(results: Path) -> dict[str, str]:
    """The leaderboards."""
    found: dict[str, Any] = {kind: pd.read_csv(results / FILE.format(kind)) for kind in SCORES}
    edges = found["edges"].replace({"method": NAMES})
    true = edges[(edges["truth"] == "program") & (edges["graph"] == "tied")]
    methods = [method for method, _ in in_order(true, "auroc")]
    by_edges = []
    for method, tied in in_order(true, "auroc"):
        of = edges[edges["method"] == method]
        wiping = of[(of["graph"] == "tied") & (of["truth"] == "program, wiping wrong")]
        run = of[(of["graph"] == "unrolled") & (of["truth"] == "program")]
        by_edges.append([
            method, len(tied), spread(tied["auroc"]), spread(tied["average_precision"]),
            spread(wiping["auroc"]), spread(run["auroc"]), spread(run["average_precision"]),
            f"{tied['cpr'].mean():.2f}", f"{tied['cmd'].mean():.2f}",
            f"{tied['cpr_of_curve'].mean():.2f}", f"{tied['cmd_of_curve'].mean():.2f}",
        ])  # fmt: skip
    by_task = []
    for task, of in true.groupby("task"):
        scores = {method: rows["auroc"] for method, rows in of.groupby("method")}
        cells = [spread(scores.get(method, ()), 2) for method in methods]
        by_task.append([task, of["model"].nunique(), *cells])
    programs = pd.concat([found["program"], decompiled(results)])
    outcomes = ["equivalent", "no program", "false name"]
    by_program = [
        [method, len(of), *(int((of["outcome"] == what).sum()) for what in outcomes)]
        for method, of in programs.groupby("method")
    ]
    asked = found["variables"].dropna(subset=["iia"])
    by_variables = [
        [method, len(of), spread(of["iia"]), int((of["iia"] >= 0.99).sum()), spread(of["random"])]
        for method, of in in_order(asked, "iia")
    ]
    head = "tied, AUROC|average precision|AUROC, wiping wrong|run, AUROC|average precision"
    areas = ["CPR", "CMD", "CPR, even curve", "CMD, even curve"]
    return {
        "benchmark-edges": table(["method", "models", *head.split("|"), *areas], by_edges),
        "benchmark-edges-by-task": table(["task", "models", *methods], by_task),
        "benchmark-programs": table(["method", "models", *outcomes], by_program),
        "benchmark-variables": table(
            ["method", "models", "IIA", "at least .99", "random change"], by_variables
        ),
    }


def decompiled(results: Path) -> pd.DataFrame:
    """What the decompiler made of the same models; only what is claimed to be exact counts."""
    rows: Any = pd.read_csv(results / DECOMPILED)
    rows = rows[rows["kind"].isin(["known", TO_IT])]
    names = {"equivalent": "equivalent", "wrong": "false name"}
    outcome = rows["outcome"].map(names).where(rows["claim"] == "exact", "no program")
    return pd.DataFrame({"method": "decompiler", "outcome": outcome})


def in_order(found: Any, by: str) -> list[tuple[str, Any]]:
    """Methods with their rows, the best first."""
    groups = [(str(method), of) for method, of in found.groupby("method")]
    return sorted(groups, key=lambda one: -one[1][by].mean())


def spread(values: Any, digits: int = 3) -> str:
    """Mean, and lowest."""
    return f"{values.mean():.{digits}f} ({values.min():.2f})" if len(values) else "-"


if __name__ == "__main__":
    main()
