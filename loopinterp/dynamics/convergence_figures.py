"""Findings and figures of convergence, and parts shared by other figures."""

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
from loopinterp.dynamics.regimes import Regime
from loopinterp.dynamics.solvers import Status
from loopinterp.figures import (
    LinePanel,
    Reference,
    Series,
    bars_with_intervals,
    heatmap_panels,
    line_panels,
)
from loopinterp.models.iteration import rounding_of

_RIGHT: dict[str, Any] = {"colour": "red", "markers": False}
_OF_WEIGHTS = (
    "Small differences from the model before it was rounded come from the rounding of its weights."
)
NO_ANSWER = "The readout is one number, so no answer is right or wrong."


def with_rounding(findings: Callable[[Any], list[Finding]]) -> Callable[[Any], list[Finding]]:
    """Add what rounding hides, if the model computes in half precision."""

    @wraps(findings)
    def with_note(result: Any) -> list[Finding]:
        first, *others = findings(result)
        return [first, *float32_note(result), *others]

    return with_note


def float32_note(result: Any, decided: object = None, compared: str = "") -> list[Finding]:
    """How a half-precision run compares with float32; none for a run in float32.

    ``decided`` is what rounding decides (None: not compared); ``compared`` ends the sentence.
    """
    config = result.provenance.config
    if (name := config.get("state_dtype")) is None:
        return []
    if decided is not None:
        text = f"The run is in {name}. In float32 the same weights {compared}"
        return [Finding(text, value=f"{name}: {decided} decided by rounding")]
    share = f"{rounding_of(getattr(torch, name)):.2g}"
    if "computed_in" in config:
        text = (
            f"The model computes in {name}, where rounding hides movement below {share} of a "
            f"state's norm. This study ran the same weights in float32. {_OF_WEIGHTS}"
        )
        return [Finding(text, value=f"weights rounded to {name}, run in float32")]
    text = (
        f"The run is in {name}: rounding decides on movement below {share} of a state's norm. "
        "Smaller residuals, distances and rates are not resolved. Repeat the study with "
        "model.float()."
    )
    return [Finding(text, value=f"{name}: resolved to {share}")]


def value_of(estimate: xr.DataArray) -> xr.DataArray:
    return estimate.sel({ESTIMATE: "value"}, drop=True)


def span_of(values: xr.DataArray) -> str:
    # Plus 0.0, as rounding leaves a sign: -0.00.
    low, high = (f"{round(float(end), 2) + 0.0:.2f}" for end in (values.min(), values.max()))
    return low if low == high else f"{low} to {high}"


def exact_panel(exact: xr.DataArray, references: Sequence[Reference] = ()) -> LinePanel:
    """Exact match by loop: the control beneath every curve."""
    line = Series.of("exact match", exact, colour="green")
    return LinePanel([line], "exact match", y_range=(0, 1.03), references=references)


def with_exact(table: pd.DataFrame, exact: xr.DataArray) -> pd.DataFrame:
    return table.assign(exact_match=table["loop"].map(value_of(exact).to_series()))


def stability_of(largest_radius: float) -> str:
    if largest_radius < 1:
        return "below 1, so small perturbations decay"
    return "at least 1 somewhere, so not all small perturbations decay"


@findings_of.register
def _(result: ConvergenceResult) -> list[Finding]:
    settled, below = result.settled_share(), result.below_threshold()
    times = _gaps(result.settling_times()).where(result.data["counted"])
    when = f", half of them by loop {int(times.median())}" if settled else ""
    text = (
        f"{percent(settled)} of the tokens converge within {result.n_loops} loops (residual below "
        f"{result.threshold:g}, trajectory classified as a fixed point){when}."
    )
    share = float(below.notnull().sum() / result.data["counted"].sum())
    if share != settled:
        text += f" The residual alone is below {result.threshold:g} for {percent(share)}."
    if not np.isfinite(result.mean_residual()[-1]):
        text += " The states diverge to infinity."
    exact = percent(value_of(result.exact_match()[-1]))
    asked = (result.data["right"] >= 0).any()
    text += f" {exact} of the answers are right at the end." if asked else f" {NO_ANSWER}"
    ends = [Status.CONVERGED, Status.CYCLE, Status.CONVERGED_TO_ROUNDING]
    good = bool(result.data["limit_status"].isin(ends).any()) and settled >= 0.99
    decided = result.decided_by_rounding()
    if decided is None:  # a run in half precision that no run in float32 checks
        resolved = good or not float32_note(result)
    else:  # rounding decides for at most one token in a hundred
        resolved = float(decided.sum() / result.data["counted"].sum()) <= 0.01
    finding = Finding(text, value=f"{percent(settled)} converge", good=good if resolved else None)
    findings = [finding, *(_measured_rounding(result) or float32_note(result))]
    counts = result.regime_counts()
    common = max(counts, key=counts.__getitem__)
    if common not in (Regime.FIXED_POINT.label, Regime.CONVERGED_TO_ROUNDING.label):
        most = percent(counts[common] / sum(counts.values()))
        text = f"The most common class of late trajectories is {common!r} ({most} of the tokens)."
        if common == Regime.ORBIT.label:
            text += f" {_median_period(result)}"
        findings.append(Finding(text, value=common))
    return [*findings, _limits(result)]


