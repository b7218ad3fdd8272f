"""Figures and findings of a decompilation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from loopinterp.comparison.words import with_interval
from loopinterp.core.results import Figure, Finding, figures_of, findings_of
from loopinterp.core.text import percent
from loopinterp.decompiler.decompilation_study import Decompilation
from loopinterp.decompiler.evidence import (
    CLEAN,
    END,
    ENOUGH,
    EXACT,
    INTERCHANGED,
    KINDS,
    TRAJECTORY,
)
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
from loopinterp.programs.program import spell_loops


@findings_of.register
def _(result: Decompilation) -> list[Finding]:
    label, value = "Recovered program", "not decompiled"
    if not result.code:
        text = f"No program could be recovered: {result.reason}."
        return [Finding(text, value=value, good=False, label=label)]
    if result.given:
        value = result.identified or f"{result.data.sizes['cell']} cells"
    agreement = "No interchange at equal loops changes an answer."
    worst = result.worst() if TRAJECTORY in result.data["what"].values else None
    if worst is not None and not np.isnan(worst.values[0]):
        clean = result.data["agreement"].sel(what=CLEAN, estimate="value")
        agreement = (
            f"It predicts {with_interval(worst.values)} of held-out whole trajectories after an "
            f"interchange (length {int(worst['n'])}, the worst) and {percent(clean.min())} of "
            "clean answers."
        )
    text = f"{_claimed(result)} {agreement}"
    findings = [Finding(text, value=value, good=result.given, label=label)]
    if result.responses:
        findings.append(Finding(_delays(result)))
    if result.unexplained:
        left, cell, exits, _, deviate = result.unexplained[0]
        text = (
            f"Held-out runs leave the table most often at “{cell}” with “{left}” on its left "
            f"({exits} runs; {percent(deviate)} of these transitions deviate)."
        )
        findings.append(Finding(text))
    return findings


def _claimed(result: Decompilation) -> str:
    claim, size = result.claim, f"{result.data.sizes['cell']} cells (a token with one value each)"
    if not result.given:
        return f"No program is reported: {result.reason}. The closest table has {size}."
    if claim.grade == EXACT and claim.transitions:
        name, initial = result.registered
        program = f"“{name}”" if name else "a program of its own"
        if initial:
            program += f" (initially {initial})"
        return (
            f"The model runs {program} at any length: all "
            f"{claim.transitions:,} transitions that a run or an interchange can make were tested. "
            f"Its smallest table has {size}."
        )
    text = f"A program of {size} predicts"
    if claim.grade == EXACT:
        read, checked = (", ".join(map(str, each)) for each in (claim.read_at, claim.lengths))
        return f"{text} every tested run, at lengths {checked} (recovered at {read})."
    # The worst kind of interchange, at the worst length.
    return f"{text} at least {percent(1 - claim.at_most)} of interventions of each kind."


def _delays(result: Decompilation) -> str:
    slowest = max(most for *_, most, _ in result.responses)
    least = min(least for *_, least, _, _ in result.responses)
    start = (
        "In the transition table, an answer follows a lasting change of its left neighbour after"
    )
    if least == slowest:
        return f"{start} {spell_loops(slowest)} (1 in a program that holds nothing)."
    where = [
        f"{before} → {after} at “{token}”"
        for token, before, after, _, most, _ in result.responses
        if most == slowest
    ]
    return (
        f"{start} {least} to {spell_loops(slowest)} (1 in a program that holds nothing). The "
        f"slowest changes: {', '.join(where)}."
    )


@figures_of.register
def _(result: Decompilation) -> list[Figure]:
    if not result.code:
        return []
    figures = [_evidence(result)] if result.data.sizes["what"] else []
    n_cells, n_messages = (result.data.sizes[axis] for axis in ("cell", "message"))
    if 0 < n_cells <= 16 and n_messages <= 6:  # larger tables cannot be read as a picture
        figures.append(_table(result))
    elif len({row[4] for row in result.responses}) > 1:
        figures.append(_responses(result))
    if result.graph:
        circuit = Figure(
            title=f"{_title(result)}, as a circuit",
            plot=CircuitGraph.from_dict(result.graph),
            caption=(
                "The recovered program, compiled into a looped transformer: what heads select, "
                "what neurons compute, and which variables go on to the next loop. The data file "
                "has its transition table."
            ),
            control="This circuit is the program's. The model's own wiring may differ.",
            data=result.to_dataframe("becomes"),
        )
        figures.append(circuit)
    return figures


def _evidence(result: Decompilation) -> Figure:
    agreement = result.data["agreement"]
    # As many as there are colours; answers one and two loops later are in the data.
    shown = [what for what in agreement["what"].values if what in (CLEAN, END, *INTERCHANGED)]
    lines = agreement.sel(what=shown).assign_coords(what=[KINDS.get(x, x) for x in shown])
    # The axis begins a tenth below the lowest interval, or below what is needed.
    lowest = float(np.nanmin([*lines.values.flatten(), ENOUGH]))
    source = f"interchanges at length {', '.join(map(str, result.read_at))}"
    if result.claim.transitions:
        source = f"all {result.claim.transitions:,} transitions"
    return Figure(
        title=f"{_title(result)}, and its evidence",
        plot=line_figure(
            Series.each(lines, "what"),
            x_title="length n",
            y_title="share of whole answers predicted",
            y_range=(max(0.0, np.floor(10 * lowest - 1) / 10), 1.01),
            references=[Reference(ENOUGH, "needed of whole trajectories")],
        ),
        caption=(
            f"The program is recovered from {source}. Share of whole answers that it predicts on "
            "held-out inputs: in clean runs, and after an interchange (read at the end, or right "
            "at every loop). Injected states come from any loop, rare ones as often as common ones."
        ),
        control=(
            "Only effective interventions count: a program that predicts no change is right in "
            "none of them."
        ),
        data=result.to_dataframe("agreement"),
        code=_short(result.code),
    )


def _title(result: Decompilation) -> str:
    return "The recovered program" if result.given else "The closest program"


def _short(code: str) -> str:
    lines = []
    for line in code.splitlines():
        name, brace, table = line.partition(": {")
        if brace and len(line) > 160:
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
    titles: dict[str, Any] = {"x_title": "message", "y_title": "token: value"}
    colours = [name for name in PALETTE if name != "grey"]
    seen = np.unique(after[~np.isnan(after)])
    if len(seen) > len(colours):
        plot = heatmap_panels({"": becomes.copy(data=after)}, value_title="answer", **titles)
    else:
        named = {
            "none yet" if y == UNKNOWN else f"answer {int(y)}":
                "grey" if y == UNKNOWN else colours.pop(0)
            for y in seen
        }  # fmt: skip
        # Answers by their place among those that occur, as categories are numbered.
        numbers = becomes.copy(data=np.searchsorted(seen, after).astype(float))
        plot = category_maps({"": numbers.where(becomes.notnull())}, named, **titles)
    return Figure(
        title="The transition table",
        plot=plot,
        caption=(
            "One loop of the program. Rows: cells, a token with one of its values. Columns: "
            "messages, the effects that a left neighbour can have. Colour: the answer after the "
            "loop. Empty: the two never meet. The data file has the values."
        ),
        data=result.to_dataframe("becomes"),
    )


def _responses(result: Decompilation) -> Figure:
    tokens, changes = (
        list(dict.fromkeys(each))
        for each in zip(*((row[0], f"{row[1]} → {row[2]}") for row in result.responses))
    )
    loops = xr.DataArray(
        np.full((len(tokens), len(changes)), np.nan), {"token": tokens, "change": changes}
    )
    panels = {"fastest": loops, "slowest": loops.copy()}
    for token, before, after, *ends, _ in result.responses:
        for values, end in zip(panels.values(), ends):
            values.loc[token, f"{before} → {after}"] = end
    return Figure(
        title="Loops until an answer follows its left neighbour",
        plot=heatmap_panels(panels, value_title="loops", x_title="change of the answer"),
        caption=(
            "Loops from a lasting change of the left neighbour to the changed answer, by token, "
            "over all pairs of messages (effects of a left neighbour) that occur in runs. Empty: "
            "the change never occurs."
        ),
        control="A program that holds nothing: 1 everywhere.",
        data=pd.DataFrame(
            result.responses, columns=["token", "before", "after", "least", "most", "ways"]
        ),
    )
