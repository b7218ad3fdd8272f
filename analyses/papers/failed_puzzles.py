"""Do the failed puzzles of small reasoners converge to wrong answers, or keep moving?

    python -m analyses.papers.failed_puzzles    # --saved: from the file of rows

A work on TRM (openreview kKps9W1K7n): failed runs converge to stable wrong attractors. They do if
most puzzles that are wrong after 16 loops converge to a wrong answer, and do not if most move on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from analyses.papers.claims import Claim, above, decided, interval, options, record
from analyses.reasoner_models import LATER, LOOPS, Row, Who, chosen, models_of, rows_of
from analyses.tables_in_pages import table
from analyses.train_trm_small import OUT
from analyses.trained_reasoners_page import WHO, telling
from loopinterp.core.intervals import wilson_estimate
from loopinterp.dynamics import convergence_study, lyapunov_exponents, run_loops
from loopinterp.figures import Series, bars_with_intervals
from loopinterp.models import bind

PAPER, CLAIM = "openreview kKps9W1K7n", "Failed runs converge to stable wrong attractors."
ACCOUNT = {"yes": "most converge", "no": "most keep moving", "not decided": "not decided"}
SHARES = ("converges", "to a wrong answer", "right at loop 64")


def fates(who: Who, model: Any, n: int) -> Iterator[Row]:
    """Each wrong and right puzzle: does its state converge, and how fast do neighbours part?"""
    batch, n_wrong = chosen(who, model, 3 * n, 60)
    found = convergence_study(model, batch, n_loops=LATER, limit_steps=200, n_spectral=0)
    still = found.of_counted("residual").mean("pos")
    fate, status = found.fates().values, found.data["limit_status"].values
    end = (found.data["right"].isel(loop=-1) != 0).all("pos").values
    iteration = bind(model, batch.inputs)
    states = run_loops(iteration, LOOPS)
    run, late = (
        lyapunov_exponents(iteration.step, h, loops, discard=0).values[:, 0]
        for h, loops in ((states[0], LOOPS), (states[-1], LATER - LOOPS))
    )
    halt = model.exit_probability(states[-1])[:, 0]
    for k in range(len(batch)):
        yield {
            **who, "wrong": k < n_wrong, "fate": fate[k], "limit": int(status[k]),
            "right_later": bool(end[k]), "residual": float(still[LOOPS, k]),
            "residual_later": float(still[-1, k]), "lyapunov_run": float(run[k]),
            "lyapunov_late": float(late[k]), "halt": float(halt[k]),
        }  # fmt: skip


def shares_of(puzzles: pd.DataFrame) -> list[np.ndarray]:
    """Shares that converge, that converge to a wrong answer, and that are right in the end."""
    rests, later = puzzles["fate"].str.startswith("rests"), puzzles["right_later"]
    return [wilson_estimate(x.sum(), len(puzzles)) for x in (rests, rests & ~later, later)]


def claims_of(rows: pd.DataFrame) -> list[Claim]:
    claims = []
    for model, each in models_of(rows[rows["wrong"]]):
        rests, to_wrong, _ = shares_of(each)
        account = above(rests, 0.5)
        status = decided(above(to_wrong, 0.5) == "yes", account == "no")
        found = (
            f"of {len(each)} wrong puzzles {interval(rests, 100, 0)}% converge, "
            f"{interval(to_wrong, 100, 0)}% to a wrong answer (converge or keep moving: "
            f"{ACCOUNT[account]})."
        )
        claims.append(Claim(PAPER, CLAIM, model, found, status))
    return claims


def as_tables(rows: Any) -> dict[str, str]:
    """Wrong and right puzzles by what becomes of them; what tells the two apart."""
    lines = []
    for (*who, wrong), part in rows.groupby([*WHO, "wrong"], sort=False):
        cells = ["{:.0f} ({:.0f}–{:.0f})".format(*(100 * x)) for x in shares_of(part)]
        cells += [
            "{1:.2f} ({0:.2f} to {2:.2f})".format(*np.quantile(part[x], (0.1, 0.5, 0.9)))
            for x in ("lyapunov_run", "lyapunov_late")
        ]
        lines.append([*who, "wrong" if wrong else "right", len(part), *cells])
    head = ["after loop 16", "puzzles", *SHARES, "exponent, loops 1 to 16", "loops 17 to 64"]
    return {"reasoners-fates": table([*WHO, *head], lines), "reasoners-telling": telling(rows)}


def main() -> None:
    args = options(__doc__, saved=True, seed=[0], samples=1000, weights=OUT)
    rows = rows_of(fates, args)
    wrong = models_of(rows[rows["wrong"]])
    bars = [Series(model, SHARES, *np.transpose(shares_of(each))) for model, each in wrong]
    plot = bars_with_intervals(bars, value_title="share of wrong puzzles", value_range=(0, 1))
    record("failed_puzzles", args, claims_of(rows), as_tables(rows), plot)


if __name__ == "__main__":
    main()
