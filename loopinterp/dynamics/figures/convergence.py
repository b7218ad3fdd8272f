"""Figures of the convergence study. Accuracy stands beside every curve of convergence: a state
can settle on a wrong answer, and a right answer can be left again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from loopinterp.dynamics.figures.aggregates import (
    exact_match_table,
    quantiles_by_loop,
    quantiles_by_position,
    right_from,
)
from loopinterp.dynamics.regimes import Regime
from loopinterp.dynamics.solvers.protocol import Status
from loopinterp.results import Figure

if TYPE_CHECKING:
    import pandas as pd

    from loopinterp.dynamics.convergence import ConvergenceResult
    from loopinterp.plotting import LinePanel

SECTION = "convergence"


def convergence_figures(result: ConvergenceResult) -> list[Figure]:
    """All figures of a convergence study, in the order in which they are read."""
    figures = [
        residual_figure(result),
        distance_figure(result),
        settling_figure(result),
        regime_figure(result),
        rate_figure(result),
        readout_figure(result),
    ]
    if np.isfinite(result.spectral_radius).any():
        figures.insert(4, stability_figure(result))
    return figures


def residual_figure(result: ConvergenceResult) -> Figure:
    """Relative residual by loop, above exact match."""
    from loopinterp.plotting import LinePanel, Reference, Series, line_panels

    low, middle, high = _positive(quantiles_by_loop(result.residual, result.counted))
    mean = _positive(result.mean_residual())
    loops = np.arange(result.n_loops + 1)
    table = exact_match_table(result.right).assign(
        residual_mean=mean, residual_10=low, residual_median=middle, residual_90=high
    )
    token = Series("median token", loops[1:], middle[1:], low=low[1:], high=high[1:])
    panel = LinePanel(
        [token, Series("mean", loops[1:], mean[1:], colour="ochre")],
        "relative residual",
        y_log=True,
        references=[Reference(result.threshold, "settled")],
    )
    plot = line_panels([panel, _accuracy_panel(result)], x_title="loops")
    return Figure(
        title="Residual by loop",
        plot=plot,
        caption=(
            "Above: how far a loop moves a token's state, as a share of the state; the band holds "
            "80% of the tokens, and below the dotted line a token counts as settled. Below: the "
            "share of answers that are wholly right if read at that loop, with a 95% interval."
        ),
        control=(
            "Convergence is not correctness, so exact match is drawn over the same loops: a low "
            "residual with low exact match is a wrong attractor."
        ),
        data=table,
        section=SECTION,
    )


def distance_figure(result: ConvergenceResult) -> Figure:
    """Distance to the limit by position and loop, with the loop from which answers are right."""
    import pandas as pd

    from loopinterp.plotting import HeatPanel, Series, heatmap_panels

    counted = result.counted == 1
    shown = np.flatnonzero(counted.any(axis=0))
    slowest = _slowest(result)
    found = right_from(result.right)
    cells = {
        "median of the examples": quantiles_by_position(result.distance, result.counted)[1],
        f"slowest example ({slowest})": np.where(counted[slowest], result.distance[:, slowest], 0),
    }
    right = [quantiles_by_position(found, result.counted)[1], found[slowest]]
    panels, tables = [], []
    for (title, distance), at in zip(cells.items(), right):
        overlay = Series("answer right from", shown, _gaps(at)[shown], colour="red", markers=False)
        panels.append(HeatPanel(np.log10(_positive(distance[:, shown])), title, [overlay]))
        table = pd.DataFrame(distance[:, shown], columns=pd.Index(shown, name="pos"))
        table = table.rename_axis("loop").stack().rename("distance").reset_index()
        tables.append(table.assign(of=title, answer_right_from=at[table["pos"].to_numpy()]))
    unsettled = int((result.limit_status != Status.CONVERGED).sum())
    note = (
        f" In {unsettled} of {len(result.limit_status)} examples no limit was found; their "
        "distance is to the last state reached."
        if unsettled
        else ""
    )
    return Figure(
        title="Distance to the limit",
        plot=heatmap_panels(
            panels,
            x=shown,
            y=np.arange(result.n_loops + 1),
            x_title="position",
            y_title="loops",
            value_title="log10 distance",
        ),
        caption=(
            "Each cell is the distance of a position's state from its limit after that many loops, "
            "relative to the limit (dark is near), in the median of the examples and in the one "
            "that settles last. A slanted edge is a front that passes through the "
            "sequence, a flat one means that all positions settle at once." + note
        ),
        control=(
            "The line is accuracy on the same axes: the loop from which the position's answer is "
            "right to the end (a gap where it ends wrong)."
        ),
        data=pd.concat(tables, ignore_index=True),
        section=SECTION,
    )


def settling_figure(result: ConvergenceResult) -> Figure:
    """Settling time by position, beside the loop from which the answer is right."""
    import pandas as pd

    from loopinterp.plotting import LinePanel, Series, line_panels

    settled = np.where(result.settled_at < 0, np.inf, result.settled_at.astype(float))
    low, middle, high = (_gaps(q) for q in quantiles_by_position(settled, result.counted))
    found = _gaps(quantiles_by_position(right_from(result.right), result.counted)[1])
    final = result.right[-1]
    asked = (final >= 0).sum(axis=0)
    accuracy = np.where(asked > 0, (final == 1).sum(axis=0) / np.maximum(asked, 1), np.nan)
    shown = np.flatnonzero((result.counted == 1).any(axis=0))
    columns = {
        "settled_10": low,
        "settled_median": middle,
        "settled_90": high,
        "answer_right_from": found,
        "accuracy": accuracy,
    }
    time = Series(
        "settled (median)", shown, middle[shown], low=low[shown], high=high[shown], markers=False
    )
    right = Series("answer right from", shown, found[shown], colour="red", markers=False)
    share = Series("accuracy", shown, accuracy[shown], colour="green", markers=False)
    plot = line_panels(
        [
            LinePanel([time, right], "loops"),
            LinePanel([share], "accuracy", y_range=(0, 1.03)),
        ],
        x_title="position",
    )
    return Figure(
        title="Settling time by position",
        plot=plot,
        caption=(
            f"The loop from which a position's residual stays under {result.threshold:g} (band: "
            "80% of the examples; a gap where most never settle). A slope of one is a front that "
            "moves one position a loop."
        ),
        control=(
            "Accuracy stands beside it: the loop from which the answer is right to the end, and "
            "below, the share of right answers after the last loop."
        ),
        data=pd.DataFrame({"pos": shown} | {k: v[shown] for k, v in columns.items()}),
        section=SECTION,
    )


def regime_figure(result: ConvergenceResult) -> Figure:
    """Tokens of each regime, by whether their answer is right at the end."""
    import pandas as pd

    from loopinterp.plotting import Series, bars_with_intervals

    counted = result.counted == 1
    kinds = {"right": 1, "wrong": 0, "not asked": -1}
    final = result.right[-1]
    rows = [
        (name, regime.label, int((counted & (final == code) & (result.regime == regime)).sum()))
        for name, code in kinds.items()
        for regime in Regime
    ]
    table = pd.DataFrame(rows, columns=["answer", "regime", "tokens"])
    colours = {"right": "green", "wrong": "red", "not asked": "grey"}
    groups = [
        Series(f"{name} at the end", part["regime"].tolist(), part["tokens"].tolist(), colour=shade)
        for name, shade in colours.items()
        if (part := table[table["answer"] == name])["tokens"].sum() or name != "not asked"
    ]
    periods = result.period[counted & (result.regime == Regime.ORBIT)]
    turns = f" The median orbit takes {np.median(periods):.3g} loops." if len(periods) else ""
    return Figure(
        title="What the trajectories become",
        plot=bars_with_intervals(groups, value_title="tokens"),
        caption=(
            "Class of each token's late trajectory: it comes to rest (fixed point), returns to "
            "itself (orbit), moves on in one direction (drift), grows without bound (divergence), "
            "or none of these." + turns
        ),
        control="Bars are split by accuracy: whether the answer at that token is right at the end.",
        data=table,
        section=SECTION,
    )


def stability_figure(result: ConvergenceResult) -> Figure:
    """Spectral radius of each example beside the contraction rate that its run shows."""
    import pandas as pd

    from loopinterp.plotting import Reference, Series, bars_with_intervals

    rows = np.flatnonzero(np.isfinite(result.spectral_radius))
    exact = (result.right[-1, rows] != 0).all(axis=1)
    names = [f"{row} ({'right' if ok else 'wrong'})" for row, ok in zip(rows, exact)]
    radius, rate = result.spectral_radius[rows], result.asymptotic_rate[rows]
    plot = bars_with_intervals(
        [
            Series("spectral radius", names, radius),
            Series("observed rate", names, rate, control=True),
        ],
        value_title="factor per loop",
        references=[Reference(1.0, "stable below 1")],
    )
    table = {
        "example": rows,
        "spectral_radius": radius,
        "ritz_residual": result.spectral_residual[rows],
        "asymptotic_rate": rate,
        "exact_match": exact,
    }
    return Figure(
        title="Local stability",
        plot=plot,
        caption=(
            "Spectral radius of the loop's Jacobian at the limit of each example, with whether its "
            "answer is right: below 1, a small disturbance dies out by that factor a loop in the "
            "long run, and the limit is reachable."
        ),
        control=(
            "The observed rate is how fast the updates of the run itself shrink in its last loops, "
            "measured without derivatives: the two agree where the run has come near its limit."
        ),
        data=pd.DataFrame(table),
        section=SECTION,
    )


def rate_figure(result: ConvergenceResult) -> Figure:
    """Contraction rate and update angle by loop, above exact match."""
    from loopinterp.plotting import LinePanel, Reference, Series, line_panels

    loops = np.arange(result.n_loops + 1)
    table, panels = exact_match_table(result.right), []
    lines = {
        "contraction": ("contraction", "factor per loop", Reference(1.0, "no contraction")),
        "cosine": ("update cosine", "cosine", Reference(0.0, "")),
    }
    for field, (name, title, mark) in lines.items():
        low, middle, high = quantiles_by_loop(getattr(result, field), result.counted)
        table = table.assign(**{f"{field}_10": low, f"{field}_median": middle, f"{field}_90": high})
        shade = "blue" if field == "contraction" else "magenta"
        line = Series(name, loops[2:], middle[2:], low=low[2:], high=high[2:], colour=shade)
        panels.append(LinePanel([line], title, references=[mark]))
    return Figure(
        title="Rate and direction of the approach",
        plot=line_panels([*panels, _accuracy_panel(result)], x_title="loops"),
        caption=(
            "Above: the length of an update over that of the one before (below 1 the state "
            "closes in). Middle: the cosine between the two: near 1 a straight approach, around "
            "0.5 a spiral, negative an overshoot. Bands hold 80% of the tokens; lines end where "
            "updates are no larger than rounding."
        ),
        control="Exact match over the same loops is drawn below.",
        data=table,
        section=SECTION,
    )


def readout_figure(result: ConvergenceResult) -> Figure:
    """Change, entropy and margin of the readout by loop, above exact match."""
    from loopinterp.plotting import LinePanel, Series, line_panels

    loops = np.arange(result.n_loops + 1)
    table, panels = exact_match_table(result.right), []
    lines = {
        "kl": ("KL to the loop before", "KL (nats)", 1, "blue"),
        "entropy": ("entropy", "entropy (nats)", 0, "magenta"),
        "margin": ("margin", "margin (logits)", 0, "ochre"),
    }
    for field, (name, title, first, shade) in lines.items():
        values = getattr(result, field)
        mean = _positive(values.mean(axis=1)) if field == "kl" else values.mean(axis=1)
        table[field] = mean
        line = Series(name, loops[first:], mean[first:], colour=shade)
        panels.append(LinePanel([line], title, y_log=field == "kl"))
    return Figure(
        title="When the answer stops changing",
        plot=line_panels([*panels, _accuracy_panel(result)], x_title="loops"),
        caption=(
            "From above: how much a loop changes the distribution that is read out, how undecided "
            "that distribution is, and by how much the first answer leads the second (means over "
            "answered positions)."
        ),
        control=(
            "Exact match is drawn below: an answer can be stable and certain, and still wrong."
        ),
        data=table,
        section=SECTION,
    )


def _slowest(result: ConvergenceResult) -> int:
    """The example that settles last; one that never does comes first."""
    settled = np.where(result.settled_at < 0, np.inf, result.settled_at)
    return int(np.where(result.counted == 1, settled, 0).max(axis=1).argmax())


def _accuracy_panel(result: ConvergenceResult) -> LinePanel:
    """Exact match by loop with its interval, and T(n) marked."""
    from loopinterp.plotting import LinePanel, Reference, Series

    table: pd.DataFrame = exact_match_table(result.right)
    line = Series(
        "exact match",
        table["loop"],
        table["exact_match"],
        low=table["low"],
        high=table["high"],
        colour="green",
    )
    marks = [Reference(t, "T(n)", "x") for t in sorted(set(result.answer_loops))]
    inside = [mark for mark in marks if mark.value <= result.n_loops]
    return LinePanel(
        [line], "exact match", y_range=(0, 1.03), references=inside if len(inside) == 1 else ()
    )


def _positive(values: np.ndarray) -> np.ndarray:
    """Values for a logarithmic axis: zero and infinity, which have no place on it, become NaN."""
    return np.where((values > 0) & np.isfinite(values), values, np.nan)


def _gaps(values: np.ndarray) -> np.ndarray:
    """Infinity (never) as a gap in the line."""
    return np.where(np.isinf(values), np.nan, values)
