"""Programs read off models that differ in their seed alone, side by side: how long do they hold?

    python -m analyses.decompiled_seeds

Five seeds of addition, read at length 8, beside compiled programs whose delays
are known. For each change of an answer at a position at rest, the loops it takes to follow what
comes from the left: to ``analyses/results/decompiled_seeds.csv``, and into the documentation.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pandas as pd
import torch

import loopinterp
from analyses.tables_in_pages import PAGES, RESULTS, replaced, rewrite, table
from loopinterp.decompiler import Decompilation, decompilation_study
from loopinterp.decompiler.evidence import CLEAN, INTERCHANGED
from loopinterp.tasks import get_task

FILE, PAGE = "decompiled_seeds.csv", "results/programs.md"
PROGRAMS = ("ripple", "ripple_held_2", "ripple_held_3")
SEEDS = ("addition", *(f"addition-seed-{k}" for k in range(1, 5)))
WORDS = {"a=0 b=0": "kill", "a=1 b=0": "propagate", "a=0 b=1": "propagate", "a=1 b=1": "generate"}
N = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", action="append", default=[], help="Programs or models.")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGES / PAGE)
    args = parser.parse_args()
    torch.set_num_threads(1)
    path = args.results / FILE
    args.results.mkdir(parents=True, exist_ok=True)
    for name in args.only or [*PROGRAMS, *SEEDS]:
        rows = pd.DataFrame(measured(name))
        replaced(path, rows, ["model"]).to_csv(path, index=False, float_format="%.4g")
        print(rows.to_string(index=False), flush=True)
    rewrite(args.page, {"decompiled-seeds": side_by_side(pd.read_csv(path))})


def measured(name: str) -> list[dict[str, Any]]:
    """A row for each change of an answer."""
    if name in PROGRAMS:
        task = get_task("addition")
        model = loopinterp.compile_program(name, max_length=task.n_positions(3 * N // 2)).model
    else:
        run = loopinterp.zoo.pretrained_run(name)
        model, task = run.model(), run.task
    found = decompilation_study(model, task, n=N)
    trajectory = float(found.worst().sel(estimate="value"))
    about = {"model": name, "given": found.given, "cells": found.data.sizes["cell"]}
    about |= {"whole trajectory": trajectory, "right": right(found)}
    columns = ("token", "before", "after", "least", "most", "ways")
    return [{**about, **dict(zip(columns, row))} for row in found.responses]


def right(found: Decompilation) -> float:
    """The lowest share of whole answers one loop, two loops after an exchange, or at the end."""
    agreement = found.data["agreement"].sel(estimate="value")
    return float(agreement.drop_sel(what=[CLEAN, *INTERCHANGED], errors="ignore").min())


def side_by_side(found: pd.DataFrame) -> str:
    """A row a model: the loops that a carry takes to be seen, and to be forgotten."""
    word = found["token"].map(WORDS)
    # Where both bits are alike, a carry that comes in is the answer, else the answer's inverse.
    carries = (found["after"] == 1) ^ (word == "propagate")
    found = found.assign(word=word, comes=carries)
    rows = []
    for model in [name for name in (*PROGRAMS, *SEEDS) if name in set(found["model"])]:
        of: Any = found[found["model"] == model]
        spans = []
        for comes in (True, False):
            for kind in ("kill", "propagate", "generate"):
                own = of[(of["comes"] == comes) & (of["word"] == kind)]
                low, high = own["least"].min(), own["most"].max()
                ends = f"{low:.0f}" if low == high else f"{low:.0f} to {high:.0f}"
                spans.append(ends if len(own) else "-")
        first = of.iloc[0]
        given = "program" if first["given"] else "closest"
        share = f"{first['whole trajectory']:.2f}"
        rows.append([model, given, first["cells"], share, *spans])
    heads = [f"{what} at {kind}" for what in ("comes", "goes") for kind in set_of_words()]
    return table(["model", "", "cells", "whole trajectory", *heads], rows)


def set_of_words() -> list[str]:
    """The kinds of bit pairs, each once."""
    return list(dict.fromkeys(WORDS.values()))


if __name__ == "__main__":
    main()
