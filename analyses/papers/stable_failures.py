"""Do the answers of failed puzzles stay wrong after a small perturbation of the state?

    python -m analyses.papers.stable_failures    # --saved: from the file of rows

A work on TRM (openreview kKps9W1K7n) reports that failed runs converge to stable wrong attractors.
Of puzzles that are wrong after 16 loops, noise of ``SMALL`` times the norm is added to the state
after 64 loops; most must stay wrong. Beside it: runs from other initial states.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd

from analyses.papers.claims import Claim, below, cell, options, record, series, within
from analyses.reasoner_models import LATER, Row, Who, chosen, models_of, rows_of
from analyses.tables_in_pages import table
from analyses.train_trm_small import OUT
from analyses.trained_reasoners_page import WHO, percent
from loopinterp.core.intervals import wilson_estimate
from loopinterp.dynamics import reachability_study
from loopinterp.figures import bars_with_intervals

PAPER = "openreview kKps9W1K7n"
CLAIM = "Wrong answers outlast a small perturbation, as those of stable attractors do."
SMALL, KICKS = "0.3", (0.1, 0.3, 1.0, 3.0)
RIGHT = ("right", "right_low", "right_high")


def restarts(who: Who, model: Any, n: int) -> Iterator[Row]:
    """Right answers from other initial states, and after perturbations of the state at the end."""
    batch, n_wrong = chosen(who, model, 3 * n, 30)
    for name, rows in (("wrong", slice(n_wrong)), ("right", slice(n_wrong, None))):
        part = batch[rows]
        if len(part) < 5:
            continue
        found = reachability_study(model, part, n_loops=LATER, kicks=KICKS, n_draws=2).data
        settled = (found["period"].sel(start="own") > 0).values
        cells = {("start", str(x)): found["exact"].sel(start=x) for x in found["start"].values}
        # Of two draws, the mean for each example.
        cells |= {
            ("perturbation", str(x)): found["kick_exact"].sel(kick=x).mean("draw")
            for x in found["kick"].values
        }
        for (change, size), exact in cells.items():
            for group, of_group in (("all", settled | True), ("settled", settled)):
                values = exact.values[of_group]
                if len(values) > 1:
                    share = wilson_estimate(values.sum(), len(values))
                    yield {**who, "group": name, "state": group, "change": change,
                           "size": size, "n": len(values), **within("right", share)}  # fmt: skip


def claims_of(rows: pd.DataFrame) -> list[Claim]:
    claims = []
    for model, each in models_of(rows.query("group == 'wrong' and state == 'all'")):
        of_change = each.set_index(["change", "size"])
        noise, own = of_change.loc[("perturbation", SMALL)], of_change.loc[("start", "own")]
        found = (
            f"after noise of {SMALL} of the norm {cell(noise, 'right')}% of {own['n']:.0f} are "
            f"right, without it {cell(own, 'right')}%."
        )
        claims.append(Claim(PAPER, CLAIM, model, found, below([noise[x] for x in RIGHT], 0.5)))
    return claims


def as_tables(rows: Any) -> dict[str, str]:
    """A row for each change, and a column for each model's wrong and right puzzles."""
    lines, columns = {}, []
    of_all = rows.query("state == 'all'")
    for (*who, group), each in of_all.groupby([*WHO, "group"], sort=False):
        columns.append(f"{who[1]}, {who[0]}, seed {who[2]}: {group} ({each['n'].iloc[0]})")
        for _, row in each.iterrows():
            name = f"start: {row['size']}" if row["change"] == "start" else f"noise, {row['size']}"
            lines.setdefault(name, []).append(percent(row, "right"))
    changes = [[name, *cells] for name, cells in lines.items()]
    return {"reasoners-restarts": table(["change", *columns], changes)}


def main() -> None:
    args = options(__doc__, saved=True, seed=[0], samples=1000, weights=OUT)
    rows = rows_of(restarts, args)
    wrong = models_of(rows.query("group == 'wrong' and state == 'all'"))
    plot = bars_with_intervals(
        series(wrong, "size", RIGHT), value_title="share of wrong puzzles right"
    )
    record("stable_failures", args, claims_of(rows), as_tables(rows), plot)


if __name__ == "__main__":
    main()
