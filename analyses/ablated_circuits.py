"""Ablation on every model whose circuit is known: is each head and MLP judged as the circuit says?

    python -m analyses.ablated_circuits

The models of the benchmark, compiled ones bare and in disguises and trained ones, on 128 inputs of
their greatest length each. A row for each model, part and kind of ablation goes to
``analyses/results/ablated_circuits.csv``, and a table into the documentation; models that are there
already are not done again, but for those given with --only.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from analyses.tables_in_pages import PAGES, RESULTS, replaced, rewrite, table
from loopinterp.benchmark import benchmark_models, judged_by_ablation

FILE, PAGE = "ablated_circuits.csv", "results/known-circuits.md"
EXAMPLES = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", action="append", default=[], help="Programs or models.")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGES / PAGE)
    args = parser.parse_args()
    torch.set_num_threads(1)
    path = args.results / FILE
    done = {*pd.read_csv(path)["model"]} if path.exists() else set()
    args.results.mkdir(parents=True, exist_ok=True)
    for about in benchmark_models(args.only or None):
        if not args.only and about.name in done:
            continue
        generator = torch.Generator().manual_seed(0)
        batch = about.task.sample(about.n, batch_size=EXAMPLES, generator=generator)
        rows = judged_by_ablation(about.compiled, batch)
        rows = rows.assign(model=about.name, program=about.program_name, disguise=about.disguise)
        replaced(path, rows, ["model"]).to_csv(path, index=False, float_format="%.4g")
        print(about.name, f"{int(rows['right'].sum())} of {len(rows)}", flush=True)
    rewrite(args.page, tables(pd.read_csv(path)))


def tables(known: pd.DataFrame) -> dict[str, str]:
    """Counts by disguise and kind of ablation, and every part that is judged otherwise."""
    rows = []
    each: Any = known.groupby(["disguise", "ablation"], sort=False)
    for (disguise, kind), of in each:
        needed = of["need"] == "needed"
        used = of["used"]
        rows.append([
            disguise, kind, of["model"].nunique(), len(of), int(used.sum()), int(of["right"].sum()),
            int((needed & ~used).sum()), int((~needed & used).sum()),
            int(((of["need"] == "unclear") & ~used).sum()),
        ])  # fmt: skip
    head = ["disguise", "ablation", "models", "parts", "used", "judged right"]
    wrong: Any = known[~known["right"]].groupby(["program", "part", "used"], sort=False)
    missed = [
        [program, part, "used" if used else "not used", ", ".join(sorted(of["need"].unique())),
         ", ".join(dict.fromkeys(of["ablation"])), ", ".join(dict.fromkeys(of["disguise"]))]
        for (program, part, used), of in wrong
    ]  # fmt: skip
    return {
        "ablated-circuits": table(
            [*head, "needed, not used", "used, not needed", "unclear, not used"], rows
        ),
        "ablated-otherwise": table(
            ["program", "part", "the circuit", "judged", "ablation", "disguises"], missed
        ),
    }


if __name__ == "__main__":
    main()
