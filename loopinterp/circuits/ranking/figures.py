"""Figures of a ranking of programs: the scores, and which rival is followed loop by loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from loopinterp.circuits.verdict import plain
from loopinterp.plotting import (
    HeatPanel,
    Reference,
    Series,
    bars_with_intervals,
    heatmap_panels,
    line_figure,
)
from loopinterp.results import Figure

if TYPE_CHECKING:
    from loopinterp.circuits.ranking.result import ProgramRanking

_SECTION = "program"


def ranking_figures(result: ProgramRanking) -> list[Figure]:
    """The verdict, the scores loop by loop, and every two rivals against one another."""
    order = np.argsort(-result.score, kind="stable")
    return [_verdict(result, order), _loops(result, order), _duels(result, order)]


def _verdict(result: ProgramRanking, order: np.ndarray) -> Figure:
    names = [plain(result.programs[p]) for p in order]

    def bars(what: str, name: str, *, control: bool = False) -> Series:
        value, low, high = (getattr(result, what + end)[order] for end in ("", "_low", "_high"))
        return Series(name, names, value, low=low, high=high, control=control)

    groups = [bars("score", "after a swap")]
    if not np.isnan(result.behaviour).all():
        groups.append(bars("behaviour", "without a swap"))
    groups.append(bars("control_score", "random directions", control=True))
    return Figure(
        title="Which program is it?",
        plot=bars_with_intervals(
            groups,
            value_title="agreement with the model",
            value_range=(0, 1.02),
            references=[Reference(result.threshold, "named from here")],
        ),
        caption=(
            "The state of one position is taken from another input with the same token there, and "
            "put into the run; a bar says how often the model's whole output is then the one the "
            "program says, at once, one and two loops later (mean over loops; whiskers: 95% "
            "intervals). Only swaps on which rivals disagree are used, the same for all. Without "
            "a swap: how often the program gives the model's answer short of T(n) loops, where "
            "the rivals differ."
        ),
        control=(
            f"Random directions: the same swaps restricted to {result.control_rank} random "
            "directions, which hold 90% of what the swaps change. A program that scores no more "
            "than that predicts nothing about this model."
        ),
        data=result.table(),
        section=_SECTION,
    )


def _loops(result: ProgramRanking, order: np.ndarray) -> Figure:
    def line(p: int, what: str, name: str, *, control: bool = False) -> Series:
        value, low, high = (getattr(result, what + end)[p] for end in ("", "_low", "_high"))
        return Series(name, result.loops, value, low=low, high=high, control=control)

    best = int(order[0])
    series = [line(int(p), "followed", plain(result.programs[p])) for p in order]
    series.append(
        line(best, "control", f"{plain(result.programs[best])}, random directions", control=True)
    )
    return Figure(
        title="Which program the model follows, loop by loop",
        plot=line_figure(
            series,
            x_title="loops before the swap",
            y_title="share of swaps that follow the program",
            y_range=(0, 1.02),
        ),
        caption=(
            "The same shares by the loop after which the swap is made. A program that is the "
            "circuit is followed at every loop."
        ),
        control="Dashed: the best program where random directions are swapped.",
        data=result.to_frame(),
        section=_SECTION,
    )


def _duels(result: ProgramRanking, order: np.ndarray) -> Figure:
    names = [plain(result.programs[p]) for p in order]
    panels = [
        HeatPanel(result.duels[np.ix_(order, order)], "where the two disagree"),
        HeatPanel(result.duels_control[np.ix_(order, order)], "the same, random directions"),
        HeatPanel(result.common[np.ix_(order, order)], "where the two agree"),
        HeatPanel(result.common_control[np.ix_(order, order)], "the same, random directions"),
    ]
    return Figure(
        title="Every two rivals against one another",
        plot=heatmap_panels(
            panels,
            x=names,
            y=names,
            x_title="and",
            y_title="the model follows",
            value_title="share",
            value_range=(0, 1),
            scale="mass",
            columns=2,
            y_down=True,
        ),
        caption=(
            "First panel: of the swaps on which two programs say different things, the share that "
            "follows the program of the row. A cell and its mirror need not add up to 1: the model "
            "may do as neither says. Empty: no swap tells the two apart. Third panel: the share "
            "that follows both of those on which they agree (and other rivals do not)."
        ),
        control="Second and fourth panel: the same swaps in random directions.",
        section=_SECTION,
    )
