"""What could be saved by reading examples early, and which rule saves it: the zoo's looped models.

    python -m analyses.exits                # some five minutes on one core
    python -m analyses.exits --name parity  # one model anew, the others as they were

At twice the training cutoff and up to T(n) + 10 loops. What was found is kept in
analyses/results/exits.csv; the table goes into docs/results/stopping.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from analyses.tables_in_pages import table
from analyses.zoo_tables import measure_zoo
from loopinterp.lenses import exit_study
from loopinterp.lenses.exits_by_loop import RULES
from loopinterp.models.study_examples import fit_to_model
from loopinterp.tasks import as_batch
from loopinterp.zoo import pretrained_run

FILE, PAGE, NAME = "exits.csv", "results/stopping.md", "exits"
MARGIN = 10


def main() -> None:
    measure_zoo(
        "Exits of every looped model of the zoo.", measure, as_table,
        file=FILE, page=PAGE, table=NAME, times=(2,), samples=256,
    )  # fmt: skip


def measure(name: str, times: Sequence[int], samples: int) -> pd.DataFrame:
    """A row for each rule and length, with what the oracle and one loop for all reach."""
    run, rows = pretrained_run(name), []
    for n in (run.cutoff * k for k in times):
        model = run.model()
        batch = fit_to_model(model, as_batch(run.task, n=n, batch_size=samples))
        result = exit_study(model, batch, n_loops=int(batch.n_loops.max()) + MARGIN)
        (best, at), (found, mean) = result.best_loop(), result.oracle()
        said = {"model": name, "length": n, "samples": samples, "answer_loops": batch.n_loops[0]}
        said |= {"best": best, "best_loop": at, "oracle": found, "oracle_loops": mean}
        said |= {"another": float(result.data["another"].mean())}
        for rule in RULES:
            exact, dealt, loops = result.gain(rule)
            gain = {"exact": exact, "dealt": dealt, "loops": loops}
            rows.append({**said, "rule": rule, "cheapest": result.cheapest(rule), **gain})
    return pd.DataFrame(rows).astype({"answer_loops": int})


def as_table(known: pd.DataFrame) -> str:
    """A row for each model and length: loops needed by one for all, the oracle, and each rule."""
    rows = []
    for (name, n), cells in known.groupby(["model", "length"]):
        one, by_rule = cells.iloc[0], cells.set_index("rule")["cheapest"]
        shown = ["–" if pd.isna(by_rule[rule]) else f"{by_rule[rule]:.1f}" for rule in RULES]
        another = "" if pd.isna(one["another"]) else f"{one['another']:.2f}"
        best = f"{one['best']:.2f} ({one['best_loop']:.0f})"
        oracle = f"{one['oracle']:.2f} ({one['oracle_loops']:.1f})"
        rows.append([name, n, f"{one['answer_loops']:.0f}", best, oracle, another, *shown])
    header = ["model", "n", "T(n)", "one loop for all", "oracle", "another's answer", *RULES]
    return table(header, rows)


if __name__ == "__main__":
    main()
