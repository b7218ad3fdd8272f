"""Do runs of small Huginns from several initial states reach the same states and answers?

    python -m analyses.papers.path_independence --texts FOLDER    # --saved: from the file of rows

arXiv 2502.05171 reports path independence: Huginn forgets its random initial state. Runs agree if
after the mean loops of training they are nearer than ``NEAR`` of the distance on other inputs.
"""

from __future__ import annotations

from typing import Any

import pandas as pd
import torch
from torch import Tensor

from analyses.huginn_small_models import LOOPS, Known, columns, rows_of
from analyses.huginn_small_tables import PARTS, ends, groups, looped_models, records, shown
from analyses.papers.claims import Claim, below, interval, options, record, series
from analyses.tables_in_pages import table
from analyses.train_huginn_small import MEAN_LOOPS, OUT
from loopinterp.adapters import adapt
from loopinterp.core.intervals import mean_estimate
from loopinterp.dynamics import run_loops
from loopinterp.figures import line_figure
from loopinterp.models import bind

PAPER, CLAIM = "2502.05171", "Runs from different initial states agree."
STARTS, NEAR = 4, 0.05


def starts(known: Known, n: int) -> pd.DataFrame:
    """Distances between runs from several initial states, and whether they answer alike."""
    batch, rows = known.examples(n), []
    for name, models in known.controls().items():
        measured = [from_starts(model, batch.inputs) for model in models]
        for what in measured[0]:
            values = torch.cat([each[what] for each in measured], 1)  # [loop, example]
            for loops, of_loop in zip((0, *LOOPS), values):
                row = {**known.who, "model": name, "loops": loops, "what": what}
                rows.append({**row, **columns(mean_estimate(of_loop))})
    return pd.DataFrame(rows)


def from_starts(model: Any, inputs: Tensor) -> dict[str, Tensor]:
    """Relative distances of states and shares of equal answers, [loop, example]."""
    runs, answers = [], []
    for seed in range(STARTS):
        run = bind(adapt(model.published, seed=seed), inputs)
        runs.append(run_loops(run, max(LOOPS))[[0, *LOOPS]])  # [loop, batch, pos, d_model]
        answers.append(torch.stack([run.readout(h).argmax(-1) for h in runs[-1]])[..., 1:])
    first, size = runs[0], runs[0].norm(dim=-1)
    apart = torch.stack([(h - first).norm(dim=-1) / size for h in runs[1:]])
    same = torch.stack([(x == answers[0]).float() for x in answers[1:]])
    return {
        "starts": apart.mean((0, 3)),
        "inputs": ((first.roll(1, 1) - first).norm(dim=-1) / size).mean(-1),
        "same answer": same.mean((0, 3)),
    }


def claims_of(rows: pd.DataFrame) -> list[Claim]:
    claims = []
    for model, each in looped_models(rows):
        then = each[each["loops"] == MEAN_LOOPS].set_index("what")
        apart, inputs, same = (ends(then.loc[x]) for x in ("starts", "inputs", "same answer"))
        status = below(apart, NEAR * inputs[1])
        found = (
            f"after {MEAN_LOOPS} loops the distance is {interval(apart, digits=3)} (on other "
            f"inputs {inputs[0]:.2f}); {interval(same, 100, 1)}% of answers are equal."
        )
        claims.append(Claim(PAPER, CLAIM, model, found, status))
    return claims


def as_tables(rows: pd.DataFrame) -> dict[str, str]:
    """Distances after some loops, and equal answers, of each model."""
    lines = []
    for (part, seed, model), each in groups(rows, "part", "seed", "model"):
        cells = {(x["what"], x["loops"]): x for x in records(each)}
        apart = [shown(cells["starts", t], 1, 3) for t in (0, 4, 8, 16, 64)]
        others = shown(cells["inputs", 64], 1, 2)
        same = [shown(cells["same answer", t], 100, 1) for t in (8, 64)]
        lines.append([PARTS[str(part)], seed, model, *apart, others, *same])
    loops = [f"after {t}" for t in (0, 4, 8, 16, 64)]
    head = ["part", "seed", "model", *loops, "other inputs, after 64", "same answer, after 8"]
    return {"huginn-starts": table([*head, "after 64"], lines)}


def main() -> None:
    args = options(__doc__, saved=True, samples=24, weights=OUT)
    rows = rows_of(starts, args)
    apart = looped_models(rows.query("what == 'starts' and loops > 0 and value > 1e-4"))
    plot = line_figure(series(apart, "loops"), x_title="loops", y_title="distance", y_log=True)
    record("path_independence", args, claims_of(rows), as_tables(rows), plot)


if __name__ == "__main__":
    main()