def _measured_rounding(result: ConvergenceResult) -> list[Finding]:
    decided = result.decided_by_rounding()
    if decided is None:
        return []
    name = result.provenance.config["state_dtype"]
    rounding = result.of_counted("rounding")
    share = float(decided.sum() / result.data["counted"].sum())
    text = (
        f"The run is in {name}. Its rounding moves a state by up to {float(rounding.max()):.1g} of "
        "its norm in a loop (measured against float32, from the same states). Limits and spectral "
        f"radii are those of the same weights in float32. {_OF_WEIGHTS}"
    )
    if to_rounding := result.to_rounding_share():
        last = result.data["residual"].isel(loop=-1)
        moving = result.of_counted("regime") == Regime.CONVERGED_TO_ROUNDING
        text += (
            f" {percent(to_rounding)} of the tokens converge to rounding: they still move, by up "
            f"to {float(last.where(moving).max()):.1g} of their norm in the last loop, and "
            "converge in float32."
        )
    if share:
        text += (
            f" Rounding decides for {percent(share)} of the tokens: they converge in {name} alone, "
            "or in float32 alone."
        )
    return [Finding(text, value=f"{name}: {percent(share)} decided by rounding")]


def _limits(result: ConvergenceResult) -> Finding:
    if not result.one_map:
        text = "The step depends on the loop's index, so the model has no single limit to seek."
        return Finding(text, value="a map for each loop")
    converged = result.data["limit_status"] == Status.CONVERGED
    n_found, n_examples = int(converged.sum()), converged.size
    n_cycles = int((result.data["limit_status"] == Status.CYCLE).sum())
    unasked = not result.data["counted"].all("pos").any()
    if n_cycles == n_examples and unasked and result.settled_share() == 1:
        text = (
            f"All {n_examples} examples end on a limit cycle, at positions where no answer is "
            "asked for. All other positions converge."
        )
        return Finding(text, value="converge where asked")
    if n_cycles and not n_found:
        text = f"{n_cycles} of {n_examples} examples end on a limit cycle, none at a fixed point."
        return Finding(text, value=f"{n_cycles} of {n_examples} on cycles", good=False)
    if not n_found:
        text = f"No limit was found for any of {n_examples} examples; stability is not measured."
        config = result.provenance.config
        if "state_dtype" in config and "limits_in" not in config:
            status, coarse = result.data["limit_status"], config["state_dtype"]
            n_to_rounding = int((status == Status.CONVERGED_TO_ROUNDING).sum())
            text += (
                f" In {n_to_rounding} the search converges to rounding of {coarse}, which may keep "
                "the others from converging."
            )
            return Finding(text, value=f"not resolved in {coarse}")
        return Finding(text, value="no limit found", good=False)
    text = f"{n_found} of {n_examples} examples reach a fixed point"
    if n_cycles:
        text += f", and {n_cycles} more end on a limit cycle"
    radius = _known_radius(result)
    if not radius.size:
        text += ". No spectral radius is known, so stability is not measured."
        return Finding(text, value=f"{n_found} of {n_examples} limits")
    high = float(radius.max())
    text += (
        f". The spectral radius of the Jacobian there is {span_of(radius)} ({radius.size} "
        f"measured): {stability_of(high)}."
    )
    return Finding(text, value=f"{high:.2f}", good=high < 1 and n_found == n_examples)


def _known_radius(result: ConvergenceResult) -> xr.DataArray:
    radius, residual = result.data["spectral_radius"], result.data["spectral_residual"]
    # Against the bound of 1, what counts is the residual itself, not its share of a small radius.
    return radius.where(residual * radius <= RITZ_TOLERANCE).dropna("batch")


