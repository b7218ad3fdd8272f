"""Findings and figures of interchanges of single variables, the controls beside them."""

from __future__ import annotations

from typing import Any

import numpy as np

from loopinterp.comparison.counts import END
from loopinterp.comparison.rule import THRESHOLD
from loopinterp.comparison.variable_interchange import (
    INTERVENTIONS,
    NOTHING,
    SAME_VALUE,
    VARIABLE,
    VariableInterchange,
)
from loopinterp.comparison.words import in_loops, plain
from loopinterp.core.results import Figure, Finding, figures_of, findings_of
from loopinterp.core.text import percent
from loopinterp.figures import heatmap_panels
from loopinterp.programs.program_offset import spell_loops


@findings_of.register
def _(result: VariableInterchange) -> list[Finding]:
    """Whether the variables are where they are said to be, against the controls."""
    share, low, high, n = result.pooled()
    name = plain(result.program)
    if not n:
        text = (
            f"Whether the model holds the variables of “{name}” where they are said to be cannot "
            "be said: no exchange of one of them changes an answer of the program."
        )
        return [Finding(text)]
    wrong = {x: result.pooled(x) for x in INTERVENTIONS if x not in (VARIABLE, SAME_VALUE)}
    wrong = {x: pooled for x, pooled in wrong.items() if pooled[3]}
    text = (
        f"Where a variable of “{name}” is taken from another input's run, the model's whole answer "
        f"is the program's, to the end of the run, after {percent(share)} of {n} exchanges (95% "
        f"interval {percent(low)}–{percent(high)}). Put in its place: "
        f"{', '.join(f'{x} {percent(pooled[0])}' for x, pooled in wrong.items())}."
    )
    good = low >= THRESHOLD and all(low > pooled[2] for pooled in wrong.values())
    unchanged, _, _, n_same = result.pooled(SAME_VALUE)
    if n_same:
        text += (
            f" A donor with the same value in another context leaves {percent(unchanged)} of "
            f"{n_same} runs as they are."
        )
        good = good and unchanged >= THRESHOLD
    findings = [Finding(text, value=percent(share), good=good)]
    if share < 1:
        # The variable, loop and delay at which the model does least of what the program says.
        least = result.iia.where(result.iia == result.iia.min(), drop=True)
        at = {axis: least[axis].values[0] for axis in ("variable", "loop", "delay")}
        when, n = _when(at["delay"]), int(result.data["pairs"].sel(intervention=VARIABLE, **at))
        text = (
            f"The model follows “{name}” least when “{plain(at['variable'])}” is exchanged after "
            f"{spell_loops(int(at['loop']))} and the answer read {when}: in "
            f"{percent(least.min())} of {n} exchanges. Without one it answers as the program there "
            f"in {percent(result.data['undisturbed'].sel(at))}."
        )
        findings.append(Finding(text, value=percent(least.min())))
    return findings


def _when(delay: str) -> str:
    return "at the end" if delay == END else in_loops(int(delay))


@figures_of.register
def _(result: VariableInterchange) -> list[Figure]:
    """A figure for the delays of most interest at which there are pairs."""
    pairs = result.data["pairs"].sel(intervention=VARIABLE)
    delays = [d for d in ("0", "1", END) if d in pairs.delay and pairs.sel(delay=d).any()]
    return [_variable_figure(result, delay) for delay in delays]


def _variable_figure(result: VariableInterchange, delay: str) -> Figure:
    at, when = result.data.sel(delay=delay), _when(delay)
    variables = [str(name) for name in at["variable"].values]
    shown = at.assign_coords(variable=[plain(name) for name in variables])
    agreement = shown["agreement"].sel(estimate="value")
    names = [x for x in INTERVENTIONS if at["pairs"].sel(intervention=x).any()]
    panels = {x: agreement.sel(intervention=x) for x in names}
    panels["agreement without an exchange"] = shown["undisturbed"]
    layout: dict[str, Any] = {"x_title": "loops before the exchange", "scale": "mass", "columns": 3}
    sizes = ", ".join(
        f"{plain(name)}: "
        + (f"{result.ranks[name]} directions" if name in result.ranks else "the whole state")
        for name in variables
    )
    chance = agreement.sel(intervention=NOTHING).values
    table = result.to_dataframe("agreement", "pairs")
    return Figure(
        title=f"Variables of {plain(result.program)} exchanged between inputs, read {when}",
        plot=heatmap_panels(panels, value_title="agreement", **layout),
        caption=(
            "A variable of the program is taken from another input's run, at one position and "
            "after so many loops, and so is the part of the model's state that is said to hold it "
            f"({sizes}). A cell says how often the model's whole answer, read {when}, is then the "
            "program's. Only pairs of inputs are used on which the exchange changes the program's "
            "answer; where there are none a cell is empty. Last panel: how often the model "
            "answers as the program does without an exchange."
        ),
        control=(
            "In the same runs, against the same answers: a change of equal norm in a random "
            "direction; the same directions of the state after another loop; those of another "
            f"variable; and nothing, which is chance (at most {percent(np.nanmax(chance))}). A "
            "donor with the same value in another context must leave the answer as it is."
        ),
        data=table.query("delay == @delay", local_dict={"delay": delay}),
    )
