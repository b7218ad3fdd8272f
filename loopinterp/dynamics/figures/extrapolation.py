"""Figures of loop extrapolation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from loopinterp.intervals import wilson_interval
from loopinterp.results import Figure

if TYPE_CHECKING:
    from loopinterp.dynamics.extrapolation import ExtrapolationResult

LONG_RUN = 60
"""Loops from which on the loop axis is logarithmic, so that the first ones stay readable."""


def extrapolation_figures(result: ExtrapolationResult) -> list[Figure]:
    """Exact match and residual against loops."""
    import pandas as pd

    from loopinterp.plotting import LinePanel, Reference, Series, line_panels, ramp

    lengths = np.array(result.lengths)
    kinds = sorted(set(result.lengths))
    loops = np.arange(result.n_loops + 1)
    exact_lines, residual_lines, tables = [], [], []
    for length, shade in zip(kinds, ramp(len(kinds))):
        rows = lengths == length
        hits, n = result.exact[:, rows].sum(axis=1), int(rows.sum())
        low, high = wilson_interval(hits, n)
        residual = result.residual[:, rows].mean(axis=1)
        name = f"n = {length}"
        # Loop 0 has no place on a logarithmic axis, and no residual.
        exact_lines.append(
            Series(name, loops[1:], hits[1:] / n, low=low[1:], high=high[1:], colour=shade)
        )
        drawn = (residual[1:] > 0) & np.isfinite(residual[1:])
        shown = np.where(drawn, residual[1:], np.nan)
        residual_lines.append(Series(name, loops[1:], shown, colour=shade))
        columns = {"loop": loops, "n": length, "exact_match": hits / n, "low": low, "high": high}
        accuracy = result.accuracy[:, rows].mean(axis=1)
        tables.append(pd.DataFrame(columns | {"accuracy": accuracy, "residual": residual}))
    answers = sorted(set(result.answer_loops))
    marks = [Reference(answers[0], "T(n)", "x")] if len(answers) == 1 else []
    if result.trained_loops is not None and result.trained_loops not in answers:
        marks.append(Reference(result.trained_loops, "longest training run", "x"))
    plot = line_panels(
        [
            LinePanel(exact_lines, "exact match", y_range=(0, 1.03), references=marks),
            LinePanel(residual_lines, "relative residual", y_log=True),
        ],
        x_title="loops",
        x_log=result.n_loops >= LONG_RUN,
    )
    fates = result.fates()
    counts = ", ".join(f"{name}: {count}" for name, count in fates.items())
    return [
        Figure(
            title="Running the loop on",
            plot=plot,
            caption=(
                "Above: the share of answers that are wholly right if read after that many loops, "
                "with 95% intervals; the dotted line marks the loop at which the answer is asked "
                "for. Below: how far a loop still moves the state."
            ),
            control=(
                "Exact match and residual stand together, because a state can converge to a wrong "
                f"answer or leave a right one. From T(n) to the last loop: {counts}."
            ),
            data=pd.concat(tables, ignore_index=True),
            section="convergence",
        )
    ]
