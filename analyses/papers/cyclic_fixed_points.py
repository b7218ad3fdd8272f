"""Fixed points of each layer of the block, and attention that stops changing, over 128 loops.

    python -m analyses.papers.cyclic_fixed_points

arXiv 2604.11791 (abstract): in many looped language models each layer converges to a fixed point of
its own, so that the block runs through a cycle, and attention heads stabilise as it is reached.
``stages_of_inference`` tests its claim on the stages of inference.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from analyses.papers.claims import Claim, cell, options, ouro_small, publish, within
from analyses.small_language_models import LENGTH, TASK
from analyses.tables_in_pages import table
from loopinterp.core.intervals import mean_estimate
from loopinterp.dynamics import attention_stabilisation_study, layer_limits
from loopinterp.figures import Series, line_figure
from loopinterp.models import iterate
from loopinterp.zoo import load_pretrained

PAPER, LOOPS, SETTLED = "2604.11791", 128, 0.01
LAYERS = "Each layer converges to a fixed point of its own."
HEADS = "Attention stabilises as the fixed points are reached."


def main() -> None:
    args = options(__doc__, samples=64)
    rows, claims, lines, runs = [], [], [], {}
    for seed in args.seed:
        batch = TASK.sample(LENGTH, batch_size=args.samples, seed=10**6)
        runs[f"ouro-small, seed {seed}"] = (ouro_small(args, seed), batch)
    for name, n in (("abacus", 6), ("unique_set", 12)):  # the zoo's models of two layers
        model = load_pretrained(name)
        if model.site_map.n_layers > 1:
            runs[name] = (model, model.task.sample(n, batch_size=args.samples, seed=0))
    for name, (model, batch) in runs.items():
        limits = layer_limits(model, batch.inputs, n_loops=LOOPS)
        residual = limits.residual.numpy()  # [loop, layer, batch]
        distance = limits.distance.amin(-1).numpy()  # the nearest two states of an example
        apart = distance[~np.eye(len(distance), dtype=bool)].min(0)  # [batch]
        heads = attention_stabilisation_study(model, batch, n_loops=LOOPS)
        change = heads.data["change"].mean("layer").mean("head").values  # [loop, batch]
        row = {"model": name, "loops": LOOPS}
        row |= within("residual 2", mean_estimate(residual[1].max(0)))
        row |= within("residual", mean_estimate(residual[-1].max(0)))
        row |= within("distance", mean_estimate(apart))
        *_, (_, last) = iterate(model, batch.inputs, LOOPS)  # [batch, pos, d_model]
        gap = (last - last.roll(1, 0)).norm(dim=-1) / last.norm(dim=-1)
        row |= within("inputs", mean_estimate(gap.mean(1).detach().numpy()))
        row |= within("heads", mean_estimate(change[-1] / np.nanmax(change, 0)))
        rows.append(row)
        lines.append(Series(name, range(1, LOOPS + 1), residual.max(1).mean(-1)))
        status = "yes" if row["residual_high"] < SETTLED < row["distance_low"] else "no"
        found = (
            f"after {LOOPS} loops the residual of the layer that moves most is "
            f"{cell(row, 'residual', 1, 3)}; layers are {cell(row, 'distance', 1, 2)} apart, "
            f"states of different inputs {cell(row, 'inputs', 1, 2)}."
        )
        claims.append(Claim(PAPER, LAYERS, name, found, status))
        status = "yes" if row["heads_high"] < 0.05 else "no"
        found = f"patterns change by {cell(row, 'heads')}% of their largest change."
        claims.append(Claim(PAPER, HEADS, name, found, status))
    plot = line_figure(lines, x_title="loop", y_title="residual", y_log=True)
    publish("cyclic_fixed_points", args, claims, pd.DataFrame(rows), as_table, plot)


def as_table(rows: pd.DataFrame) -> str:
    """A row for each model."""
    names = ("residual 2", "residual", "distance", "inputs", "heads")
    shown = [[x["model"], *(cell(x, name, 1, 3) for name in names)] for _, x in rows.iterrows()]
    header = ["model", "residual, loop 2", f"residual, loop {LOOPS}", "distance between layers"]
    header += ["distance between inputs", "change of attention, share of the largest"]
    return table(header, shown)


if __name__ == "__main__":
    main()
