"""Figures of the comparison of circuits with programs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

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
    from loopinterp.circuits.comparison_result import CircuitComparison
    from loopinterp.circuits.decoding import Decodability
    from loopinterp.circuits.heads import HeadMatch
    from loopinterp.circuits.partial_swaps import SubspaceSwaps

_ONE_LOOP = 1
_SECTION = "program"
_MAX_PANELS = 6
_MAX_NAME = 24


def comparison_figures(result: CircuitComparison) -> list[Figure]:
    """The verdict, where each program fails, what swaps do, and the nearest program as a graph."""
    return [_verdict(result), _places(result), _flips(result), *_graph(result)]


def _graph(result: CircuitComparison) -> list[Figure]:
    """The nearest program drawn, if it is one that is known by its name here."""
    from loopinterp.rasp import draw, get_program, list_programs

    name = result.verdict.nearest
    if name not in list_programs():
        return []
    program = get_program(name)
    return [
        Figure(
            title=f"The {plain(name)}, as a program",
            plot=draw(program).update_layout(title=None),
            caption=(
                f"{program.doc} Grey: what is read; blue: what a head selects; ochre: maps at each "
                "position; red: what comes out. The loop is run T(n) times."
            ),
            section=_SECTION,
        )
    ]


def _verdict(result: CircuitComparison) -> Figure:
    order = np.argsort(-result.iia[-1, :, -1, _ONE_LOOP], kind="stable")
    names = [plain(result.programs[p]) for p in order]

    def bars(what: str, delay: int, name: str, *, control: bool = False) -> Series:
        value, low, high = (
            getattr(result, what + end)[-1, order, -1, delay] for end in ("", "_low", "_high")
        )
        return Series(name, names, value, low=low, high=high, control=control)

    behaviour = Series(
        "without a swap",
        names,
        result.behaviour[-1, order],
        low=result.behaviour_low[-1, order],
        high=result.behaviour_high[-1, order],
    )
    plot = bars_with_intervals(
        [
            bars("iia", _ONE_LOOP, "one loop later"),
            bars("iia", _ONE_LOOP + 1, "two loops later"),
            behaviour,
            bars("control", _ONE_LOOP, "random directions", control=True),
        ],
        value_title="agreement with the model",
        value_range=(0, 1.02),
        references=[Reference(result.threshold, "named from here")],
    )
    return Figure(
        title="Which program is it?",
        plot=plot,
        caption=(
            "The state of one bit is taken from another input and put into the run; a bar says "
            "how often the model's whole output is then what the program says, one and two loops "
            "later (mean over six places relative to the carry's front; whiskers: 95% intervals "
            "over inputs). The third bar needs no swap: how often the program gives the model's "
            "answer short of T(n) loops, where the rivals differ."
        ),
        control=(
            "Random directions: the same swaps restricted to as many random directions "
            f"({_ranks(result)}) as hold 90% of what the swaps change. A program that scores no "
            "more than that predicts nothing about this model."
        ),
        data=result.to_frame(),
        section=_SECTION,
    )


def _ranks(result: CircuitComparison) -> str:
    low, high = min(result.control_ranks), max(result.control_ranks)
    return f"{low}" if low == high else f"{low} to {high}"


def _places(result: CircuitComparison) -> Figure:
    order = np.argsort(-result.iia[-1, :, -1, _ONE_LOOP], kind="stable")
    plot = heatmap_panels(
        [
            HeatPanel(result.iia[-1, order, :-1, _ONE_LOOP], "the whole state"),
            HeatPanel(result.control[-1, order, :-1, _ONE_LOOP], "random directions"),
        ],
        x=result.places[:-1],
        y=[plain(result.programs[p]) for p in order],
        x_title="place of the swapped bit",
        y_title="program",
        value_title="agreement",
        value_range=(0, 1),
        scale="mass",
        y_down=True,
    )
    table = result.to_frame()
    return Figure(
        title="Where each program fails",
        plot=plot,
        caption=(
            "Agreement one loop after the swap, by where the swapped bit is relative to the front "
            "of resolved carries: ahead of it (not resolved yet), at it, one position behind, two "
            "or more behind; planted: a resolved state put ahead of the front; erased: an "
            "unresolved state put behind it. The right program is dark in every column."
        ),
        control="The right panel: the same with random directions of the state.",
        data=table.query("delay == @later", local_dict={"later": result.delays[_ONE_LOOP]}),
        section=_SECTION,
    )


def _flips(result: CircuitComparison) -> Figure:
    verdict = result.verdict_of(0)
    program = result.programs.index(verdict.nearest)
    rows = [f"{place}, {c}→{1 - c}" for place in result.places[:-1] for c in (0, 1)]
    measured = result.flips[0].reshape(len(rows), len(result.delays), -1)
    claimed = result.claims[0, program].reshape(measured.shape)
    bits = ["i", "i+1", "i+2"]
    shown = [*range(len(result.delays))]
    panels = [HeatPanel(measured[:, d], f"model, {result.delays[d]}") for d in shown]
    panels += [HeatPanel(claimed[:, d], f"program, {result.delays[d]}") for d in shown]
    plot = heatmap_panels(
        panels,
        x=bits,
        y=rows,
        x_title="bit of the output",
        y_title="place, carry into i",
        value_title="flips",
        value_range=(0, 1),
        scale="mass",
        columns=len(shown),
        y_down=True,
    )
    index = pd.MultiIndex.from_product(
        [result.places[:-1], [0, 1], result.delays, bits], names=["place", "carry", "delay", "bit"]
    )
    data = pd.DataFrame(
        {"model": measured.reshape(-1), "program": claimed.reshape(-1)}, index=index
    ).reset_index()
    counts = pd.Series(
        result.n_pairs[0].reshape(-1),
        index=pd.MultiIndex.from_product([result.places[:-1], [0, 1]], names=["place", "carry"]),
        name="pairs",
    )
    return Figure(
        title="What a swapped carry does, and what the program says",
        plot=plot,
        caption=(
            "How often bits i, i+1 and i+2 of the answer flip after the state of bit i was "
            "replaced by one with the opposite carry (0→1: a carry put in; 1→0: taken out). "
            f"Upper row: {result.models[0]}. Lower row: the nearest program, "
            f"{plain(verdict.nearest)}. A held carry keeps bit i flipped; a recomputed one flips "
            "back and the change runs on."
        ),
        control=(
            "Ahead of the front both states are unresolved: nothing should flip, and what does is "
            "damage done by the swap itself."
        ),
        data=data.join(counts, on=["place", "carry"]),
        section=_SECTION,
    )


def subspace_figures(result: SubspaceSwaps) -> list[Figure]:
    """How many directions carry the effect of a swap, and whether a probe finds them."""
    from loopinterp.circuits.partial_swaps import PRINCIPAL

    probes = [
        k
        for k, name in enumerate(result.subspaces)
        if not name.startswith(PRINCIPAL) and k < len(result.subspaces) - 1
    ]
    grown = [k for k in range(len(result.subspaces)) if k not in probes]

    def line(name: str, rows: list[int], what: str, *, control: bool = False) -> Series:
        value, low, high = (
            getattr(result, what + end)[rows, -1, _ONE_LOOP] for end in ("", "_low", "_high")
        )
        ranks = [result.ranks[k] for k in rows]
        return Series(name, ranks, value, low=low, high=high, control=control, markers=True)

    series = [line("most-changed directions", grown, "iia")]
    series += [line(result.subspaces[k], [k], "iia") for k in probes]
    series.append(line("random directions", grown, "control", control=True))
    return [
        Figure(
            title="How many directions carry the swap",
            plot=line_figure(
                series,
                x_title="directions swapped",
                y_title="agreement, one loop later",
                x_log=True,
                y_range=(0, 1.02),
                references=[Reference(0.9)],
            ),
            caption=(
                f"Only a part of the state is swapped, and the answer compared with the program "
                f"{plain(result.program)}: the directions that swaps change most (found on other "
                "pairs), from one up to the whole state, and what a linear probe of a variable "
                "reads. A probe far below the line reads the variable where the model does not "
                "use it."
            ),
            control="Random directions of the same number, others for every pair.",
            data=result.to_frame(),
            section=_SECTION,
        )
    ]


def decodability_figures(result: Decodability) -> list[Figure]:
    """Loop-by-loop matrices of the variables, beside a model with shuffled weights."""
    first: dict[str, int] = {}
    for k, name in enumerate(result.variables):
        first.setdefault(name.split(".")[0], k)
    shown = list(first.values())[:_MAX_PANELS]
    panels = [HeatPanel(result.accuracy[k], plain(result.variables[k])) for k in shown]
    if result.random_weights is not None:
        k = shown[0]
        panels.append(
            HeatPanel(result.random_weights[k], f"{plain(result.variables[k])}, shuffled weights")
        )
    plot = heatmap_panels(
        panels,
        x=result.program_loops,
        y=result.loops,
        x_title="program loop",
        y_title="model loop",
        value_title="balanced accuracy",
        value_range=(0.4, 1),
        square=True,
    )
    return [
        Figure(
            title="Which program variables can be read, loop against loop",
            plot=plot,
            caption=(
                "Balanced accuracy of a linear probe of each program's variable as it is after "
                "each program loop (across), on the model's state after each of its loops (up). "
                "A sharp diagonal: the model is as far as the program, loop for loop. That a "
                "variable can be read does not mean that it is used: the verdict rests on swaps."
            ),
            control=(
                "The last panel is the model with shuffled weights; the data also has the probe "
                "on labels of other examples, on the input embedding alone, and chance."
            ),
            data=result.to_frame(),
            section=_SECTION,
        )
    ]


def head_figures(result: HeadMatch) -> list[Figure]:
    """Overlap of each head with each selector, beside its controls."""
    even = np.repeat(result.over_loops("overlap_even")[None], len(result.heads), axis=0)
    plot = heatmap_panels(
        [
            HeatPanel(result.over_loops("overlap"), "overlap"),
            HeatPanel(result.over_loops("overlap_by_position"), "mean pattern"),
            HeatPanel(even, "even attention"),
            HeatPanel(result.over_loops("mass"), "mass on selected"),
        ],
        x=[_short(plain(name), k) for k, name in enumerate(result.selectors)],
        y=result.heads,
        x_title="selector",
        y_title="head",
        value_title="share",
        value_range=(0, 1),
        scale="mass",
        y_down=True,
    )
    return [
        Figure(
            title="Heads against selectors",
            plot=plot,
            caption=(
                "How far each head's attention overlaps with attention spread evenly over what "
                "each program's selector selects: 1 if the head looks at those keys, all of them, "
                "and no others. The last panel is the share of attention that falls on them, which "
                "is 1 also for a head that looks at some of them only. Means over all loops (the "
                "data has every loop); empty where nothing is selected. Best one-to-one "
                f"assignment, and all heads that compute a selector exactly: {_found(result)}."
            ),
            control=(
                "Mean pattern: the head's average over examples in place of its own attention; "
                "as dark as the first panel where attention does not depend on the input. Even "
                "attention: spread evenly over the keys within reach."
            ),
            data=result.to_frame(),
            section=_SECTION,
        )
    ]


def _found(result: HeadMatch) -> str:
    """The head of each selector, or all that compute it, in words."""
    said = []
    for k, name in enumerate(result.selectors):
        exact = result.computes[k]
        heads = f"{', '.join(exact)} (exactly)" if exact else result.assigned[k]
        said.append(f"{_short(plain(name), k)}: {heads or 'none'}")
    return "; ".join(said)


def _short(name: str, number: int) -> str:
    """A name that fits beside an axis; its number keeps it apart from others."""
    return name if len(name) <= _MAX_NAME else f"{name[: _MAX_NAME - 6]}… ({number})"
