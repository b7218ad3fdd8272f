"""Does a trained reasoner solve sudokus with one blank, fewer than in training?

    python -m analyses.papers.one_blank    # --saved: from the file of rows

arXiv 2601.10679 reports that a published HRM, which solves hard sudokus, fails on puzzles with one
blank. A model fails on them if it leaves more than ``SOME`` of them wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd
import torch

from analyses.papers.claims import Claim, below, cell, options, record, series, within
from analyses.reasoner_models import Row, Who, answered, is_trained, models_of, rows_of
from analyses.train_trm_small import OUT, TASKS
from loopinterp.core.intervals import wilson_estimate
from loopinterp.figures import line_figure

PAPER, CLAIM = "2601.10679", "A trained model fails on puzzles with one blank."
BLANKS, SOME = (1, 2, 3, 4, 6, 8, 10, 12), 0.05
EXACT = ("exact", "exact_low", "exact_high")


def simple(who: Who, model: Any, n: int) -> Iterator[Row]:
    """Sudokus with few blanks, fewer than in training, and with as many as there."""
    for blanks in BLANKS:
        generator = torch.Generator().manual_seed(blanks)
        drawn = TASKS["sudoku"].sample(blanks, batch_size=n // 4, generator=generator)
        right = answered(model, drawn, model.n_loops).sum()
        share = wilson_estimate(right, n // 4)
        yield {**who, "blanks": blanks, "n": n // 4, **within("exact", share)}


def claims_of(rows: pd.DataFrame) -> list[Claim]:
    claims = []
    for model, each in models_of(rows[rows["model"] != "unlooped"]):
        row = each.set_index("blanks").loc[1]
        found = f"{cell(row, 'exact')}% of {row['n']:.0f} solved."
        status = below([row[x] for x in EXACT], 1 - SOME)
        claims.append(Claim(PAPER, CLAIM, model, found, status))
    return claims


def as_tables(rows: pd.DataFrame) -> dict[str, str]:
    """None: the page names two numbers in its text."""
    return {}


def main() -> None:
    args = options(__doc__, saved=True, seed=[0], samples=1000, weights=OUT)
    rows = rows_of(simple, args, lambda who: who["task"] == "sudoku" and is_trained(who))
    lines = series(models_of(rows), "blanks", EXACT)
    plot = line_figure(lines, x_title="blanks", y_title="sudokus solved", y_range=(0, 1.03))
    record("one_blank", args, claims_of(rows), as_tables(rows), plot)


if __name__ == "__main__":
    main()
