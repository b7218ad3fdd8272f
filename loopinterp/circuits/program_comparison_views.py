"""What a comparison of programs shows: verdict, accuracy by delay, what the nearest misses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from loopinterp.circuits.evidence_counts import ALL, END, MANIFOLD, REACHED, UNREACHED
from loopinterp.circuits.pair_strata import BOTH, TOKEN
from loopinterp.circuits.program_comparison import ProgramComparison
from loopinterp.circuits.verdict import NONE, STRATUM_PAIRS, in_loops, plain
from loopinterp.plotting import (
    HeatPanel,
    Reference,
    Series,
    bars_with_intervals,
    heatmap_panels,
    line_figure,
)
from loopinterp.results import Figure, Finding, figures_of, findings_of, percent, tidy

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

SECTION = "program"
_SHOWN = 5
_MOST_DELAYS = 24


@findings_of.register
def _findings(result: ProgramComparison) -> list[Finding]:
    verdict, several = result.verdict, len(result.verdicts) > 1
    missed = NONE if result.data.sizes["program"] > 1 else f"not {plain(verdict.nearest)}"
    value = plain(verdict.winner) if verdict.winner else missed
    text = verdict.statement
    if several:
        text = f"{len(result.verdicts)} models, each with its verdict. {text}"
    found = [Finding(kind="verdict", text=text, value=value, good=verdict.named or None)]
    for name, own in result.verdicts.items():
        of = f" ({name})" if several else ""
        data = result.data.sel(model=name)
        found.append(Finding(kind=SECTION, text=_by_manifold(data, own.nearest) + of))
        if alike := _alike(data, own.nearest):
            found.append(Finding(kind=SECTION, text=alike + of))
        found.append(Finding(kind=SECTION, text=_controls(data, own.nearest) + of))
    return found


def _by_manifold(data: xr.Dataset, program: str) -> str:
    parts = []
    for label in (REACHED, UNREACHED):
        at = {"program": program, "stratum": f"{MANIFOLD}: {label}"}
        n = int(data["whole_run_active"].sel(at))
        share = float(data["whole_run"].sel(at | {"estimate": "value"}))
        said = percent(share) if n >= STRATUM_PAIRS else "an unknown share (too few)"
        parts.append(f"{said} of {n} that make a state {label}")
    return (
        f"Of the exchanges of which something comes, “{plain(program)}” says the whole run right "
        f"in {parts[0]}, and in {parts[1]}."
    )


def _alike(data: xr.Dataset, program: str) -> str:
    same = data["alike"].sel(program=program)
    names = [plain(str(p)) for p in data.rival.values if bool(same.sel(rival=p))]
    if len(names) < 2:
        return ""
    return (
        f"On runs that nothing disturbs, {', '.join(f'“{n}”' for n in names)} give the same "
        "answers at every loop: there they cannot be told apart. Only exchanged states tell them "
        "apart."
    )


def _controls(data: xr.Dataset, program: str) -> str:
    at = {"program": program, "estimate": "value"}
    text = (
        f"Where “{plain(program)}” says that an exchange changes an answer, the whole run follows "
        f"it in {percent(float(data['specific'].sel(at)))}; after a random change of the same "
        f"norm, in {percent(float(data['random_change'].sel(at)))}."
    )
    same = float(data["same_value"].sel(estimate="value"))
    if not np.isnan(same):
        text += (
            " A donor with the same values in another context leaves all answers as they are in "
            f"{percent(same)}."
        )
    return text


@figures_of.register
def _figures(result: ProgramComparison) -> list[Figure]:
    if len(result.verdicts) > 1:
        return [_by_model(result)]
    (name,) = result.verdicts
    data, nearest = result.data.sel(model=name), result.verdicts[name].nearest
    order = _in_order(data)
    return [
        _by_delay(result, data, order),
        _misses(result, data, nearest),
        _overall(result, data, order),
        _by_stratum(result, data, nearest),
        _duels(result, data, order),
        *_drawn(nearest),
    ]


def _in_order(data: xr.Dataset) -> list[str]:
    """Programs, the one that is followed over most whole runs first."""
    score = data["whole_run"].sel(stratum=ALL, estimate="value").fillna(-1)
    return [str(p) for p in data.program.values[np.argsort(-score.values, kind="stable")]]


def _delays(data: xr.Dataset) -> list[str]:
    """Delays from 0 on, as far as something happens and a figure can show."""
    active = data["active"].sel(stratum=ALL).max("program")
    shown = [str(d) for d in data.delay.values if d != END and int(active.sel(delay=d))]
    return shown[:_MOST_DELAYS]


def _line(data: xr.Dataset, program: str, delays: list[str]) -> Series:
    iia = data["iia"].sel(program=program, stratum=ALL, delay=delays)
    return Series.of(plain(program), iia.assign_coords(delay=[int(d) for d in delays]))


def _by_delay(result: ProgramComparison, data: xr.Dataset, order: list[str]) -> Figure:
    delays = _delays(data)
    nothing = data["no_interchange"].sel(program=order[0], stratum=ALL, delay=delays)
    lines = [_line(data, program, delays) for program in order[:_SHOWN]]
    control = Series("no exchange", [int(d) for d in delays], nothing.values, control=True)
    pairs = data["active"].sel(program=order[0], stratum=ALL)
    return Figure(
        title="What happens after an exchange, delay by delay",
        plot=line_figure(
            [*lines, control],
            x_title="loops after the exchange",
            y_title="IIA (whole answers)",
            y_range=(0, 1.03),
            references=[Reference(result.threshold, "needed at every delay")],
        ),
        caption=(
            "The state of one position is taken from another input's run, and the run goes on. A "
            "line says how often the model's whole answer, so many loops later, is the one that "
            "the program says; only pairs count on which the program or the model changes an "
            f"answer (for the first, {int(pairs.sel(delay=delays[0]))} pairs at once and "
            f"{int(pairs.sel(delay=delays[-1]))} pairs {in_loops(int(delays[-1]))}). "
            "Bands: 95% intervals."
        ),
        control=(
            "No exchange: how often doing nothing would be right on the same pairs. A program "
            "that says that nothing happens is right there as often."
        ),
        data=_table(data, "iia", "active", "no_interchange"),
        section=SECTION,
    )


def _misses(result: ProgramComparison, data: xr.Dataset, program: str) -> Figure:
    delays = _delays(data)[:12]
    prefix = f"{BOTH}: "
    strata = [str(s) for s in data.stratum.values if str(s).startswith(prefix)]
    if len(strata) < 2:
        prefix = f"{TOKEN}: "
        strata = [str(s) for s in data.stratum.values if str(s).startswith(prefix)]
    iia = data["iia"].sel(program=program, stratum=strata, delay=delays, estimate="value")
    active = data["active"].sel(program=program, stratum=strata, delay=delays)
    return Figure(
        title=f"What “{plain(program)}” misses",
        plot=heatmap_panels(
            [
                HeatPanel(iia.values, "IIA"),
                HeatPanel((active / max(int(active.max()), 1)).values, "pairs, of the most"),
            ],
            x=[int(d) for d in delays],
            y=[s.removeprefix(prefix) for s in strata],
            x_title="loops after the exchange",
            y_title="token at the position",
            value_title="share",
            value_range=(0, 1),
            scale="mass",
            y_down=True,
        ),
        caption=(
            "Accuracy of the nearest program by the token at the exchanged position and the one to "
            "its left. A pale row or column says where another program would have to differ."
        ),
        control=(
            "Right: on how many pairs something happens at all; a cell that rests on few says "
            "little, and one without any is empty."
        ),
        data=_table(data.sel(program=[program], stratum=strata), "iia", "active"),
        section=SECTION,
    )


def _overall(result: ProgramComparison, data: xr.Dataset, order: list[str]) -> Figure:
    def bars(what: str, name: str, *, control: bool = False) -> Series:
        array = data[what].sel(program=order)
        if "stratum" in array.dims:
            array = array.sel(stratum=ALL)
        named = array.assign_coords(program=[plain(p) for p in order])
        return Series.of(name, named, control=control)

    return Figure(
        title="Each program, over whole runs",
        plot=bars_with_intervals(
            [
                bars("whole_run", "after an exchange, at every delay"),
                bars("undisturbed", "left alone, at every loop"),
                bars("random_change", "after a random change", control=True),
            ],
            value_title="whole answers that are the program's",
            value_range=(0, 1.02),
            references=[Reference(result.threshold, "needed")],
        ),
        caption=(
            "After an exchange: pairs on which the answer is the program's at every delay to the "
            "end. Left alone: loops of runs without an exchange whose whole answer is the "
            "program's; programs that answer alike there have the same bar."
        ),
        control=(
            "A random change of the state with the norm of the exchange, where the program says "
            "that an exchange changes something."
        ),
        data=_table(data, "whole_run", "whole_run_active"),
        section=SECTION,
    )


def _by_stratum(result: ProgramComparison, data: xr.Dataset, program: str) -> Figure:
    own = data.sel(program=program)
    strata = [
        str(s)
        for s in data.stratum.values
        if not str(s).startswith(f"{BOTH}: ") and int(own["whole_run_active"].sel(stratum=s))
    ]
    return Figure(
        title=f"“{plain(program)}” in every stratum",
        plot=bars_with_intervals(
            [Series.of("whole runs", own["whole_run"].sel(stratum=strata))],
            value_title="whole runs that are the program's",
            value_range=(0, 1.02),
            references=[Reference(result.threshold, "needed in each")],
        ),
        caption=(
            "Pairs on which something happens, sorted by token, place, loop, chain length and "
            "input length. A program is named only if it holds in all of them."
        ),
        control=(
            "“States that a run reaches”: the program's state after the exchange is one that an "
            "undisturbed run passes through; where none does, only exchanges ever test it."
        ),
        data=_table(data.sel(program=[program]), "whole_run", "whole_run_active"),
        section=SECTION,
    )


def _duels(result: ProgramComparison, data: xr.Dataset, order: list[str]) -> Figure:
    names = [plain(p) for p in order]
    duel = data["duel"].sel(program=order, rival=order, estimate="value")
    apart = data["apart"].sel(program=order, rival=order)
    return Figure(
        title="Where two programs disagree",
        plot=heatmap_panels(
            [HeatPanel(np.where(apart.values > 0, duel.values, np.nan))],
            x=names,
            y=names,
            x_title="rival",
            y_title="program",
            value_title="followed",
            value_range=(0, 1),
            scale="mass",
            y_down=True,
        ),
        caption=(
            "Pairs on which two programs say different things, at the delay that separates them "
            "best: how often the model follows the program of the row. Empty where no pair tells "
            "them apart."
        ),
        control="The cell across the diagonal is the rival's share on the same pairs.",
        data=data[["apart", "duel_delay"]].to_dataframe().reset_index(),
        section=SECTION,
    )


def _by_model(result: ProgramComparison) -> Figure:
    data = result.data["whole_run"].sel(stratum=ALL, estimate="value")
    return Figure(
        title="Each model against each program",
        plot=heatmap_panels(
            [HeatPanel(data.values.T)],
            x=[str(m) for m in data.model.values],
            y=[plain(str(p)) for p in data.program.values],
            x_title="model",
            y_title="program",
            value_title="whole runs",
            value_range=(0, 1),
            scale="mass",
            y_down=True,
        ),
        caption=(
            "Pairs on which something happens and the model's answer is the program's at every "
            "delay from an exchange to the end."
        ),
        control="Each model's verdict names its controls.",
        data=result.to_dataframe("whole_run"),
        section=SECTION,
    )


def _drawn(name: str) -> list[Figure]:
    """The nearest program drawn, if it is one that is known by its name here."""
    from loopinterp.rasp import draw, get_program, list_programs

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
            section=SECTION,
        )
    ]


def _table(data: xr.Dataset, *names: str) -> pd.DataFrame:
    """A table of some of the arrays."""
    return tidy({name: data[name] for name in names})