@figures_of.register
def _(result: ConvergenceResult) -> list[Figure]:
    # Positions that count in some example, by their number in the sequence.
    numbered = result.data.assign_coords(pos=np.arange(result.data.sizes["pos"]))
    counted = numbered.isel(pos=numbered["counted"].any("batch"))
    shown = dataclasses.replace(result, data=counted)
    figures = [_residuals(result), _distances(result, shown), _settling_times(shown)]
    if sum(count > 0 for count in result.regime_counts().values()) > 1:
        figures.append(_classes(result))
    bands = {n: band_of(result.of_counted(n), "batch", "pos") for n in ("contraction", "cosine")}
    factor = Series.of("contraction", bands["contraction"][2:], colour="blue")
    cosine = Series.of("update cosine", bands["cosine"][2:], colour="magenta")
    marks, radius = [Reference(1.0, "no contraction")], _known_radius(result)
    if radius.size:
        marks.append(Reference(float(radius.median()), "spectral radius (median)"))
    panels = [
        LinePanel([factor], "factor per loop", references=marks),
        LinePanel([cosine], "cosine", references=[Reference(0.0, "")]),
    ]
    rates = Figure(
        title="Rate and direction of the approach",
        plot=_above_accuracy(result, *panels),
        caption=(
            "Above: norm of an update relative to the update before; near a limit it approaches "
            "the spectral radius. Middle: cosine of the two updates (1 straight, 0.5 spiral, "
            "negative overshoot). Bands: 80% of the tokens. Lines end at rounding error."
        ),
        control="Exact match over the same loops is drawn below.",
        data=tidy({"exact_match": result.exact_match(), **bands}),
    )
    return [*figures, rates]


def _classes(result: ConvergenceResult) -> Figure:
    final, regimes = result.data["right"].isel(loop=-1, drop=True), result.of_counted("regime")
    shades = {"right": (1, "green"), "wrong": (0, "red"), "not asked": (-1, "grey")}
    kinds = [r for r in Regime if r < Regime.CONVERGED_TO_ROUNDING or (regimes == r).any()]
    cells = [
        [((final == code) & (regimes == regime)).sum().item() for regime in kinds]
        for code, _ in shades.values()
    ]
    tokens = xr.DataArray(cells, {"answer": [*shades], "regime": [r.label for r in kinds]})
    bars = [
        Series.of(f"{name} at the end", tokens.sel(answer=name), colour=shade)
        for name, (_, shade) in shades.items()
        if name != "not asked" or tokens.sel(answer=name).any()
    ]
    turn = f" {_median_period(result)}" if (regimes == Regime.ORBIT).any() else ""
    return Figure(
        title="Long-run behaviour of the trajectories",
        plot=bars_with_intervals(bars, value_title="tokens"),
        caption=(
            "Classes of late trajectories: fixed point, orbit (returns to itself), drift (moves on "
            "in one direction), divergence (grows without bound), irregular (none of these)." + turn
        ),
        control="Colours: whether the answer at that token is right after the last loop.",
        data=tidy({"tokens": tokens}),
    )


def _median_period(result: ConvergenceResult) -> str:
    periods = result.data["period"].where(result.of_counted("regime") == Regime.ORBIT)
    return f"The median orbit takes {float(periods.median()):.3g} loops."


def _residuals(result: ConvergenceResult) -> Figure:
    token = _positive(band_of(result.of_counted("residual"), "batch", "pos"))
    mean, kl = _positive(result.mean_residual()), _positive(result.data["kl"].mean("batch"))
    lines = [Series.of("median token", token[1:]), Series.of("mean", mean[1:], colour="ochre")]
    levels = [Reference(result.threshold, "threshold")]
    if "rounding" in result.data:
        levels.append(Reference(float(result.of_counted("rounding").median()), "rounding"))
    panels = [LinePanel(lines, "relative residual", y_log=True, references=levels)]
    readout_changes = bool(kl.notnull().any())  # not a readout of one number
    if readout_changes:
        change = Series.of("KL to the loop before", kl[1:], colour="magenta")
        panels.append(LinePanel([change], "KL (nats)", y_log=True))
    readout = {name: result.data[name].mean("batch") for name in ("kl", "entropy", "margin")}
    measures = {"residual_mean": mean, "residual_median": token, **readout}
    return Figure(
        title="Residual by loop",
        plot=_above_accuracy(result, *panels),
        caption=(
            "From above: norm of a token's update relative to its state's (band: 80% of the "
            f"tokens); {'change of the readout in a loop; ' * readout_changes}share of answers "
            "that are right if read at that loop (95% interval)."
        ),
        control="Exact match over the same loops: a state can converge to wrong answers.",
        data=tidy({"exact_match": result.exact_match(), **measures}),
    )


