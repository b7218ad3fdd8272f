"""What a study of input dependence says and shows."""

from __future__ import annotations

import numpy as np

from loopinterp.dynamics.input_dependence import InputDependenceResult
from loopinterp.dynamics.rounding import with_rounding
from loopinterp.intervals import ESTIMATE
from loopinterp.plotting import LinePanel, Series, heatmap_panels, line_panels
from loopinterp.results import Figure, Finding, figures_of, findings_of, percent, tidy

SECTION = "limits"

VISIBLE = 0.01
"""Relative change of a limit that counts as one."""


@findings_of.register
@with_rounding
def _(result: InputDependenceResult) -> list[Finding]:
    """What share of the spread is the input's, and how far a token is felt."""
    n_found = int((result.data["period"] > 0).sum())
    share, spread = result.share_of_input(), result.spread()
    if spread <= VISIBLE:
        text = (
            f"All inputs lead from all starts to limits that differ by {spread:.1g} of their size: "
            "the limit does not know the input."
        )
        return [Finding(text, value="one limit for all", good=False)]
    if share.isnull().any():
        text = (
            f"A limit was found from the model's own start for {n_found} of "
            f"{result.data.sizes['batch']} inputs, and for none from every start, so it cannot be "
            "said whether limits know the input."
        )
        return [Finding(text, value="not known", good=False)]
    value, low, high = (float(share.sel({ESTIMATE: end})) for end in share[ESTIMATE].values)
    text = (
        f"{percent(value)} of the spread of limits is the input's (95% interval {percent(low)} to "
        f"{percent(high)}), the rest comes from where the run starts."
    )
    findings = [Finding(text, value=percent(value), good=low >= 0.9)]
    effect = result.by_distance("effect")
    felt = effect["distance"].values[effect.values > VISIBLE]
    if len(felt):
        changes = result.by_distance("answer_changes")
        first = changes.sel(distance=int(changes["distance"][int(changes.argmax("distance"))]))
        text = (
            f"Another token moves limits (by {VISIBLE:.0%} or more in the mean) up to "
            f"{max(felt.max(), 0)} positions to its right and {max(-felt.min(), 0)} to its left; "
            f"it changes the most answers, {percent(first)}, at distance "
            f"{int(first['distance'])}."
        )
        findings.append(Finding(text, value=f"felt {int(np.abs(felt).max())} positions away"))
    return findings


@figures_of.register
def _(result: InputDependenceResult) -> list[Figure]:
    """How far a token is felt, and who feels whom."""
    if not result.data["effect"].notnull().any():
        return []  # no limits, or no tokens changed
    return [distance_figure(result), token_figure(result)]


def distance_figure(result: InputDependenceResult) -> Figure:
    """Effect of a token by distance: on limits, on answers, and by derivative."""
    lines = {name: result.by_distance(name) for name in ("effect", "answer_changes")}
    panels = [
        LinePanel([Series.of("limit moves", lines["effect"])], "relative change"),
        LinePanel(
            [Series.of("answer changes", lines["answer_changes"], colour="red")],
            "share of answers",
            y_range=(0, 1.03),
        ),
    ]
    return Figure(
        title="How far is a token felt?",
        plot=line_panels(panels, x_title="positions to the right of the changed token"),
        caption=(
            "One token becomes that of another input, and the model runs to its new limit. Above: "
            "how far the limits of other positions move, over their norm, in the mean; below: the "
            "share of answers that change."
        ),
        control=(
            "Left of 0 stand positions before the changed token: a model that sees no later "
            "positions shows nothing there."
        ),
        data=tidy(lines),
    )


def token_figure(result: InputDependenceResult) -> Figure:
    """Which position's limit depends on which token, by experiment and by derivative."""
    counted = result.data["counted"]
    mean = {
        "token changed": result.data["effect"].where(counted).mean("batch"),
        "derivative": result.data["sensitivity"].where(counted).mean("batch"),
    }
    panels = {
        title: np.log10(values.where(values > 1e-6).rename(source="token at"))
        for title, values in mean.items()
        if values.notnull().any()
    }
    return Figure(
        title="Which limit depends on which token?",
        plot=heatmap_panels(panels, y_title="token at", value_title="log10 change"),
        caption=(
            "Each cell is how much the limit of a position (across) changes with the token at "
            "another one (down), relative to its norm: by putting in another token, and by the "
            "derivative of the limit with respect to the injected input (implicit function "
            "theorem), in the mean over examples."
        ),
        control=(
            "The two are measured apart: where the derivative shows nothing and the other token "
            "does, the input enters by the start, or the change is too large to be linear."
        ),
        data=tidy(mean),
    )
