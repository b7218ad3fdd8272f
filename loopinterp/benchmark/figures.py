"""Findings and figures of the scores of tools on known models, and of noise on their weights."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from loopinterp.benchmark.ground_truth import CHECK_OF, GroundTruth, Robustness
from loopinterp.core.intervals import ENDS, ESTIMATE
from loopinterp.core.results import Figure, Finding, figures_of, findings_of
from loopinterp.core.text import percent
from loopinterp.figures import Series, bars_with_intervals, heatmap_panels, line_figure


@findings_of.register
def _(result: GroundTruth) -> list[Finding]:
    """How many checks are passed, and the first that is not."""
    passed = result.passed
    right, asked = int(passed.sum()), int(passed.count())
    if not asked:
        return [Finding("The models whose circuit is known can be asked none of the checks.")]
    text = (
        f"On {len(result.models)} model{'s' if len(result.models) > 1 else ''} whose circuit is "
        f"known, the tools give the right answer "
        f"in {right} of {asked} checks."
    )
    if result.missed:
        model, check, value, _ = result.missed[0]
        text += f" Not in: {check} on {model} ({value:.3g})"
        text += f", and {len(result.missed) - 1} more." if len(result.missed) > 1 else "."
    value = f"{right} of {asked}"
    return [Finding(text, value=value, good=right == asked)]


@figures_of.register
def _(result: GroundTruth) -> list[Figure]:
    """The table of all scores, and each check beside its control; none if nothing was asked."""
    return [_table(result), _controls(result)] if result.passed.count() else []


def rightness(asked: xr.Dataset) -> xr.DataArray:
    """Scores turned so that 1 is right for every check: those with an upper limit count down."""
    value = asked["value"]
    upper = np.array([CHECK_OF[key].highest for key in asked["check"].values])
    return value.copy(data=np.where(upper, 1 - value, value)).clip(0, 1)


def _asked(result: GroundTruth) -> xr.Dataset:
    """The checks that some model can be asked."""
    return result.data.dropna("check", how="all", subset=["value"])


def _table(result: GroundTruth) -> Figure:
    asked = _asked(result)
    plot: Any = heatmap_panels(
        {"": rightness(asked)}, x_title="", y_title="", value_title="right answers", scale="mass"
    )
    plot.update_xaxes(tickangle=-60)
    value = asked["value"].values
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


def _controls(result: GroundTruth) -> Figure:
    asked = _asked(result)
    # Counts of heads have no common scale with shares.
    shares = asked.drop_sel(check=[key for key in ("no other head",) if key in asked["check"]])
    plot = bars_with_intervals(
        [
            _spread("the tool", shares["value"]),
            _spread("its control", shares["control"], control=True),
        ],
        value_title="score: mean, least and largest over all models",
        value_range=(0, 1.02),
    )
    return Figure(
        title="What each tool says, beside its control",
        plot=plot,
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
        data=_questions(asked),
    )


def _questions(asked: xr.Dataset) -> pd.DataFrame:
    """What the checks are, with the score over all models that is furthest from right."""
    table = pd.DataFrame([dataclasses.asdict(CHECK_OF[key]) for key in asked["check"].values])
    table = table.rename(columns={"key": "check", "highest": "upper"})
    scores = asked["value"]
    worst = np.where(table["upper"], scores.max("model"), scores.min("model"))
    table = table.assign(models=scores.count("model").values, worst=worst)
    return table.assign(**{"mean control": asked["control"].mean("model").values})


def _spread(name: str, scores: xr.DataArray, *, control: bool = False) -> Series:
    """Mean, least and largest score of each check; NaN where there is none."""
    ends: list[xr.DataArray] = [scores.mean("model"), scores.min("model"), scores.max("model")]
    estimate = xr.concat(ends, xr.Variable(ESTIMATE, list(ENDS)))
    return Series.of(name, estimate, control=control)


_SOLVED = 0.99
"""Models that answer so many examples right still work."""


@findings_of.register
def _(result: Robustness) -> list[Finding]:
    """The largest noise at which the models still work, and what the tools say there."""
    works = result.data.where(result.data["exact_match"] >= _SOLVED).dropna("noise", how="all")
    if not works.sizes["noise"]:
        text = "With the least noise that was tried the compiled models no longer work."
        return [Finding(text)]
    scores = works.sel(noise=works["noise"].max())["value"].dropna("check")
    text = (
        f"With noise of {percent(scores['noise'])} on every weight the compiled models "
        f"still work, and the tools score at least {float(scores.min()):.3g} "
        f"({scores['check'].values[scores.values.argmin()]})."
    )
    return [Finding(text)]


@figures_of.register
def _(result: Robustness) -> list[Figure]:
    """Scores against noise, beside what the models themselves can still do."""
    levels = result.data["noise"].values.tolist()
    right = Series.of("exact match of the model", result.data["exact_match"], control=True)
    plot = line_figure(
        [*Series.each(result.data["value"], "check"), right],
        x_title="noise on the weights, relative to their size",
        y_title="score",
        y_range=(0, 1.02),
    )
    plot.update_xaxes(type="log", tickvals=levels, ticktext=list(map(str, levels)))
    return [
        Figure(
            title="How much noise on the weights the tools stand",
            plot=plot,
            caption=(
                f"The models ({', '.join(result.programs)}) are rotated, and noise is put on every "
                "weight. Compiled values are restored in every layer, so that small noise changes "
                "nothing; what is found of a circuit must hold as long as the model works."
            ),
            control="The model's own exact match: beyond it there is no circuit to be found.",
            data=result.to_dataframe(),
        )
    ]