def _distances(result: ConvergenceResult, shown: ConvergenceResult) -> Figure:
    """Heat maps of the distance to the limit, and of the loop from which answers stay right."""
    times, right = shown.settling_times(), shown.right_from()
    # The example that converges last; one that never does comes first.
    slowest = int(times.where(shown.data["counted"], 0).max("pos").argmax("batch"))
    far = shown.data["distance"].where(shown.data["counted"], 0)
    cells = {
        "median of the examples": (_median(shown.of_counted("distance")), _median(right)),
        f"slowest example ({slowest})": (far.isel(batch=slowest), right.isel(batch=slowest)),
    }
    panels, overlay, tables = {}, {}, []
    for title, (distance, correct) in cells.items():
        panels[title] = np.log10(_positive(distance))
        overlay[title] = Series.of("answer right from", _gaps(correct), **_RIGHT)
        values = {"distance": distance, "answer_right_from": correct.broadcast_like(distance)}
        tables.append(tidy(values).assign(of=title))
    without = result.data["limit_status"] != Status.CONVERGED
    note = ""
    if without.any():
        note = f" {int(without.sum())} of {without.size} examples have no fixed point: their "
        note += "distance is to the last state."
    return Figure(
        title="Distance to the " + ("last state reached" if without.all() else "limit"),
        plot=heatmap_panels(panels, y_title="loops", value_title="log10 distance", overlay=overlay),
        caption=(
            "Distance of a position's state from its limit, relative to the limit's norm (dark: "
            f"near). A slanted edge is a front that passes through the sequence.{note}"
        ),
        control="Line: the loop from which the answer is right to the end (a gap where never).",
        data=pd.concat(tables, ignore_index=True),
    )


def _settling_times(shown: ConvergenceResult) -> Figure:
    final = shown.data["right"].isel(loop=-1, drop=True)
    n_asked = (final >= 0).sum("batch")
    times = shown.settling_times().where(shown.data["counted"])
    lines = {
        "settled": _gaps(band_of(times, "batch")),
        "answer_right_from": _gaps(_median(shown.right_from())),
        "accuracy": (final == 1).sum("batch") / n_asked.where(n_asked > 0),
    }
    settling = Series.of("settling time (median)", lines["settled"], markers=False)
    correct = Series.of("answer right from", lines["answer_right_from"], **_RIGHT)
    panels = [LinePanel([settling, correct], "loops")]
    control = "Red: the loop from which the answer is right to the end."
    if float(lines["accuracy"].min()) < 1:
        share = Series.of("accuracy", lines["accuracy"], colour="green", markers=False)
        panels.append(LinePanel([share], "accuracy", y_range=(0, 1.03)))
        control += " Below: share of right answers after the last loop."
    return Figure(
        title="Settling time by position",
        plot=line_panels(panels, x_title="position"),
        caption=(
            f"First loop from which a position's residual stays below {shown.threshold:g} (band: "
            "80% of the examples; a gap where most never converge). A slope of one is a front that "
            "moves one position per loop."
        ),
        control=control,
        data=tidy(lines),
    )


def _above_accuracy(result: ConvergenceResult, *panels: LinePanel) -> go.Figure:
    answers = np.unique(result.data["answer_loops"])
    shown = [t for t in answers.tolist() if t <= result.n_loops]
    marks = [Reference(t, result.answered_after, "x") for t in shown]
    exact = exact_panel(result.exact_match(), marks if len(marks) == 1 else ())
    return line_panels([*panels, exact], x_title="loops")


def _median(values: xr.DataArray) -> xr.DataArray:
    return value_of(band_of(values, "batch"))


def _positive(values: xr.DataArray) -> xr.DataArray:
    """Values for a logarithmic axis; zero and infinity become NaN."""
    return _gaps(values.where(values > 0))


def _gaps(values: xr.DataArray) -> xr.DataArray:
    return values.where(abs(values) < np.inf)
