"""Accuracy after 1 to 20 loops of a small Ouro that was trained with four.

    python -m analyses.papers.forced_depth

Whether loops beyond those of training lower accuracy. Ouro's report (arXiv 2510.25741) is said to
find so beyond its four loops; its section was not at hand. Beside it: models of the zoo that were
trained to hold their answers.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from analyses.papers.claims import Claim, cell, interval, options, ouro_small, publish, within
from analyses.small_language_models import TASK, fresh
from analyses.tables_in_pages import table
from loopinterp.core.intervals import mean_estimate, wilson_estimate
from loopinterp.figures import Series, line_figure
from loopinterp.lenses import exit_study
from loopinterp.models import EntropyBelow
from loopinterp.models.study_examples import fit_to_model
from loopinterp.zoo import load_pretrained

PAPER, LOOPS = "2510.25741", 20
CLAIM = "Loops beyond those of training lower accuracy (second-hand)."
ZOO, SHOWN = ("addition", "parity", "prefix_sum", "copy"), (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20)


def main() -> None:
    args = options(__doc__)
    rows, claims, lines = [], [], []
    runs = {}
    for seed in args.seed:
        model = ouro_small(args, seed)
        for p in range(1, TASK.most_hops + 1):
            runs[f"ouro-small, seed {seed}", f"p = {p}"] = (model, fresh(p, args.samples))
    for name in ZOO:
        model = load_pretrained(name)
        batch = model.task.sample(8, batch_size=args.samples, seed=0)
        runs[name, "n = 8"] = (model, batch)
    lost: dict[str, list[np.ndarray]] = {}
    for (name, what), (model, batch) in runs.items():
        own = int(fit_to_model(model, batch).n_loops.max())
        result = exit_study(model, batch, rules={"entropy": EntropyBelow(0.1)}, n_loops=LOOPS)
        exact = result.data["exact"].values.astype(float)  # [loop, batch]
        for loop in range(1, LOOPS + 1):
            share = wilson_estimate(int(exact[loop].sum()), exact.shape[1])
            rows.append(
                {
                    "model": name,
                    "question": what,
                    "own": own,
                    "loop": loop,
                    **within("right", share),
                }
            )
        lost.setdefault(name, []).append(exact[LOOPS] - exact[own])
        lines.append(Series(f"{name}, {what}", range(1, LOOPS + 1), exact[1:].mean(1)))
    for name, changes in lost.items():
        change = mean_estimate(np.concatenate(changes))
        status = "yes" if change[2] < -0.01 else "no" if change[1] > -0.01 else "not decided"
        points = interval(change, 100, 1)
        found = f"after {LOOPS} loops {points} points against its own number of loops."
        claims.append(Claim(PAPER, CLAIM, name, found, status))
    plot = line_figure(lines, x_title="loops", y_title="exact match", y_range=(0, 1.03))
    publish("forced_depth", args, claims, pd.DataFrame(rows), as_table, plot)


def as_table(rows: pd.DataFrame) -> str:
    """Per cent right after some loops; a row for each question."""
    shown = []
    for (name, what), part in rows.groupby(["model", "question"], sort=False):
        by_loop = part.set_index("loop")
        cells = [f"{100 * float(by_loop.loc[loop, 'right']):.0f}" for loop in SHOWN[:-1]]
        shown.append(
            [name, what, part["own"].iloc[0], *cells, cell(by_loop.loc[SHOWN[-1]], "right")]
        )
    return table(["model", "question", "own loops", *map(str, SHOWN)], shown)


if __name__ == "__main__":
    main()
