"""Second-order exits against exits by step size and by KL, at equal mean loops; steps by loop.

    python -m analyses.papers.second_order_exits

arXiv 2509.23314 (abstract): across training, loop steps become smaller and increasingly orthogonal
to one another; an exit by the second-order difference of steps beats those by KL and by step size.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from analyses.papers import claims as shared
from analyses.papers.claims import Claim, cell, options, ouro_small, over_examples, within
from analyses.tables_in_pages import table
from loopinterp.figures import Series, line_figure
from loopinterp.lenses import exit_study
from loopinterp.lenses.exits_by_loop import RULES
from loopinterp.models.study_examples import fit_to_model
from loopinterp.zoo import load_pretrained

PAPER = "2509.23314"
BETTER = "A second-order exit is better than exits by KL and by step size (equal mean loops)."
SMALLER = "Loop steps become smaller (over the loops of a run; the paper: over training)."
TURNED = "Loop steps become increasingly orthogonal (likewise)."
COMPARED = ("second-order", "readout KL", "residual")
ZOO, SHARES = ("addition", "parity", "prefix_sum"), (0.3, 0.5, 0.7, 0.9)


def main() -> None:
    args = options(__doc__)
    rows, claims, lines, runs = [], [], [], {}
    for seed in args.seed:
        model = ouro_small(args, seed)
        runs[f"ouro-small, seed {seed}"] = (
            model,
            shared.data_of("example", args.samples),
            model.n_loops,
        )
    for name in ZOO:
        model = load_pretrained(name)
        batch = model.task.sample(24, batch_size=args.samples, seed=0)
        batch = fit_to_model(model, batch)
        runs[name] = (model, batch, int(batch.n_loops.max()))
    rules = {name: RULES[name] for name in COMPARED}
    for name, (model, batch, n_loops) in runs.items():
        data = exit_study(model, batch, rules=rules, n_loops=n_loops).data
        example, right = data["example"].values, {rule: [] for rule in COMPARED}
        shares = SHARES if n_loops > 4 else (0.8, 0.85, 0.9, 0.95)  # it needs three loops
        for share in shares:
            for rule in COMPARED:
                right[rule].append(shared.right_at(data, rule, share * n_loops))
        reached = [
            k for k in range(len(shares)) if all(np.isfinite(right[r][k]).all() for r in COMPARED)
        ]
        mean = {rule: np.mean([right[rule][k] for k in reached], 0) for rule in COMPARED}
        row = {"model": name, "loops": n_loops, "budgets": len(reached)}
        row |= {rule: mean[rule].mean() for rule in COMPARED}
        for rule in COMPARED[1:]:
            row |= within(f"over {rule}", over_examples(mean["second-order"] - mean[rule], example))
        for kind in ("residual", "cosine"):
            values = np.abs(data[kind].values.astype(float))
            # A cosine at rounding error is undefined: the last loop before it counts.
            end = len(values) - 1 - np.isfinite(values)[::-1].argmax(0)  # [row]
            first, last = values[2], values[end, np.arange(len(end))]
            row |= {f"{kind} first": first.mean(), f"{kind} last": last.mean()}
            row |= within(f"{kind} change", over_examples(last - first, example))
        rows.append(row)
        moves = data["residual"].mean("batch").values[1:]
        lines.append(Series(f"{name}, residual", range(1, n_loops + 1), moves))
        for claim, kinds, sign in (
            (BETTER, [f"over {rule}" for rule in COMPARED[1:]], 1),
            (SMALLER, ["residual change"], -1),
            (TURNED, ["cosine change"], -1),
        ):
            lows, highs = ([sign * row[f"{k}_{end}"] for k in kinds] for end in ("low", "high"))
            lows, highs = (lows, highs) if sign > 0 else (highs, lows)
            status = "yes" if min(lows) > 0 else "no" if min(highs) < 0 else "not decided"
            times, digits = (100, 1) if sign > 0 else (1, 2)
            found = "; ".join(f"{k} {cell(row, k, times, digits)}" for k in kinds)
            claims.append(Claim(PAPER, claim, name, f"{found}.", status))
    plot = line_figure(lines, x_title="loop", y_title="residual", y_log=True)
    shared.publish("second_order_exits", args, claims, pd.DataFrame(rows), as_table, plot)


def as_table(rows: pd.DataFrame) -> str:
    """A row for each model: per cent right by rule, and steps from loop 2 to the last."""
    shown = [
        [x["model"], x["loops"], *(f"{100 * x[rule]:.1f}" for rule in COMPARED),
         *(f"{x[f'{k} first']:.2f} → {x[f'{k} last']:.2f}" for k in ("residual", "cosine"))]
        for _, x in rows.iterrows()
    ]  # fmt: skip
    return table(["model", "loops", *COMPARED, "residual of steps", "abs. cosine of steps"], shown)


if __name__ == "__main__":
    main()
