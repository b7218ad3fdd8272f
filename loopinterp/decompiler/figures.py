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


_UNDECIDED = "none yet"
_MOST_CELLS, _LONG = 60, 160
_LABEL = "program read off"


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
    if not result.code:
        text = f"No program could be read off the model: {result.reason}."
        return [Finding(text, value="not decompiled", good=False, label=_LABEL)]
    size = f"{result.data.sizes['cell']} cells"
    value = (result.identified or size) if result.given else "not decompiled"
    findings = [Finding(_agreement(result), value=value, good=result.given, label=_LABEL)]
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
    n = result.data.sizes["cell"]
    size = f"{n} cells (a token and a value of it)"
    if TRAJECTORY not in result.data["what"].values:
        return f"What comes closest to a program has {size}; {result.reason}."
    worst = result.worst()
    share, low, _ = worst.values
    if np.isnan(share):  # no interchange changes an answer
        return f"What comes closest to a program has {size}; {result.reason}."
    natural = result.data["agreement"].sel(what=CLEAN, estimate="value")
    shares = (
        f"after exchanges that it was not made from it says {percent(share)} of whole trajectories "
        f"right (at least {percent(low)} to be sure) at the length where it says least, "
        f"{int(worst['n'])}, and undisturbed {percent(natural.min())} of whole answers at all loops"
    )
    if result.given:
        if result.claim.grade == EXACT and result.claim.transitions:
            return f"{_exactly(result, size)} In figures, {shares}."
        return f"A program of {size} was read off the model: {shares}. {_claimed(result.claim)}"
    return f"No program is given, as {result.reason}. What comes closest has {size}: {shares}."


def _exactly(result: Decompilation, size: str) -> str:
    """What is said of a model all of whose transitions were tried."""
    named = f"“{result.identified}”" if result.identified else "a program of its own"
    return (
        f"The model runs {named}, at any length: all {result.claim.transitions:,} transitions that "
        "a run can make were tried, from the start and from whatever states are put in. Its "
        f"smallest table has {size}."
    )


def _delays(result: Decompilation) -> str:
    slowest = max(most for *_, most, _ in result.responses)
    least = min(least for *_, least, _, _ in result.responses)
    where = [
        f"{before} → {after} at “{token}”"
        for token, before, after, _, most, _ in result.responses
        if most == slowest
    ]
    late = f"; {_loops(slowest, slowest)} it can take for {', '.join(where)}"
    return (
        "Once what comes from the left changes for good, the answer of a position at rest follows, "
        f"as the table has it, after {_loops(least, slowest)}{late if least < slowest else ''}. "
        "A program that holds nothing follows after 1 loop."
    )


def _loops(least: int, most: int) -> str:
    if least == most:
        return f"{least} loop{'s' * (least > 1)}"
    return f"{least} to {most} loops"


@figures_of.register
def _(result: Decompilation) -> list[Figure]:
    if not result.code:
        return []
    figures = [_evidence(result)] if result.data.sizes["what"] else []
    if 0 < result.data.sizes["cell"] <= _MOST_CELLS:
        figures.append(_table(result))
    if result.graph:
        figures.append(_circuit(result))
    return figures


def _circuit(result: Decompilation) -> Figure:
    title = "read off the model" if result.given else "that comes closest to the model"
    return Figure(
        title=f"The program {title}, as a circuit",
        plot=CircuitGraph.from_dict(result.graph),
        caption=(
            "The program above, compiled into a looped transformer: what its heads select, what "
            "its neurons compute, and which variables go around to the next loop. It is a circuit "
            "that does what the table says, not the model's own wiring."
        ),
        control=(
            f"How far the program is right is in the figure of its evidence: {_agreement(result)}"
        ),
    )


def _evidence(result: Decompilation) -> Figure:
    title = "read off the model" if result.given else "that comes closest to the model"
    learnt = f"learnt from exchanges on inputs of length {', '.join(map(str, result.read_at))}"
    if result.claim.transitions:
        learnt = f"read off all {result.claim.transitions:,} transitions that a run can make"
    return Figure(
        title=f"The program {title}, and how far it is right",
        plot=line_figure(
            Series.each(result.data["agreement"], "what"),
            x_title="length n",
            y_title="whole answers as the program says",
            y_range=(_floor(result), 1.01),
            references=[Reference(ENOUGH, "needed of whole trajectories")],
        ),
        caption=(
            f"The program was {learnt}. Here it is asked about inputs and exchanges of whole "
            "states that it was not made from: undisturbed, one and two loops after an exchange, "
            "at the end, at every loop (whole trajectory), where states of any loop were put in, "
            "rare ones as often as common ones (planted), and after two interchanges in one run. "
            "Only exchanges count that change an answer of the model or of the program."
        ),
        control=(
            "Exchanges that change nothing are left out, so that a program that says “as before” "
            "is right in none of them."
        ),
        data=result.to_dataframe("agreement"),
        code=_short(result.code),
    )


def _floor(result: Decompilation) -> float:
    """Where the axis begins: a tenth below what is shown."""
    lowest = float(np.nanmin([*result.data["agreement"].values.flatten(), ENOUGH]))
    return max(0.0, np.floor(10 * lowest - 1) / 10)


def _short(code: str) -> str:
    """Code without its longest tables, which the next figure shows."""
    lines = []
    for line in code.splitlines():
        name, brace, table = line.partition(": {")
        if brace and len(line) > _LONG:
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
            "One loop of the program as a table. A cell is a position with a token and one of that "
            "token's values; a left neighbour matters only by its message, whose number means "
            "nothing by itself. Colour: what the position answers after the loop. Empty: never "
            "side by side. The data has the values themselves."
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
    named = [_UNDECIDED if y == UNKNOWN else f"answer {int(y)}" for y in answers]
    shades = ["grey" if y == UNKNOWN else colours.pop(0) for y in answers]
    # Answers by their place among those that occur, as categories are numbered.
    numbers = after.copy(data=np.searchsorted(answers, after.values).astype(float))
    return category_maps({"": numbers.where(after.notnull())}, dict(zip(named, shades)), **titles)
