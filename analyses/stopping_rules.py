"""Where each stopping rule stops, and how often that is right: every model of the zoo.

    python -m analyses.stopping_rules                # a few minutes on one core
    python -m analyses.stopping_rules --name parity  # one model anew, the others as they were

Exact match and the mean number of loops of every rule of ``loopinterp evaluate --stop``, of T(n),
and of the best loop in hindsight, at 1, 2 and 4 times the training cutoff. What was found is kept
in analyses/results/stopping_rules.csv; the table goes into docs/results/stopping.md, on the input
distribution that is hardest.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from analyses.tables_in_pages import table
from analyses.zoo_tables import measure_zoo
from loopinterp.app.session import CALIBRATED, calibrate_stopping, open_run, stopping_rules
from loopinterp.training import evaluate
from loopinterp.training.evaluation import ANY, BEST, ORACLE
from loopinterp.zoo import pretrained_run

FILE, PAGE, NAME = "stopping_rules.csv", "results/stopping.md", "stopping-rules"
TIMES = (1, 2, 4)
RULES = (
    "max-confidence",
    "max-confidence-batch",
    "residual",
    "readout-kl",
    "acceleration",
    "answer-held",
)
SHORT = {ORACLE: "T(n)", BEST: "best loop", CALIBRATED: CALIBRATED} | {
    next(iter(stopping_rules([name]))): name for name in RULES
}
"""The rules as the page names them, by their names in results; columns in this order."""


def main() -> None:
    measure_zoo(
        "Every stopping rule on every model of the zoo.", measure, as_table,
        file=FILE, page=PAGE, table=NAME, times=TIMES, samples=200,
    )  # fmt: skip


def measure(name: str, times: Sequence[int], samples: int) -> pd.DataFrame:
    """What every rule reaches on a model, by distribution and length."""
    run = pretrained_run(name)
    rules = stopping_rules(RULES) | {CALIBRATED: calibrate_stopping(open_run(run.folder))}
    lengths = [run.cutoff * k for k in times]
    found = evaluate(run.model(), run.task, lengths, stopping=rules, n_samples=samples)
    rows = found.to_dataframe("stopped_exact_match", "stopped_at").query(f"rule != {ANY!r}")
    said = ["rule", "distribution", "length", "stopped_exact_match", "stopped_at"]
    rows = rows.assign(model=name, samples=samples)
    return rows.filter(["model", *said, "samples"])


def as_table(known: pd.DataFrame) -> str:
    """A row for each model and length, a column for each rule: exact match, and the mean loop."""
    rows = []
    for name, n in known[["model", "length"]].drop_duplicates().values.tolist():
        cells = known.query("model == @name and length == @n")
        known_loops = cells.query("rule == @ORACLE").iloc[::-1]
        # Of two that are as hard, the one that is meant to be comes last.
        hardest = known_loops.sort_values("stopped_exact_match", kind="stable").iloc[0].distribution
        at = cells.query("distribution == @hardest").set_index("rule")
        exact, loop = at["stopped_exact_match"], at["stopped_at"]
        shown = [f"{exact[rule]:.2f} ({loop[rule]:.0f})" for rule in SHORT]
        rows.append([f"{name}, {hardest}", n, *shown])
    return table(["model, inputs", "n", *SHORT.values()], rows)


if __name__ == "__main__":
    main()
