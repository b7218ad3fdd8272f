"""Ranks of final and intermediate results in every loop and layer of a small Ouro, by logit lens.

    python -m analyses.papers.lens_ranks

arXiv 2507.02199 (abstract), of Huginn on arithmetic: rank trajectories of final and intermediate
results give little evidence of an interpretable latent chain of thought, and what can be read
depends heavily on the layer and on the lens. Ouro has no coda, so its coda lens is its logit lens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import torch

from analyses.papers.claims import Claim, interval, options, ouro_small, publish
from analyses.small_language_models import TASK, fresh
from analyses.tables_in_pages import table
from loopinterp.core.intervals import wilson_estimate
from loopinterp.figures import Series, line_figure
from loopinterp.lenses import lens_study
from loopinterp.tasks import IGNORE

PAPER, HOPS = "2507.02199", 8
LITTLE = "Little evidence that intermediate results are read before the final one."
UNEVEN = "What can be read depends heavily on the layer."


def main() -> None:
    args = options(__doc__)
    rows, claims, lines = [], [], []
    for seed in args.seed:
        model, batch = ouro_small(args, seed), fresh(HOPS, args.samples)
        first = {}
        for k in range(1, HOPS + 1):  # where k of the hops lead
            symbols = TASK.with_hops(batch, torch.full((len(batch.inputs),), k)).targets[:, -1]
            for kind, wanted in (("result", symbols), ("another's", symbols.roll(1))):
                targets = torch.full_like(batch.targets, IGNORE)
                targets[:, -1] = wanted
                asked = replace(batch, targets=targets)
                ranks = lens_study(model, asked, lens="logit", n_loops=model.n_loops, inside=True)
                top = ranks.data["rank"].isel(pos=-1) == 1  # [loop, layer, batch]
                for loop in range(1, model.n_loops + 1):
                    for layer in map(str, top["layer"].values):
                        hits = top.sel(loop=loop, layer=layer).values
                        first[kind, k, loop, layer] = hits
                        rows.append({"seed": seed, "kind": kind, "hops": k, "loop": loop,
                                     "layer": layer, "top": hits.mean()})  # fmt: skip
        middle = {key: x for key, x in first.items() if key[0] == "result" and key[1] < HOPS}
        best = max(middle, key=lambda key: middle[key].mean())
        share, control = (
            wilson_estimate(int(first[(kind, *best[1:])].sum()), args.samples)
            for kind in ("result", "another's")
        )
        status = "no" if share[1] > max(0.6, control[2]) else "yes"
        found = (
            f"the result after {best[1]} of {HOPS} hops is on top in {interval(share, 100, 0)}% "
            f"({best[3]}, loop {best[2]}); another's in {interval(control, 100, 0)}%."
        )
        model_name = f"ouro-small, seed {seed}"
        claims.append(Claim(PAPER, LITTLE, model_name, found, status))
        layers = ("layer 0", "layer 1", "state")
        last = {layer: first["result", HOPS, model.n_loops, layer] for layer in layers}
        low, high = (f(last, key=lambda layer: last[layer].mean()) for f in (min, max))
        ends = [wilson_estimate(int(last[x].sum()), args.samples) for x in (low, high)]
        status = "yes" if ends[1][1] - ends[0][2] > 0.2 else "no"
        found = (
            f"in the last loop the answer is on top in {interval(ends[0], 100, 0)}% ({low}) and "
            f"{interval(ends[1], 100, 0)}% ({high})."
        )
        claims.append(Claim(PAPER, UNEVEN, model_name, found, status))
        for k in (1, 3, 7, 8):
            at = [first["result", k, loop, "state"].mean() for loop in range(1, model.n_loops + 1)]
            lines.append(Series(f"{k} hops, seed {seed}", range(1, model.n_loops + 1), at))
    plot = line_figure(lines, x_title="loop", y_title="on top", y_range=(0, 1.03))
    publish("lens_ranks", args, claims, pd.DataFrame(rows), as_table, plot)


def as_table(rows: pd.DataFrame) -> str:
    """Per cent on top, by loop and layer, of the results of 1 to 8 hops; the greatest control."""
    shown = []
    for (seed, loop, layer), part in rows.groupby(["seed", "loop", "layer"], sort=True):
        by_kind: dict[Any, Any] = {
            kind: x.set_index("hops")["top"] for kind, x in part.groupby("kind")
        }
        cells = [f"{100 * float(by_kind['result'][k]):.0f}" for k in range(1, HOPS + 1)]
        control = 100 * float(np.max(by_kind["another's"]))
        shown.append([seed, loop, layer, *cells, f"{control:.0f}"])
    hops = [f"{k} hop{'s' if k > 1 else ''}" for k in range(1, HOPS + 1)]
    return table(["seed", "loop", "after", *hops, "another's, at most"], shown)


if __name__ == "__main__":
    main()
