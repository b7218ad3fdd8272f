"""How few numbers per position predict interchanges, in five seeds of the demo's recipe.

    python -m analyses.reduced_models --jobs 2

Each model of the zoo that the demo's recipe trained has its state reduced to a few directions per
token after every loop. How often its answers after an interchange are the model's is kept, where
that is least often and over whole runs, for each kind of interchange and each length, in
analyses/results/reduced_models.csv; the table goes into docs/results/programs.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from joblib import Parallel, delayed

from analyses.tables_in_pages import PAGES, RESULTS, rewrite, table
from loopinterp.comparison import reduction_study
from loopinterp.comparison.reduced_model import ENOUGH
from loopinterp.comparison.rule import LEAST_INPUTS
from loopinterp.zoo import pretrained_run

FILE, PAGE, NAME = "reduced_models.csv", "results/programs.md", "reduced-models"
MODELS = ("addition", *(f"addition-seed-{seed}" for seed in range(1, 5)))
RANKS = (1, 2, 4, 8, 12, 16, 24, 32)
EXAMPLES, PAIRS = 512, 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"Default: {', '.join(MODELS)}.")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGES / PAGE)
    args = parser.parse_args()
    path = args.results / FILE
    known: Any = pd.read_csv(path) if path.exists() else pd.DataFrame(columns=["model"])
    names = args.models or MODELS
    rows: Any = Parallel(n_jobs=args.jobs)(delayed(measure)(name) for name in names)
    found = pd.DataFrame([row for of_model in rows for row in of_model])
    known = pd.concat([known[~known["model"].isin(names)], found], ignore_index=True)
    known.to_csv(path, index=False, float_format="%.4g")
    rewrite(args.page, {NAME: as_table(pd.read_csv(path))})


def measure(name: str) -> list[dict[str, Any]]:
    """A row for each rank, kind of interchange and length."""
    torch.set_num_threads(1)
    run = pretrained_run(name)
    lengths = (run.cutoff, 2 * run.cutoff)
    found = reduction_study(
        run.model(), run.task, ranks=RANKS, pairs=PAIRS, n=lengths, batch_size=EXAMPLES
    )
    rows = []
    for rank in RANKS:
        for kind in found.data["kind"].values:
            for n in lengths:
                share = found.weakest(rank, kind=kind, n=n).share
                cell = found.data.sel(rank=rank, kind=kind, n=n)
                rows.append({
                    "model": name, "rank": rank, "kind": str(kind), "n": n,
                    **share._asdict(),
                    "whole run": float(cell["whole_run"][0]), "others": float(cell["others"][0]),
                    "undisturbed": float(cell["undisturbed"][0]),
                })  # fmt: skip
    return rows


def as_table(known: pd.DataFrame) -> str:
    """A row a model: where it is right least often, for each rank; the smallest that is enough."""
    ranks = sorted(known["rank"].unique())
    rows = []
    for name, of_model in known.groupby("model"):
        cells = []
        for rank in ranks:
            at: Any = of_model[of_model["rank"] == rank]
            worst = at.loc[at["value"].idxmin()]
            cells.append(f"{worst['value']:.2f} ({worst['low']:.2f}–{worst['high']:.2f})")
        held: Any = of_model.groupby("rank").agg({"value": "min", "inputs": "min"})
        enough = held[(held["value"] >= ENOUGH) & (held["inputs"] >= LEAST_INPUTS)].index
        rows.append([name, *cells, min(enough, default="none of these")])
    return table(["model", *(f"r = {rank}" for rank in ranks), "enough"], rows)


if __name__ == "__main__":
    main()
