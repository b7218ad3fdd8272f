"""What a study of loop extrapolation says and shows."""

from __future__ import annotations

import numpy as np

from loopinterp.dynamics.extrapolation import ExtrapolationResult
from loopinterp.dynamics.rounding import with_rounding
from loopinterp.intervals import share_of
from loopinterp.plotting import LinePanel, Reference, Series, line_panels
from loopinterp.results import Figure, Finding, figures_of, findings_of, percent, tidy

SECTION = "convergence"

LONG_RUN = 60
"""Loops from which on the loop axis is logarithmic, so that the first ones stay readable."""


@findings_of.register
@with_rounding
def _(result: ExtrapolationResult) -> list[Finding]:
    """Whether the answer survives many more loops."""
    first = float(result.at_answer().mean())
    last = float(result.data["exact"].isel(loop=-1).mean())
    fates = result.fates()
    between = fates["right at both, lost in between"]
    text = (
        f"{percent(first)} of the answers are right at {result.answered_after} and "
        f"{percent(last)} after {result.n_loops} loops: of {result.data.sizes['batch']}, "
        f"{fates['right, then lost']} right ones end wrong, {fates['wrong, then found']} wrong "
        f"ones end right, and {between} right at both are lost in between."
    )
    good = last >= max(first, 0.99) and not between
    kept = f"{percent(last)} after {result.n_loops} loops"
    return [Finding(text, value=kept, good=good)]


@figures_of.register
def _(result: ExtrapolationResult) -> list[Figure]:
    """Exact match against loops, with the residual below it."""
    cells = result.data.set_coords("length").rename(length="n")
    exact = cells["exact"].groupby("n").map(share_of, args=("batch",))
    accuracy = cells["accuracy"].groupby("n").mean("batch")
    residual = cells["residual"].groupby("n").mean("batch", skipna=False)
    norm = cells["norm"].groupby("n").mean("batch", skipna=False)
    # Loop 0 has no place on a logarithmic axis, and no residual.
    positive = residual.where((residual > 0) & (residual < np.inf))
    exact_lines, residual_lines, norm_lines = (
        Series.each(values.isel(loop=slice(1, None)), "n", "n = {}".format, in_order=True)
        for values in (exact, positive, norm.where((norm > 0) & (norm < np.inf)))
    )
    answers = np.unique(result.data["answer_loops"]).tolist()
    marks = [Reference(answers[0], result.answered_after, "x")] if len(answers) == 1 else []
    if result.trained_loops is not None and result.trained_loops not in answers:
        marks.append(Reference(result.trained_loops, "longest training run", "x"))
    plot = line_panels(
        [
            LinePanel(exact_lines, "exact match", y_range=(0, 1.03), references=marks),
            LinePanel(residual_lines, "relative residual", y_log=True),
            LinePanel(norm_lines, "norm of the state", y_log=True),
        ],
        x_title="loops",
        x_log=result.n_loops >= LONG_RUN,
    )
    counts = ", ".join(f"{name}: {count}" for name, count in result.fates().items())
    return [
        Figure(
            title="Running the loop on",
            plot=plot,
            caption=(
                "Above: the share of answers that are wholly right if read after that many loops, "
                "with 95% intervals; the dotted line marks the loop at which the answer is asked "
                "for. Below: how far a loop still moves the state, and how large the state is."
            ),
            control=(
                "Exact match and residual stand together, because a state can converge to a wrong "
                f"answer or leave a right one. From {result.answered_after} to the last loop: "
                f"{counts}."
            ),
            data=tidy(
                {"exact_match": exact, "accuracy": accuracy, "residual": residual, "norm": norm}
            ),
        )
    ]
