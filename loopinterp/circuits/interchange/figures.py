"""Figures of interchange interventions: every variable after every loop, beside the controls."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from loopinterp.circuits.verdict import plain
from loopinterp.plotting import HeatPanel, heatmap_panels
from loopinterp.results import Figure, percent

if TYPE_CHECKING:
    from loopinterp.circuits.interchange.result import InterchangeResult

_COLUMNS = 3


def interchange_figures(result: InterchangeResult) -> list[Figure]:
    """One figure for each delay at which there are pairs."""
    read = [d for d in range(len(result.delays)) if result.n_pairs[0, ..., d].any()]
    return [_figure(result, d) for d in read]


def _figure(result: InterchangeResult, delay: int) -> Figure:
    made = [k for k in range(len(result.swaps)) if result.n_pairs[k, ..., delay].any()]
    panels = [HeatPanel(result.agreement[k, ..., delay], result.swaps[k]) for k in made]
    plot = heatmap_panels(
        [*panels, HeatPanel(result.behaviour[..., delay], "agreement without a swap")],
        x=result.loops,
        y=[plain(name) for name in result.variables],
        x_title="loops before the swap",
        y_title="variable",
        value_title="agreement",
        value_range=(0, 1),
        scale="mass",
        columns=_COLUMNS,
        y_down=True,
    )
    when = result.delays[delay]
    sizes = ", ".join(
        f"{plain(name)}: {'the whole state' if whole else f'{rank} directions'}"
        for name, rank, whole in zip(result.variables, result.ranks, result.whole)
    )
    table = result.to_frame()
    return Figure(
        title=f"Variables of {plain(result.program)} swapped between inputs, read {when}",
        plot=plot,
        caption=(
            "A variable of the program is taken from another input's run, at one position and "
            "after so many loops, and so is the part of the model's state that is said to hold it "
            f"({sizes}). A cell says how often the model's whole answer, read {when}, is then the "
            "program's. Only pairs of inputs are used on which the swap changes the program's "
            "answer; where there are none a cell is empty. Last panel: how often the model "
            "answers as the program does without a swap."
        ),
        control=(
            "On the same pairs, against the same answers: as many random directions; the same "
            "directions of the state after another loop; those of another variable; and nothing, "
            f"which is chance ({_chance(result, delay)} in a model that behaves like the program)."
        ),
        data=table.query("delay == @when", local_dict={"when": when}),
        section="program",
    )


def _chance(result: InterchangeResult, delay: int) -> str:
    return percent(np.nanmax(result.chance[..., delay]))
