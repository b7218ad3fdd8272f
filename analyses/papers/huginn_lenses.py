"""What the logit, coda and Jacobian lenses read of the final answer in loops of small Huginns.

    python -m analyses.papers.huginn_lenses --texts FOLDER    # --saved: from the file of rows

arXiv 2507.02199 (abstract): what can be read depends heavily on the lens. It does if, half-way, the
logit and the coda lens differ by more than ``HEAVY`` of the divergence of the mean answer. By arXiv
2609.01924 (second-hand) a Jacobian lens reads the final answer from earlier loops. It does if, in
its best loop before the last, it is nearer to the final readout than the mean answer.
"""

from __future__ import annotations

from typing import Any

import pandas as pd
import torch

from analyses.huginn_small_models import Known, columns, rows_of
from analyses.huginn_small_tables import PARTS, ends, groups, looped_models, records, shown
from analyses.papers.claims import Claim, above, below, interval, options, record, series
from analyses.tables_in_pages import table
from analyses.train_huginn_small import MEAN_LOOPS, OUT
from loopinterp.core.intervals import mean_estimate
from loopinterp.figures import line_figure
from loopinterp.lenses import fit_jacobian_lens, lens_study

CODA, JACOBIAN = "2507.02199", "2609.01924"
UNEVEN = "What can be read depends heavily on the lens."
EARLY = "A Jacobian lens reads the final answer from earlier loops (second-hand)."
HEAVY, SHOWN = 0.25, (0, 1, 2, 3, 4, 6, 8)


def lenses(known: Known, n: int) -> pd.DataFrame:
    """Divergence of the final readout from each lens, by loop; the norm of the Jacobian lens."""
    both = known.examples(2 * n)
    read, fit_on = both[torch.arange(0, 2 * n, 2)], both[torch.arange(1, 2 * n, 2)]
    if known.texts is None:  # all p in both
        read, fit_on = both[torch.arange(n)], both[torch.arange(n, 2 * n)]
    rows = []
    jacobian = fit_jacobian_lens(known.looped, fit_on, n_loops=MEAN_LOOPS)
    norms = [*torch.linalg.matrix_norm(jacobian.matrix, ord=2).tolist(), 1.0]
    lens: Any
    for name, lens in {"logit": "logit", "coda": "coda", "jacobian": jacobian}.items():
        found = lens_study(known.looped, read, lens=lens, n_loops=MEAN_LOOPS).data
        gaps = found["reading_kl"].sel(reading="lens", layer="state").values
        unigram = float(found["unigram_kl"].mean())
        for loops, gap in enumerate(gaps):
            row = {**known.who, "lens": name, "loops": loops, **columns(mean_estimate(gap))}
            rows.append({**row, "unigram": unigram, "norm": norms[loops]})
    return pd.DataFrame(rows)


def claims_of(rows: pd.DataFrame) -> list[Claim]:
    claims = []
    for model, each in looped_models(rows):
        at = {(x["lens"], x["loops"]): ends(x) for x in records(each)}
        mean, half = float(each["unigram"].iloc[0]), MEAN_LOOPS // 2
        logit, coda = at["logit", half], at["coda", half]
        gap = [logit[0] - coda[0], logit[1] - coda[2], logit[2] - coda[1]]  # not narrower
        found = (
            f"in loop {half} the logit lens is {interval(logit)} nats from the final readout, the "
            f"coda lens {interval(coda)}, the mean answer {mean:.2f}."
        )
        claims.append(Claim(CODA, UNEVEN, model, found, above(gap, HEAVY * mean)))
        best = min(range(MEAN_LOOPS), key=lambda loop: at["jacobian", loop][0])
        nearest = at["jacobian", best]
        found = (
            f"before the last loop it is nearest in loop {best}: {interval(nearest)} nats from "
            f"the final readout; the mean answer {mean:.2f}."
        )
        claims.append(Claim(JACOBIAN, EARLY, model, found, below(nearest, mean)))
    return claims


def as_tables(rows: pd.DataFrame) -> dict[str, str]:
    """A row for each model and lens, and one for the norm of the Jacobian lens."""
    lines = []
    for (part, seed, lens), each in groups(rows, "part", "seed", "lens"):
        cells = records(each[each["loops"].isin(SHOWN)])
        who, mean = [PARTS[str(part)], seed], f"{each['unigram'].iloc[0]:.2f}"
        lines.append([*who, lens, *(shown(x, 1, 2) for x in cells), mean])
        if lens == "jacobian":
            lines.append([*who, "norm of its map", *(f"{x['norm']:.2g}" for x in cells), ""])
    head = ["part", "seed", "lens", *(f"loop {t}" for t in SHOWN), "mean answer"]
    return {"huginn-lenses": table(head, lines)}


def main() -> None:
    args = options(__doc__, saved=True, samples=24, weights=OUT)
    rows = rows_of(lenses, args)
    parts = [
        (f"{lens}, {model}", of_lens)
        for model, each in looped_models(rows) for lens, of_lens in each.groupby("lens")
    ]  # fmt: skip
    plot = line_figure(series(parts, "loops"), x_title="loop", y_title="nats from the last readout")
    record("huginn_lenses", args, claims_of(rows), as_tables(rows), plot)


if __name__ == "__main__":
    main()
