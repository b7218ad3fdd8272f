"""Do states of small Huginns converge, orbit or slide, and is that decided by token?

    python -m analyses.papers.state_regimes --texts FOLDER    # --saved: from the file of rows

arXiv 2502.05171 reports that the states of some tokens converge to fixed points, that others orbit,
and that others slide. All three must be present: in more than ``SOME`` of the tokens.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import torch

from analyses.huginn_small_models import Known, columns, rows_of, token_kinds
from analyses.huginn_small_tables import PARTS, ends, groups, looped_models, records, shown
from analyses.papers.claims import Claim, above, decided, interval, options, record, series
from analyses.tables_in_pages import table
from analyses.train_huginn_small import OUT
from loopinterp.core.intervals import wilson_estimate
from loopinterp.dynamics import Regime, classify_regimes, run_loops
from loopinterp.figures import bars_with_intervals
from loopinterp.models import bind

PAPER, CLAIM = "2502.05171", "States converge, orbit or slide, by token."
LOOPS, SOME, ROUNDED = 128, 0.05, Regime.CONVERGED_TO_ROUNDING  # counted as converged
KINDS = {"fixed point": "converge", "orbit": "orbit", "drift": "slide"}


def regimes(known: Known, n: int) -> pd.DataFrame:
    """Shares of tokens whose states end in each regime; three times as many of the trained."""
    rows = []
    for name, models in known.controls().items():
        batch = known.examples(3 * n if name == "looped" else n)
        kinds = np.concatenate([token_kinds(known.part, batch.inputs)] * len(models))
        runs = (run_loops(bind(m, x), LOOPS) for m in models for x in batch.inputs.split(20))
        limits = [classify_regimes(states) for states in runs]
        regime = torch.cat([x.regime for x in limits]).numpy()  # [example, pos]
        regime = np.where(regime == ROUNDED, Regime.FIXED_POINT, regime)
        period = torch.cat([x.period for x in limits]).numpy()
        for kind in ("all", *sorted({*kinds.flatten()})):
            where = (kinds == kind) | (kind == "all")  # [example, pos]
            # Tokens of one sequence are not independent: intervals count sequences.
            n_tokens, sequences = int(where.sum()), int(where.any(1).sum())
            for each in [*Regime][:ROUNDED]:
                inside = (regime == int(each)) & where
                share = wilson_estimate(int(inside.sum()), n_tokens, independent=sequences)
                row = {**known.who, "model": name, "token": kind, "regime": each.label}
                row |= {"n": n_tokens, "sequences": sequences, "touched": inside.any(1).sum()}
                loops = np.median(period[inside]) if inside.any() else np.nan
                rows.append({**row, "period": loops, **columns(share)})
    return pd.DataFrame(rows)


def claims_of(rows: pd.DataFrame) -> list[Claim]:
    claims = []
    for model, each in looped_models(rows.query("token == 'all'")):
        by_regime = each.set_index("regime")
        shares = {does: ends(by_regime.loc[kind]) for kind, does in KINDS.items()}
        present = {above(share, SOME) for share in shares.values()}
        status = decided(present == {"yes"}, "no" in present)
        orbit = by_regime.loc["orbit"]
        n, touched, length = orbit["sequences"], orbit["touched"], orbit["n"] / orbit["sequences"]
        share = orbit["value"] * n / max(touched, 1)
        found = ", ".join(f"{interval(x, 100, 0)}% {does}" for does, x in shares.items())
        spread = n * (1 - (1 - orbit["value"]) ** length)  # if tokens were independent
        found += f"; {touched:.0f} of {n:.0f} sequences have an orbit (independent tokens: in "
        found += f"{spread:.0f}), in {share:.0%} of their tokens."
        claims.append(Claim(PAPER, CLAIM, model, found, status))
    return claims


def as_tables(rows: pd.DataFrame) -> dict[str, str]:
    """All tokens of each model, and those kinds of the trained one's of which some move on."""
    lines = []
    for (part, seed, model, token), each in groups(rows, "part", "seed", "model", "token"):
        moves = model == "looped" and each["value"].iloc[0] < 0.9  # the first is the fixed point
        if token == "all" or moves:
            orbit = each[each["regime"] == "orbit"].iloc[0]
            shares = [shown(x, 100) for x in records(each)]
            period = f"{orbit['period']:.2f}".replace("nan", "")
            count = f"{orbit['touched']:.0f} of {orbit['sequences']:.0f}"
            lines.append([PARTS[str(part)], seed, model, token, *shares, count, period])
    head = ["part", "seed", "weights", "tokens", *rows["regime"].unique()]
    head += ["sequences with an orbit", "period (median)"]
    return {"huginn-regimes": table(head, lines)}


def main() -> None:
    args = options(__doc__, saved=True, samples=64, weights=OUT)
    rows = rows_of(regimes, args)
    of_all = looped_models(rows.query("token == 'all'"))
    plot = bars_with_intervals(series(of_all, "regime"), value_title="share of tokens")
    record("state_regimes", args, claims_of(rows), as_tables(rows), plot)


if __name__ == "__main__":
    main()
