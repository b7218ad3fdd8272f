"""Figures of tools on models whose circuit is known."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from loopinterp.ground_truth.checks import BY_KEY, SECTION
from loopinterp.plotting import HeatPanel, Series, bars_with_intervals, heatmap_panels
from loopinterp.results import Figure

if TYPE_CHECKING:
    import pandas as pd

    from loopinterp.ground_truth.result import GroundTruth


ROW = 19
"""Pixels of a row of the table: enough for its name."""


def ground_truth_figures(result: GroundTruth) -> list[Figure]:
    """The table of all scores, and each check beside its control."""
    return [_table(result), _controls(result)]


def rightness(result: GroundTruth) -> np.ndarray:
    """Scores turned so that 1 is right for every check: those with an upper limit count down."""
    columns = [
        1 - result.value[:, k] if BY_KEY[key].highest else result.value[:, k]
        for k, key in enumerate(result.checks)
    ]
    return np.clip(np.stack(columns, 1), 0, 1)


def _table(result: GroundTruth) -> Figure:
    asked = [k for k, key in enumerate(result.checks) if not np.isnan(result.value[:, k]).all()]
    names = [result.checks[k] for k in asked]
    plot = heatmap_panels(
        [HeatPanel(rightness(result)[:, asked])],
        x=names,
        y=result.models,
        x_title="",
        y_title="",
        value_title="right answers",
        scale="mass",
        value_range=(0, 1),
        y_down=True,
    )
    plot.update_xaxes(tickangle=-60)
    shown = np.where(np.isnan(result.value), "", np.char.mod("%.3g", result.value))[:, asked]
    plot.data[0].update(
        customdata=shown, hovertemplate="%{y}<br>%{x}: %{customdata}<extra></extra>"
    )
    meta = dict(plot.layout.meta["loopinterp"])
    meta["panel_height"] = max(meta["panel_height"], ROW * len(result.models))
    plot.update_layout(height=meta["panel_height"] + 200, meta={"loopinterp": meta})
    missed = [f"{check} on {model}" for model, check, _, _ in result.missed]
    return Figure(
        title="Every tool on every model whose circuit is known",
        plot=plot,
        caption=(
            "Each row is a program compiled into the weights of a looped transformer, and what was "
            "done to hide it. Each column asks a tool a question whose answer is known (the data "
            "of the next figure say which). Dark is right; empty cells are questions that a model "
            f"cannot be asked. Missed: {', '.join(missed) or 'none'}."
        ),
        data=result.table().reset_index(names="model"),
        section=SECTION,
    )


def _controls(result: GroundTruth) -> Figure:
    # Counts of heads have no common scale with shares.
    asked = [
        k
        for k, key in enumerate(result.checks)
        if not np.isnan(result.value[:, k]).all() and key != "no other head"
    ]
    names = [result.checks[k] for k in asked]
    plot = bars_with_intervals(
        [
            _spread("the tool", names, result.value[:, asked]),
            _spread("its control", names, result.control[:, asked]),
        ],
        value_title="score: mean, least and largest over all models",
        value_range=(0, 1.02),
    )
    return Figure(
        title="What each tool says, beside its control",
        plot=plot,
        caption=(
            "Scores over all models. What should not be there (a probe that finds something else, "
            "wrong swaps, heads outside the circuit, a spectral radius) should be at 0, all else "
            "at 1. The data say what each check asks, and what its control is."
        ),
        control=(
            "Swaps: nothing, wrong or random directions. Probes: the injected input, or the "
            "variable's directions left in place. Heads: even attention. Patches: the prediction "
            "for the loop before, and the heads of the circuit. Dynamics: the most common loop."
        ),
        data=_questions(result, asked),
        section=SECTION,
    )


def _questions(result: GroundTruth, asked: list[int]) -> pd.DataFrame:
    """What the checks are, with the score over all models that is furthest from right."""
    import pandas as pd

    rows = []
    for k in asked:
        check = BY_KEY[result.checks[k]]
        worst = np.nanmax if check.highest else np.nanmin
        rows.append(
            {
                "check": check.key,
                "tool": check.tool,
                "question": check.question,
                "control": check.control,
                "limit": check.limit,
                "upper": check.highest,
                "worst": float(worst(result.value[:, k])),
                "mean control": float(np.nanmean(result.control[:, k])),
            }
        )
    return pd.DataFrame(rows)


def _spread(name: str, checks: list[str], values: np.ndarray) -> Series:
    """Mean, least and largest score of each check; NaN where there is none."""
    some = ~np.isnan(values).all(0)
    ends = [
        np.where(some, of(np.where(some, values, 0.0), axis=0), np.nan)
        for of in (np.nanmean, np.nanmin, np.nanmax)
    ]
    return Series(name, checks, ends[0], low=ends[1], high=ends[2], control=name != "the tool")
