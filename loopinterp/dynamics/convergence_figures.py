"""What a convergence study says and shows, and what the figures of dynamics share.

Accuracy stands beside every curve of convergence: a state can settle on a wrong answer, and a right
answer can be left again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
import xarray as xr

from loopinterp.core.intervals import ESTIMATE, band_of
from loopinterp.core.results import Figure, Finding, figures_of, findings_of, tidy
from loopinterp.core.text import percent
from loopinterp.dynamics.convergence import RITZ_TOLERANCE, ConvergenceResult
from loopinterp.dynamics.regimes import Regime, rounding_of
from loopinterp.dynamics.solvers import Status
from loopinterp.figures import (
    LinePanel,
    Reference,
    Series,
    bars_with_intervals,
    heatmap_panels,
    line_panels,
)


def with_rounding(findings: Callable[[Any], list[Finding]]) -> Callable[[Any], list[Finding]]:
    """Findings, with one after the first where the dtype of the states is coarse."""

    @wraps(findings)
    def with_floor(result: Any) -> list[Finding]:
        first, *others = findings(result)
        name = result.provenance.config.get("state_dtype")
        if name is None:
            return [first, *others]
        share = f"{rounding_of(getattr(torch, name)):.2g}"
        text = (
            f"The states are {name}: rounding alone moves a state by up to {share} of its size in "
            "a loop. Rounding decides residuals, distances and rates below that, and whether a "
            "limit is found to a finer tolerance. Repeat the study with model.float() to resolve "
            "them."
        )
        floor = Finding(text, value=f"{name}: resolved to {share}", kind=first.kind)
        return [first, floor, *others]

    return with_floor


def value_of(estimate: xr.DataArray) -> xr.DataArray:
    """An estimate without its interval."""
    return estimate.sel({ESTIMATE: "value"}, drop=True)


def exact_panel(exact: xr.DataArray, references: Sequence[Reference] = ()) -> LinePanel:
    """Exact match by loop, the control under every curve of dynamics."""
    line = Series.of("exact match", exact, colour="green")
    return LinePanel([line], "exact match", y_range=(0, 1.03), references=references)


def with_exact(table: pd.DataFrame, exact: xr.DataArray) -> pd.DataFrame:
    """A table by loop, with exact match beside it."""
    return table.assign(exact_match=table["loop"].map(value_of(exact).to_series()))


def answer_figure(title: str, caption: str, tokens: xr.DataArray) -> Figure:
    """Bars of tokens of each class, by whether their answer is right at the end.

    Args:
        tokens: Counts with an axis ``answer`` (right, wrong, not asked) and one more.
    """
    shades = {"right": "green", "wrong": "red", "not asked": "grey"}
    bars = [
        Series.of(f"{name} at the end", tokens.sel(answer=name), colour=shade)
        for name, shade in shades.items()
        if name != "not asked" or tokens.sel(answer=name).any()
    ]
    return Figure(
        title=title,
        plot=bars_with_intervals(bars, value_title="tokens"),
        caption=caption,
        control="Bars are split by accuracy: whether the answer at that token is right at the end.",
        data=tidy({"tokens": tokens}),
    )


def dies_out(largest_radius: float) -> str:
    """What a spectral radius says of small disturbances."""
    if largest_radius < 1:
        return "below 1, so a small disturbance dies out there"
    return "at 1 or more in some, so not every small disturbance dies out there"


@findings_of.register
@with_rounding
def _(result: ConvergenceResult) -> list[Finding]:
    """Whether the tokens settle and are right there, what they become, and about the limits."""
    findings = [_settling(result)]
    counts = result.regime_counts()
    common = max(counts, key=counts.__getitem__)
    if common != Regime.FIXED_POINT.label:
        text = (
            "The commonest late trajectory is not a fixed point: "
            f"{percent(counts[common] / sum(counts.values()))} of the tokens are of class "
            f"{common!r}."
        )
        findings.append(Finding(text, value=common))
    return [*findings, _limits(result)]


def _settling(result: ConvergenceResult) -> Finding:
    settled, below = result.settled_share(), result.below_threshold()
    times = _gaps(result.settling_times()).where(result.data["counted"])
    residual, exact = result.mean_residual()[-1], value_of(result.exact_match()[-1])
    when = f", half of them by loop {int(times.median())}" if settled else ""
    moved = "the states leave the finite numbers"
    if np.isfinite(residual):
        moved = f"the last loop moves the state by {float(residual):.2g} of its size"
    right = f"{percent(exact)} of the answers are right there"
    if not (result.data["right"] >= 0).any():
        right = "the readout gives one number, so no answer is right or wrong"
    share = float(below.notnull().sum() / result.data["counted"].sum())
    if share == settled:
        text = (
            f"{percent(settled)} of the tokens settle within {result.n_loops} loops{when} (of "
            "class fixed point, and from there on each loop moves them by less than "
            f"{result.threshold:g} of their size); {moved}, and {right}."
        )
    else:  # the two numbers that settling rests on disagree: say both
        text = (
            f"From loop {int(below.median())} on (median), each loop moves {percent(share)} of the "
            f"tokens by less than {result.threshold:g} of their size. To settle, a trajectory must "
            f"be of class fixed point too: {percent(settled)} settle. {moved[0].upper()}"
            f"{moved[1:]}, and {right}."
        )
    has_limits = bool(result.data["limit_status"].isin([Status.CONVERGED, Status.CYCLE]).any())
    return Finding(text, value=f"{percent(settled)} settle", good=has_limits and settled >= 0.99)


def _limits(result: ConvergenceResult) -> Finding:
    """How many limits were found, and what a small disturbance does there."""
    if not result.one_map:
        text = (
            "The step takes the loop's index, so each loop is another map. A limit is that of one "
            "map, and none was sought."
        )
        return Finding(text, value="a map for each loop")
    converged = result.data["limit_status"] == Status.CONVERGED
    n_found, n_examples = int(converged.sum()), converged.size
    n_cycles = int((result.data["limit_status"] == Status.CYCLE).sum())
    unasked = not result.data["counted"].all("pos").any()
    if n_cycles == n_examples and unasked and result.settled_share() == 1:
        text = (
            f"All {n_examples} examples end on a cycle of positions at which no answer is asked "
            "for: all others rest."
        )
        return Finding(text, value="rest where asked")
    if n_cycles and not n_found:
        text = (
            f"{n_cycles} of the {n_examples} examples end on a cycle and none at a fixed point: "
            "they come back to the same states again and again, and do not rest."
        )
        return Finding(text, value=f"{n_cycles} of {n_examples} on cycles", good=False)
    if not n_found:
        text = (
            f"No limit was found for any of the {n_examples} examples, so it cannot be said "
            "whether the loop has one, or whether it would be stable."
        )
        if (coarse := result.provenance.config.get("state_dtype")) is not None:
            text += f" Rounding of {coarse} states may be what keeps the search from ending."
            return Finding(text, value=f"not resolved in {coarse}")
        return Finding(text, value="no limit found", good=False)
    text = f"A limit was found for {n_found} of {n_examples} examples"
    if n_cycles:
        text += f", and {n_cycles} more end on a cycle"
    radius, residual = result.data["spectral_radius"], result.data["spectral_residual"]
    # Against the bound of 1, what counts is the residual itself, not its share of a small radius.
    radius = radius.where(residual * radius <= RITZ_TOLERANCE).dropna("batch")
    if not radius.size:
        text += ". Whether they are stable cannot be said, because no spectral radius is known."
        return Finding(text, value=f"{n_found} of {n_examples} limits")
    low, high = float(radius.min()), float(radius.max())
    text += (
        f"; at the {radius.size} of them where it is known, the spectral radius of the loop's "
        f"Jacobian is {low:.2f} to {high:.2f}: {dies_out(high)}."
    )
    return Finding(text, value=f"{high:.2f}", good=high < 1 and n_found == n_examples)


@figures_of.register
def _(result: ConvergenceResult) -> list[Figure]:
    """All figures of a convergence study, in the order in which they are read."""
    residuals, rates, readout = _by_loop(result)
    final, regimes = result.data["right"].isel(loop=-1, drop=True), result.of_counted("regime")
    answers = {"right": 1, "wrong": 0, "not asked": -1}
    cells = [
        [((final == code) & (regimes == regime)).sum().item() for regime in Regime]
        for code in answers.values()
    ]
    tokens = xr.DataArray(cells, {"answer": [*answers], "regime": [r.label for r in Regime]})
    classes = (
        "Late trajectories: at rest (fixed point), returning to themselves (orbit), moving on in "
        "one direction (drift), growing without bound (divergence), or none of these."
    )
    periods = result.data["period"].where(regimes == Regime.ORBIT)
    if periods.notnull().any():
        classes += f" The median orbit takes {float(periods.median()):.3g} loops."
    becoming = answer_figure("What the trajectories become", classes, tokens)
    measured = result.data[["spectral_radius", "spectral_residual", "asymptotic_rate"]]
    table = measured.assign(exact_match=(final != 0).all("pos")).to_dataframe()
    table = table.dropna(subset="spectral_radius").rename_axis("example").reset_index()
    if table.empty:
        return [residuals, *_by_position(result), becoming, rates, readout]
    right = table["exact_match"].map({True: "right", False: "wrong"})
    names = table["example"].astype(str) + " (" + right + ")"
    bars = [
        Series("spectral radius", names, table["spectral_radius"]),
        Series("observed rate", names, table["asymptotic_rate"], control=True),
    ]
    bound = [Reference(1.0, "stable below 1")]
    stability = Figure(
        title="Local stability",
        plot=bars_with_intervals(bars, value_title="factor per loop", references=bound),
        caption=(
            "Spectral radius of the loop's Jacobian at each limit, and whether the answer there is "
            "right. Below 1, a small disturbance dies out by that factor a loop in the long run."
        ),
        control=(
            "The observed rate is how fast updates of the run shrink in its last loops: the two "
            "agree where the run has come near its limit."
        ),
        data=table,
    )
    return [residuals, *_by_position(result), becoming, stability, rates, readout]


def _by_loop(result: ConvergenceResult) -> tuple[Figure, Figure, Figure]:
    """Residuals; rates and angles; the readout: each above exact match."""
    exact = result.exact_match()
    token = _positive(band_of(result.of_counted("residual"), "batch", "pos"))
    mean = _positive(result.mean_residual())
    lines = [Series.of("median token", token[1:]), Series.of("mean", mean[1:], colour="ochre")]
    settled = [Reference(result.threshold, "settled")]
    residual = LinePanel(lines, "relative residual", y_log=True, references=settled)
    bands = {n: band_of(result.of_counted(n), "batch", "pos") for n in ("contraction", "cosine")}
    factor = Series.of("contraction", bands["contraction"][2:], colour="blue")
    cosine = Series.of("update cosine", bands["cosine"][2:], colour="magenta")
    rates = [
        LinePanel([factor], "factor per loop", references=[Reference(1.0, "no contraction")]),
        LinePanel([cosine], "cosine", references=[Reference(0.0, "")]),
    ]
    means = {name: result.data[name].mean("batch") for name in ("kl", "entropy", "margin")}
    means["kl"] = _positive(means["kl"])
    readout = [
        LinePanel([Series.of("KL to the loop before", means["kl"][1:])], "KL (nats)", y_log=True),
        LinePanel([Series.of("entropy", means["entropy"], colour="magenta")], "entropy (nats)"),
        LinePanel([Series.of("margin", means["margin"], colour="ochre")], "margin (logits)"),
    ]
    return (
        Figure(
            title="Residual by loop",
            plot=_above_accuracy(result, residual),
            caption=(
                "Above: how far a loop moves a token's state, over its norm (band: 80% of the "
                "tokens). Below: the share of answers that are right if read at that loop (95% "
                "interval)."
            ),
            control="Exact match over the same loops: a state can settle on wrong answers.",
            data=tidy({"exact_match": exact, "residual_mean": mean, "residual_median": token}),
        ),
        Figure(
            title="Rate and direction of the approach",
            plot=_above_accuracy(result, *rates),
            caption=(
                "Above: the norm of an update over that of the one before. Middle: the cosine of "
                "the two: near 1 a straight path, around 0.5 a spiral, negative an overshoot "
                "(bands: 80% of the tokens). Lines end where updates are at rounding error."
            ),
            control="Exact match over the same loops is drawn below.",
            data=tidy({"exact_match": exact, **bands}),
        ),
        Figure(
            title="When the answer stops changing",
            plot=_above_accuracy(result, *readout),
            caption=(
                "From above: how much a loop changes the readout, how undecided it is, and by how "
                "much the first answer leads the second (means over answered positions)."
            ),
            control="Exact match below: an answer can be stable and certain, and still wrong.",
            data=tidy({"exact_match": exact, **means}),
        ),
    )


def _by_position(result: ConvergenceResult) -> tuple[Figure, Figure]:
    """Distance to the limit and settling time, with the loop from which answers are right."""
    shown = _shown(result)
    times, right = shown.settling_times(), shown.right_from()
    # The example that settles last; one that never does comes first.
    slowest = int(times.where(shown.data["counted"], 0).max("pos").argmax("batch"))
    far = shown.data["distance"].where(shown.data["counted"], 0)
    cells = {
        "median of the examples": (_median(shown.of_counted("distance")), _median(right)),
        f"slowest example ({slowest})": (far.isel(batch=slowest), right.isel(batch=slowest)),
    }
    panels, overlay, tables = {}, {}, []
    style = {"colour": "red", "markers": False}
    for title, (distance, correct) in cells.items():
        panels[title] = np.log10(_positive(distance))
        overlay[title] = Series.of("answer right from", _gaps(correct), **style)
        values = {"distance": distance, "answer_right_from": correct.broadcast_like(distance)}
        tables.append(tidy(values).assign(of=title))
    unsettled = result.data["limit_status"] != Status.CONVERGED
    note = f" In {int(unsettled.sum())} of {unsettled.size} examples no limit was found; their "
    note += "distance is to the last state reached."
    distances = Figure(
        title="Distance to the " + ("last state reached" if unsettled.all() else "limit"),
        plot=heatmap_panels(panels, y_title="loops", value_title="log10 distance", overlay=overlay),
        caption=(
            "Distance of a position's state from its limit, over the limit's norm (dark: near). A "
            "slanted edge is a front that passes through the sequence; at a flat one all positions "
            f"settle at once.{note if unsettled.any() else ''}"
        ),
        control="Line: the loop from which the answer is right to the end (a gap where never).",
        data=pd.concat(tables, ignore_index=True),
    )
    final = shown.data["right"].isel(loop=-1, drop=True)
    n_asked = (final >= 0).sum("batch")
    lines = {
        "settled": _gaps(band_of(times.where(shown.data["counted"]), "batch")),
        "answer_right_from": _gaps(_median(right)),
        "accuracy": (final == 1).sum("batch") / n_asked.where(n_asked > 0),
    }
    settled = Series.of("settled (median)", lines["settled"], markers=False)
    correct = Series.of("answer right from", lines["answer_right_from"], **style)
    share = Series.of("accuracy", lines["accuracy"], colour="green", markers=False)
    accuracy = LinePanel([share], "accuracy", y_range=(0, 1.03))
    settling = Figure(
        title="Settling time by position",
        plot=line_panels([LinePanel([settled, correct], "loops"), accuracy], x_title="position"),
        caption=(
            f"The loop from which a position's residual stays under {result.threshold:g} (band: "
            "80% of the examples; a gap where most never settle). A slope of one is a front that "
            "moves one position a loop."
        ),
        control=(
            "The loop from which the answer is right to the end; below, the share of right answers "
            "after the last loop."
        ),
        data=tidy(lines),
    )
    return distances, settling


def _shown(result: ConvergenceResult) -> ConvergenceResult:
    """The result at the positions that count in some example, by their number in the sequence."""
    numbered = result.data.assign_coords(pos=np.arange(result.data.sizes["pos"]))
    return dataclasses.replace(result, data=numbered.isel(pos=numbered["counted"].any("batch")))


def _above_accuracy(result: ConvergenceResult, *panels: LinePanel) -> go.Figure:
    """Panels above exact match by loop, with T(n) marked where it is one for all examples."""
    answers = np.unique(result.data["answer_loops"])
    shown = [t for t in answers.tolist() if t <= result.n_loops]
    marks = [Reference(t, result.answered_after, "x") for t in shown]
    exact = exact_panel(result.exact_match(), marks if len(marks) == 1 else ())
    return line_panels([*panels, exact], x_title="loops")


def _median(values: xr.DataArray) -> xr.DataArray:
    return value_of(band_of(values, "batch"))


def _positive(values: xr.DataArray) -> xr.DataArray:
    """Values for a logarithmic axis: zero and infinity, which have no place on it, become NaN."""
    return _gaps(values.where(values > 0))


def _gaps(values: xr.DataArray) -> xr.DataArray:
    """Infinity (never) as a gap in the line."""
    return values.where(abs(values) < np.inf)
