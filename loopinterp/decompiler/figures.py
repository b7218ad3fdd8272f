"""Figures and findings of a decompilation: the program as code, its evidence, its table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from loopinterp.core.results import Figure, Finding, figures_of, findings_of
from loopinterp.core.text import percent
from loopinterp.decompiler.decompilation_study import Decompilation
from loopinterp.decompiler.evidence import CLEAN, ENOUGH, EXACT, NEARLY, TRAJECTORY, Claim
from loopinterp.figures import (
    PALETTE,
    CircuitGraph,
    Reference,
    Series,
    category_maps,
    heatmap_panels,
    line_figure,
)
from loopinterp.programs.language import UNKNOWN

if TYPE_CHECKING:
    import plotly.graph_objects as go
    import xarray as xr


def _claimed(claim: Claim) -> str:
    """The claim beside a program that is given."""
    if claim.grade == EXACT:
        read, checked = (", ".join(map(str, each)) for each in (claim.read_at, claim.lengths))
        return (
            f"It was read at length {read}. At the lengths that were checked, {checked}, nothing "
            "that was tried differs from the model, states of other loops and second interchanges "
            "included."
        )
    if claim.grade == NEARLY:
        return (
            "It is close to what the model runs, not exactly that: of all interchanges, planted "
            f"states included, {percent(1 - claim.at_most)} or more go as it says at each length."
        )
    return "Its claim was not kept."


@findings_of.register
def _(result: Decompilation) -> list[Finding]:
    label, value = "program read off", "not decompiled"
    if not result.code:
        text = f"No program could be read off the model: {result.reason}."
        return [Finding(text, value=value, good=False, label=label)]
    if result.given:
        value = result.identified or f"{result.data.sizes['cell']} cells"
    findings = [Finding(_agreement(result), value=value, good=result.given, label=label)]
    if result.responses:
        findings.append(Finding(_delays(result)))
    if result.unexplained:
        left, cell, exits, _, otherwise = result.unexplained[0]
        text = (
            f"Most often, in {exits} of the runs that were held back, the model leaves the table "
            f"at “{cell}” beside “{left}”: there {percent(otherwise)} of the steps go otherwise."
        )
        findings.append(Finding(text))
    return findings


def _agreement(result: Decompilation) -> str:
    size = f"{result.data.sizes['cell']} cells (a token and a value of it)"
    judged = TRAJECTORY in result.data["what"].values
    worst = result.worst() if judged else None
    if worst is None or np.isnan(worst.values[0]):  # no interchange changes an answer
        return f"What comes closest to a program has {size}; {result.reason}."
    share, low, _ = worst.values
    clean = result.data["agreement"].sel(what=CLEAN, estimate="value")
    shares = (
        f"after interchanges that it was not made from it says {percent(share)} of whole "
        f"trajectories right (at least {percent(low)} to be sure) at the length where it says "
        f"least, {int(worst['n'])}, and in clean runs {percent(clean.min())} of whole answers at "
        "all loops"
    )
    if not result.given:
        return f"No program is given, as {result.reason}. What comes closest has {size}: {shares}."
    if result.claim.grade == EXACT and result.claim.transitions:
        named = f"“{result.identified}”" if result.identified else "a program of its own"
        return (
            f"The model runs {named}, at any length: all {result.claim.transitions:,} transitions "
            "that a run can make were tried, from the start and from whatever states are put in. "
            f"Its smallest table has {size}. In figures, {shares}."
        )
    return f"A program of {size} was read off the model: {shares}. {_claimed(result.claim)}"


def _delays(result: Decompilation) -> str:
    slowest = max(most for *_, most, _ in result.responses)
    least = min(least for *_, least, _, _ in result.responses)
    loops, late = f"{slowest} loop{'s' * (slowest > 1)}", ""
    where = [
        f"{before} → {after} at “{token}”"
        for token, before, after, _, most, _ in result.responses
        if most == slowest
    ]
    if least < slowest:
        late = f"; {loops} it can take for {', '.join(where)}"
        loops = f"{least} to {slowest} loops"
    return (
        "Once what comes from the left changes for good, the answer of a position at rest follows, "
        f"as the table has it, after {loops}{late}. A program that holds nothing follows after 1 "
        "loop."
    )


@figures_of.register
def _(result: Decompilation) -> list[Figure]:
    if not result.code:
        return []
    figures = [_evidence(result)] if result.data.sizes["what"] else []
    if 0 < result.data.sizes["cell"] <= 60:
        figures.append(_table(result))
    if result.graph:
        figures.append(_circuit(result))
    return figures


def _circuit(result: Decompilation) -> Figure:
    return Figure(
        title=f"{_title(result)}, as a circuit",
        plot=CircuitGraph.from_dict(result.graph),
        caption=(
            "The program above, compiled into a looped transformer: what heads select, what "
            "neurons compute, and which variables go on to the next loop. This is a circuit of the "
            "table, not the model's own wiring."
        ),
        control=(
            f"How far the program is right is in the figure of its evidence: {_agreement(result)}"
        ),
    )


def _evidence(result: Decompilation) -> Figure:
    agreement = result.data["agreement"]
    names = ["clean run" if what == CLEAN else what for what in agreement["what"].values]
    # The axis begins a tenth below the lowest interval, or below what is needed.
    lowest = float(np.nanmin([*agreement.values.flatten(), ENOUGH]))
    learnt = f"learnt from interchanges on inputs of length {', '.join(map(str, result.read_at))}"
    if result.claim.transitions:
        learnt = f"read off all {result.claim.transitions:,} transitions that a run can make"
    return Figure(
        title=f"{_title(result)}, and how far it is right",
        plot=line_figure(
            Series.each(agreement.assign_coords(what=names), "what"),
            x_title="length n",
            y_title="whole answers as the program says",
            y_range=(max(0.0, np.floor(10 * lowest - 1) / 10), 1.01),  # a tenth below the lowest
            references=[Reference(ENOUGH, "needed of whole trajectories")],
        ),
        caption=(
            f"The program was {learnt}. It is asked about other inputs and interchanges of whole "
            "states: in the clean run, one and two loops after an interchange, at the end, at all "
            "loops (whole trajectory), with states of any loop, rare ones as often as common ones "
            "(planted), and with two interchanges in one run. Only interchanges count that change "
            "an answer of the model or of the program."
        ),
        control=(
            "Interchanges that change nothing are left out, so that a program that says “as "
            "before” is right in none of them."
        ),
        data=result.to_dataframe("agreement"),
        code=_short(result.code),
    )


def _title(result: Decompilation) -> str:
    return f"The program {'read off' if result.given else 'that comes closest to'} the model"


def _short(code: str, *, longest: int = 160) -> str:
    """Code without its longest tables, which the next figure shows."""
    lines = []
    for line in code.splitlines():
        name, brace, table = line.partition(": {")
        if brace and len(line) > longest:
            line = f"{name}: a table of {table.count(':')} entries"
        lines.append(line)
    return "\n".join(lines)


def _table(result: Decompilation) -> Figure:
    data = result.data
    cells = [str(cell) for cell in data["cell"].values]
    answers = dict(zip(cells, data["answer"].values.astype(int)))
    becomes = data["becomes"]
    after = np.full(becomes.shape, np.nan)
    for row, column in zip(*np.nonzero(becomes.notnull().values)):
        # The answer of the cell that this one becomes.
        token = cells[row].rsplit(": ", 1)[0]
        after[row, column] = answers[f"{token}: {int(becomes.values[row, column])}"]
    return Figure(
        title="What each cell becomes, by the message from the left",
        plot=_coloured(becomes.copy(data=after)),
        caption=(
            "One loop of the program as a table. A cell is a token with one of its values; a left "
            "neighbour matters only by its message, whose number means nothing. Colour: the answer "
            "after the loop. Empty: never side by side. The data has the values."
        ),
        data=result.to_dataframe("becomes"),
    )


def _coloured(after: xr.DataArray) -> go.Figure:
    """Answers as categories, as far as there are colours for them."""
    answers = np.unique(after.values[~np.isnan(after.values)])
    colours = [name for name in PALETTE if name != "grey"]
    titles: dict[str, Any] = {"x_title": "message", "y_title": "token: value"}
    if len(answers) > len(colours):
        return heatmap_panels({"": after}, value_title="answer", **titles)
    named = {
        "none yet" if y == UNKNOWN else f"answer {int(y)}":
            "grey" if y == UNKNOWN else colours.pop(0)
        for y in answers
    }  # fmt: skip
    # Answers by their place among those that occur, as categories are numbered.
    numbers = after.copy(data=np.searchsorted(answers, after.values).astype(float))
    return category_maps({"": numbers.where(after.notnull())}, named, **titles)
