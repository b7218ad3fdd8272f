"""Do cells of small reasoners act mostly on near cells, or on cells of the same unit?

    python -m analyses.papers.locality    # --saved: from the file of rows

arXiv 2605.20784 reports that states of HRM and TRM write mostly to near cells or to cells of the
same unit: here, to peers in a sudoku and to neighbours in a maze. They do if these get more than
half of the influence on other cells in one loop, and do not if they get no more than evenly.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd
from torch import Tensor

from analyses.cell_relations import influence, shares
from analyses.papers.claims import Claim, above, decided, interval, options, record, series
from analyses.reasoner_models import LOOPS, Row, Who, is_looped, models_of, rows_of
from analyses.train_trm_small import OUT, fresh
from analyses.trained_reasoners_page import by_relation
from loopinterp.dynamics import run_loops
from loopinterp.figures import bars_with_intervals
from loopinterp.models import bind

PAPER, CLAIM = "2605.20784", "Cells act mostly on near cells or cells of the same unit."
AFTER = 4
"""Loops before the state of the page's tables."""
NEAR = {
    "sudoku": {"peer, next to it": 3, "peer, farther": 4},
    "maze": {"open": 15 / 8, "walled": 9 / 8},  # 15 passages join 16 cells
}
"""Mean number of such cells of a cell; it has 15 others."""
OTHERS = 15
TIMES = ("times", "times_low", "times_high")


def locality(who: Who, model: Any, n: int) -> Iterator[Row]:
    """How strongly the state of one cell acts on another's, in one loop and in eight."""
    batch = fresh(who["task"], max(n // 40, 4))
    iteration = bind(model, batch.inputs)
    states = run_loops(iteration, LOOPS)

    def eight(h: Tensor, step: Any = iteration.step) -> Tensor:
        for _ in range(8):
            h = step(h)
        return h

    for start, span, step in ((0, 1, iteration.step), (4, 1, iteration.step),
                              (12, 1, iteration.step), (4, 8, eight)):  # fmt: skip
        weight = influence(step, states[start], n_draws=4 if span == 1 else 2)
        yield from shares(who, weight, batch.inputs, after=start, span=span)


def near_share(rows: Any) -> list[float]:
    """The part of the influence on other cells that near cells get; ends are sums of ends."""
    counts = NEAR[rows["task"].iloc[0]]
    near = rows[rows["relation"].isin(counts)]
    weights = near["relation"].map(counts)
    return [float((near[x] * weights).sum() / OTHERS) for x in TIMES]


def claims_of(rows: pd.DataFrame) -> list[Claim]:
    claims = []
    for model, each in models_of(rows[rows["after"] == AFTER]):
        one, eight = (near_share(each[each["span"] == span]) for span in (1, 8))
        even = sum(NEAR[each["task"].iloc[0]].values()) / OTHERS
        status = decided(above(one, 0.5) == "yes", above(one, even) == "no")
        found = (
            f"near cells get {interval(one, 100, 0)}% of the influence on others in one loop "
            f"(evenly {even:.0%}), {interval(eight, 100, 0)}% over eight."
        )
        claims.append(Claim(PAPER, CLAIM, model, found, status))
    return claims


def as_tables(rows: Any) -> dict[str, str]:
    """From the state after four loops, over one loop and over eight, for each task."""
    shown = rows[rows["after"] == AFTER].rename(columns={"span": "loops"})
    return {
        f"reasoners-locality-{task}": by_relation(each, ["model", "loops"], intervals=True)
        for task, each in shown.groupby("task")
    }


def main() -> None:
    args = options(__doc__, saved=True, seed=[0], samples=1000, weights=OUT)
    rows = rows_of(locality, args, is_looped)
    shown = rows.query(f"after == {AFTER} and span == 1 and relation != 'itself'")
    bars = series(models_of(shown), "relation", TIMES)
    plot = bars_with_intervals(bars, value_title="influence, of even")
    record("locality", args, claims_of(rows), as_tables(rows), plot)


if __name__ == "__main__":
    main()
