"""A learned exit gate against a confidence read-out, at equal mean loops, per example and token.

    python -m analyses.papers.learned_gates

arXiv 2607.20519 compares learned gates and confidence read-outs with an oracle over exits. Its text
was not at hand; the claim is second-hand: at equal loops a gate is no better than confidence.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from analyses.ouro_small_results import STAGES
from analyses.papers.claims import (
    Claim,
    cell,
    data_of,
    interval,
    options,
    ouro_small,
    over_examples,
    publish,
    right_at,
    within,
)  # fmt: skip
from analyses.tables_in_pages import table
from loopinterp.figures import Series, line_figure
from loopinterp.lenses import exit_study
from loopinterp.models import ConfidenceAbove

PAPER = "2607.20519"
CLAIM = "At equal mean loops a learned gate is no better than a confidence read-out (second-hand)."
BUDGETS = (2.0, 2.5, 3.0, 3.5)


def main() -> None:
    args = options(__doc__)
    rows, claims = [], []
    for seed in args.seed:
        for per in ("example", "token"):
            batch, differences = data_of(per, args.samples), {}
            for stage in STAGES:
                model = ouro_small(args, seed, stage)
                result = exit_study(
                    model, batch, rules={"confidence": ConfidenceAbove(0.95)}, per=per,
                    gate=model.exit_probability, n_loops=model.n_loops, seed=seed,
                )  # fmt: skip
                data, name = result.data, stage.removeprefix("looped, ")
                example = data["example"].values
                row = {"seed": seed, "per": per, "gate": name, "oracle": result.oracle()[0]}
                row |= {"oracle_loops": result.oracle()[1]}
                row |= within("weighted", over_examples(data["weighted_exact"].values, example))
                row |= {"weighted_loops": float(data["weighted_loops"].mean())}
                row |= {"weighted_dealt": float(data["weighted_dealt"].mean())}
                both = []
                for budget in BUDGETS:
                    gate, sure = (
                        right_at(data, rule, budget) for rule in ("gate, cumulated", "confidence")
                    )
                    row |= {f"gate_{budget}": gate.mean(), f"confidence_{budget}": sure.mean()}
                    both.append(gate - sure)
                differences[name] = over_examples(np.mean(both, 0), example)
                rows.append(row | within("difference", differences[name]))
            value, low, high = differences["stage I"]
            status = "no" if low > 0.01 else "yes" if high < 0.01 else "not decided"
            ahead = interval(differences["stage II ahead"], 100, 1)
            found = (
                f"gate minus confidence, mean over {len(BUDGETS)} budgets: "
                f"{interval((value, low, high), 100, 1)} points; stage II ahead {ahead}."
            )
            claims.append(Claim(PAPER, CLAIM, f"ouro-small, seed {seed}, per {per}", found, status))
    lines = [
        Series(f"{k}, {x['per']}, seed {x['seed']}", BUDGETS, [x[f"{k}_{b}"] for b in BUDGETS])
        for k in ("gate", "confidence") for x in rows if x["gate"] == "stage I"
    ]  # fmt: skip
    plot = line_figure(lines, x_title="mean loops", y_title="share right")
    publish("learned_gates", args, claims, pd.DataFrame(rows), as_table, plot)


def as_table(rows: pd.DataFrame) -> str:
    """A row for each seed, unit and gate: gate against confidence by budget, weighted exits."""
    shown = [
        [x["seed"], x["per"], x["gate"],
         *(f"{100 * x[f'gate_{b}']:.1f} / {100 * x[f'confidence_{b}']:.1f}" for b in BUDGETS),
         cell(x, "difference", digits=1), f"{100 * x['oracle']:.1f} ({x['oracle_loops']:.2f})",
         f"{100 * x['weighted']:.1f} / {100 * x['weighted_dealt']:.1f} ({x['weighted_loops']:.2f})"]
        for _, x in rows.iterrows()
    ]  # fmt: skip
    header = ["seed", "per", "gate", *(f"{b:g} loops" for b in BUDGETS), "difference"]
    return table([*header, "oracle (loops)", "weighted / dealt (loops)"], shown)


if __name__ == "__main__":
    main()
