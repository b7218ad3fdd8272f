"""Findings and figures of the scores of tools on known-circuit models."""

from __future__ import annotations

import dataclasses

import numpy as np
import pandas as pd
import xarray as xr

from loopinterp.benchmark.ground_truth import CHECK_OF, RARE, FalseNames, GroundTruth
from loopinterp.core.intervals import ENDS, ESTIMATE
from loopinterp.core.results import Figure, Finding, figures_of, findings_of
from loopinterp.core.text import percent
from loopinterp.figures import Series, bars_with_intervals


@findings_of.register
def _(result: GroundTruth) -> list[Finding]:
    """How many checks are passed, and the first that is not."""
    passed = result.passed
    right, n_checks = int(passed.sum()), int(passed.count())
    if not n_checks:
        return [Finding("No check applies to these known-circuit models.")]
    text = f"On models with known circuits, the tools pass {right} of {n_checks} checks."
    if result.missed:
        model, check, value, _ = result.missed[0]
        text += f" The first that fails is “{check}” on {model} ({value:.3g})."
    return [Finding(text, value=f"{right} of {n_checks}", good=right == n_checks)]


@figures_of.register
def _(result: GroundTruth) -> list[Figure]:
    """Each check beside its control, and the counts of each tool; none if no check applies."""
    # Mean, least and largest of each check over the models that it applies to.
    scores = result.data.dropna("check", how="all", subset=["value"])
    if not scores.sizes["check"]:
        return []
    checks = pd.DataFrame([dataclasses.asdict(CHECK_OF[key]) for key in scores["check"].values])
    value = scores["value"]
    checks = checks.rename(columns={"key": "check"}).assign(
        models=value.count("model").values,
        passed=result.passed.sel(check=scores["check"]).sum("model").astype(int).values,
        # The score furthest from right; a check has one limit.
        worst=np.where(checks["at_least"].isna(), value.max("model"), value.min("model")),
        **{"mean control": scores["control"].mean("model").values},
    )
    # Counts of heads have no common scale with shares.
    shares = scores.drop_sel(check=[key for key in ("no other head",) if key in scores["check"]])
    series = []
    for array, name in {"value": "the tool", "control": "its control"}.items():
        x = shares[array]
        ends: list[xr.DataArray] = [x.mean("model"), x.min("model"), x.max("model")]
        estimate = xr.concat(ends, xr.Variable(ESTIMATE, list(ENDS)))
        series.append(Series.of(name, estimate, control=array == "control"))
    plot = bars_with_intervals(
        series, value_title="score: mean, least and largest over models", value_range=(0, 1.02)
    )
    return [
        Figure(
            title="Scores of the tools on models with known circuits",
            plot=plot,
            caption=(
                "A tool should score 0 where nothing is to be found (probes without the "
                "variable's directions, wrong interchanges, heads outside the circuit, spectral "
                "radius) and 1 elsewhere. The data give each check's question and control."
            ),
            control=(
                "Each check has its own control, such as a random change of equal norm or a probe "
                "of the injected input. A check is informative where its control is far from the "
                "tool's score."
            ),
            code=_counts(result, checks),
            data=checks,
        )
    ]


def _counts(result: GroundTruth, checks: pd.DataFrame) -> str:
    rows = []
    for tool, of_tool in checks.groupby("tool", sort=False):
        counts = f"{of_tool['passed'].sum()} of {of_tool['models'].sum()} checks passed"
        rows.append((str(tool), counts))
    missed = [
        (f"missed: {check}", f"{value:.3g} (control {control:.3g}), {model}")
        for model, check, value, control in result.missed[:20]
    ]
    return "\n".join(f"{name:28}{text}" for name, text in [*rows, *missed])


@findings_of.register
def _(result: FalseNames) -> list[Finding]:
    """How often a program is identified that is not the model's; how often the model's own is."""
    counts = result.data.sum()
    # Older files have no ``rare``: such names count as wrong there.
    lists, wrong, rare = (int(counts.get(name, 0)) for name in ("lists", "wrong", "rare"))
    right, listed = int(counts["named"]), int(result.data["named"].count())
    text = f"In {wrong} of {lists} lists without the model's program, a wrong one is identified"
    if rare:
        text += f", and in {rare} one that at most {percent(RARE)} of interventions separate"
    if listed:
        text += f". Where it is listed, it is identified in {right} of {listed} models"
    good = not wrong and right == listed
    return [Finding(f"{text}.", value=f"{wrong} of {lists}", good=good)]
