"""Findings and figures of the scores of tools on known models."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from loopinterp.benchmark.ground_truth import CHECK_OF, GroundTruth
from loopinterp.core.intervals import ENDS, ESTIMATE
from loopinterp.core.results import Figure, Finding, figures_of, findings_of
from loopinterp.figures import Series, bars_with_intervals, heatmap_panels


@findings_of.register
def _(result: GroundTruth) -> list[Finding]:
    """How many checks are passed, and the first that is not."""
    passed = result.passed
    right, n_checks, n_models = int(passed.sum()), int(passed.count()), len(result.models)
    if not n_checks:
        return [Finding("The models whose circuit is known can be asked none of the checks.")]
    text = (
        f"On {n_models} model{'s' if n_models > 1 else ''} whose circuit is known, the tools give "
        f"the right answer in {right} of {n_checks} checks."
    )
    if result.missed:
        model, check, value, _ = result.missed[0]
        text += f" Not in: {check} on {model} ({value:.3g})"
        text += f", and {len(result.missed) - 1} more." if len(result.missed) > 1 else "."
    value = f"{right} of {n_checks}"
    return [Finding(text, value=value, good=right == n_checks)]


@figures_of.register
def _(result: GroundTruth) -> list[Figure]:
    """The table of all scores, and each check beside its control; none if nothing was asked."""
    # The checks that some model can be asked, [model, check].
    scores = result.data.dropna("check", how="all", subset=["value"])
    return [_table(result, scores), _controls(scores)] if scores.sizes["check"] else []


def _table(result: GroundTruth, scores: xr.Dataset) -> Figure:
    plot: Any = heatmap_panels(
        {"": _rightness(scores)}, x_title="", y_title="", value_title="right answers", scale="mass"
    )
    plot.update_xaxes(tickangle=-60)
    value = scores["value"].values  # [model, check]
    shown = np.where(np.isnan(value), "", np.char.mod("%.3g", value))
    plot.update_traces(customdata=shown, hovertemplate="%{y}<br>%{x}: %{customdata}<extra></extra>")
    missed = [f"{check} on {model}" for model, check, _, _ in result.missed]
    return Figure(
        title="Every tool on every model whose circuit is known",
        plot=plot,
        caption=(
            "Each row is a program compiled into the weights of a looped transformer, and what was "
            "done to hide it; each column asks a tool a question whose answer is known. Dark is "
            f"right; an empty cell cannot be asked. Missed: {', '.join(missed) or 'none'}."
        ),
        data=result.table().reset_index(),
    )


def _rightness(scores: xr.Dataset) -> xr.DataArray:
    """Scores turned so that 1 is right for every check: those with an upper limit count down."""
    value = scores["value"]
    least = np.array([CHECK_OF[key].at_least for key in scores["check"].values])
    return value.copy(data=np.where(np.isnan(least), 1 - value, value)).clip(0, 1)


def _controls(scores: xr.Dataset) -> Figure:
    """Mean, least and largest score of each check over all models, and of its control."""
    # Counts of heads have no common scale with shares.
    shares = scores.drop_sel(check=[key for key in ("no other head",) if key in scores["check"]])
    series = []
    for array, name in {"value": "the tool", "control": "its control"}.items():
        x = shares[array]
        ends: list[xr.DataArray] = [x.mean("model"), x.min("model"), x.max("model")]
        estimate = xr.concat(ends, xr.Variable(ESTIMATE, list(ENDS)))
        series.append(Series.of(name, estimate, control=array == "control"))
    # What the checks are, with the score over all models that is furthest from right.
    checks = [dataclasses.asdict(CHECK_OF[key]) for key in scores["check"].values]
    questions = pd.DataFrame(checks).rename(columns={"key": "check"})
    value = scores["value"]
    questions["models"] = value.count("model").values
    upper = questions["at_least"].isna()  # [check], those with an upper limit
    questions["worst"] = np.where(upper, value.max("model"), value.min("model"))
    questions["mean control"] = scores["control"].mean("model").values
    return Figure(
        title="What each tool says, beside its control",
        plot=bars_with_intervals(
            series,
            value_title="score: mean, least and largest over all models",
            value_range=(0, 1.02),
        ),
        caption=(
            "Scores over all models. What should not be there (a probe that finds something else, "
            "wrong exchanges, heads outside the circuit, a spectral radius) should be at 0, all "
            "else at 1. The data say what each check asks, and what its control is."
        ),
        control=(
            "Interchange: nothing, the wrong variable or loop, a random change of equal norm. "
            "Probes: the injected input, or the variable's directions left in place. Heads: even "
            "attention. Patches: the prediction for the loop before, and the heads of the "
            "circuit. Ablation: calling every part needed. Dynamics: the most common loop. "
            "Verdicts: the next program."
        ),
        data=questions,
    )
