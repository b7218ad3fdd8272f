"""What a comparison of programs shows: verdict, accuracy by delay, what the nearest misses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from loopinterp.circuits.evidence_counts import ALL, END, MANIFOLD, REACHED, UNREACHED
from loopinterp.circuits.pair_strata import BOTH, TOKEN
from loopinterp.circuits.program_comparison import ProgramComparison
from loopinterp.circuits.verdict import LEAST_INPUTS, THRESHOLD
from loopinterp.circuits.verdict_words import UNTRIED, in_loops, plain
from loopinterp.plotting import (
    Reference,
    Series,
    bars_with_intervals,
    heatmap_panels,
    line_figure,
)
from loopinterp.results import Figure, Finding, figures_of, findings_of, percent, tidy

if TYPE_CHECKING:
    import xarray as xr

SECTION = "program"
_SHOWN = 5
_MOST_DELAYS = 24
_NAMED = 3
_AFTER = "loops after the exchange"


@findings_of.register
def _findings(result: ProgramComparison) -> list[Finding]:
    verdict, several = result.verdict, len(result.verdicts) > 1
    value = "none identified"
    if verdict.refuted:
        alone = result.data.sizes["program"] == 1
        value = f"not {plain(verdict.nearest)}" if alone else "none of these"
    elif verdict.winner:
        value = plain(verdict.winner)
    text = verdict.statement
    if several:
        text = f"{len(result.verdicts)} models, each with its verdict. {text}"
    found = [Finding(text, kind="verdict", value=value, good=verdict.named or None)]
    for name, own in result.verdicts.items():
        of = f" ({name})" if several else ""
        said = (say(result.data.sel(model=name), own.nearest) for say in _SAID)
        found += [Finding(text + of) for text in said if text]
    if verdict.untried:
        kinds = "; ".join(UNTRIED[kind] for kind in verdict.untried)
        found.append(Finding(f"Interchanges that were not tried: {kinds}."))
    return found


def _by_manifold(data: xr.Dataset, program: str) -> str:
    parts = []
    for label in (REACHED, UNREACHED):
        at = {"program": program, "stratum": f"{MANIFOLD}: {label}"}
        n, inputs = (int(data[f"whole_run_{of}"].sel(at)) for of in ("active", "inputs"))
        share, _, high = data["whole_run"].sel(at).values
        known = inputs >= LEAST_INPUTS or high < THRESHOLD
        said = percent(share) if known else "an unknown share (too few inputs)"
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
    which = " and ".join(f"“{n}”" for n in names)
    if len(names) > _NAMED:
        which = f"{len(names)} programs, “{plain(program)}” among them,"
    return (
        f"Left alone, {which} give the same answers at every loop: only exchanged states tell them "
        "apart."
    )


def _controls(data: xr.Dataset, program: str) -> str:
    at = {"program": program, "estimate": "value"}
    followed, random = (float(data[name].sel(at)) for name in ("specific", "random_change"))
    same = float(data["same_value"].sel(estimate="value"))
    said = []
    if not np.isnan([followed, random]).any():
        said.append(
            f"Where “{plain(program)}” says that an exchange changes an answer, the whole run "
            f"follows it in {percent(followed)}; after a random change of the same norm, in "
            f"{percent(random)}."
        )
    if not np.isnan(same):
        said.append(
            "A donor with the same values in another context leaves all answers as they are in "
            f"{percent(same)}."
        )
    return " ".join(said)


_SAID = (_controls, _alike, _by_manifold)
"""What is said of a model and its nearest program beside the verdict."""


@figures_of.register
def _figures(result: ProgramComparison) -> list[Figure]:
    if len(result.verdicts) > 1:
        return [_by_model(result)]
    (name,) = result.verdicts
    data, nearest = result.data.sel(model=name), result.verdicts[name].nearest
    order = _in_order(data)
    return [
        _by_delay(result, data, order),
        _misses(data, nearest),
        _overall(result, data, order),
        _by_stratum(result, data, nearest),
        _duels(data, order),
        *_drawn(nearest),
    ]


def _in_order(data: xr.Dataset) -> list[str]:
    """Programs, the one that is followed over most whole runs first."""
    score = data["whole_run"].sel(stratum=ALL, estimate="value").fillna(-1)
    return [str(p) for p in data.program.values[np.argsort(-score.values, kind="stable")]]


def _early(data: xr.Dataset) -> xr.Dataset:
    """The cells of delays from 0 on, as far as something happens and a figure can show."""
    active = data["active"].sel(stratum=ALL).max("program").to_series().drop(END, errors="ignore")
    delays = active.index[active > 0][:_MOST_DELAYS]
    return data.sel(delay=delays).assign_coords(delay=delays.astype(int))


def _strata(data: xr.Dataset, prefix: str) -> list[str]:
    return [str(s) for s in data.stratum.values if str(s).startswith(f"{prefix}: ")]


def _by_delay(result: ProgramComparison, data: xr.Dataset, order: list[str]) -> Figure:
    at = _early(data).sel(stratum=ALL, program=order[:_SHOWN])
    first = at.isel(program=0)
    pairs, delays = first["active"], first["delay"].values.tolist()
    control = Series.of("no exchange", first["no_interchange"], control=True)
    return Figure(
        title="What happens after an exchange, delay by delay",
        plot=line_figure(
            [*Series.each(at["iia"], "program", plain), control],
            x_title=_AFTER,
            y_title="IIA (whole answers)",
            y_range=(0, 1.03),
            references=[Reference(result.threshold, "needed at every delay")],
        ),
        caption=(
            "The state of one position is taken from another input's run, half of the time from "
            "another loop, and the run goes on; a tenth of the runs get a second interchange. A "
            "line says how often the model's whole answer, so many loops later, is the program's, "
            "over pairs on which the program or the model changes an answer (for the first "
            f"program, {int(pairs[0])} pairs at once and {int(pairs[-1])} pairs "
            f"{in_loops(delays[-1])}). "
            "Bands: 95% intervals."
        ),
        control=("No exchange: how often doing nothing would be right on the same pairs."),
        data=tidy(data[["iia", "active", "no_interchange"]]),
    )


def _misses(data: xr.Dataset, program: str) -> Figure:
    prefix, strata = BOTH, _strata(data, BOTH)
    if len(strata) < 2:
        prefix, strata = TOKEN, _strata(data, TOKEN)
    cells = _early(data).sel(program=program, stratum=strata).isel(delay=slice(12))
    cells = cells.assign_coords(stratum=[s.removeprefix(f"{prefix}: ") for s in strata])
    panels = {
        "IIA": cells["iia"].sel(estimate="value"),
        "pairs, of the most": cells["active"] / max(int(cells["active"].max()), 1),
    }
    return Figure(
        title=f"What “{plain(program)}” misses",
        plot=heatmap_panels(
            panels,
            x_title=_AFTER,
            y_title="token at the position",
            value_title="share",
            scale="mass",
        ),
        caption=(
            "Accuracy of the nearest program by the token at the exchanged position and the one to "
            "its left. A pale row or column says where another program would have to differ."
        ),
        control=(
            "Right: on how many pairs something happens at all; a cell that rests on few says "
            "little, and one without any is empty."
        ),
        data=tidy(data.sel(program=[program], stratum=strata)[["iia", "active"]]),
    )


def _overall(result: ProgramComparison, data: xr.Dataset, order: list[str]) -> Figure:
    at = data.sel(program=order, stratum=ALL).assign_coords(program=[plain(p) for p in order])
    return Figure(
        title="Each program, over whole runs",
        plot=bars_with_intervals(
            [
                Series.of("after an exchange, at every delay", at["whole_run"]),
                Series.of("left alone, at every loop", at["undisturbed"]),
                Series.of("after a random change", at["random_change"], control=True),
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
        data=tidy(data[["whole_run", "whole_run_active"]]),
    )


def _by_stratum(result: ProgramComparison, data: xr.Dataset, program: str) -> Figure:
    own = data.sel(program=program)
    active = own["whole_run_active"].to_series()
    strata = [s for s in active.index[active > 0] if s not in _strata(data, BOTH)]
    return Figure(
        title=f"“{plain(program)}” in every stratum",
        plot=bars_with_intervals(
            [Series.of("whole runs", own["whole_run"].sel(stratum=strata))],
            value_title="whole runs that are the program's",
            value_range=(0, 1.02),
            references=[Reference(result.threshold, "needed in each")],
        ),
        caption=(
            "Effective interchanges, sorted by token, position, loop, loop of the source, second "
            "interchange, chain length and input length. A program is identified only if it holds "
            "in all of them."
        ),
        control=(
            "“States that a run reaches”: the program's state after the interchange is one that "
            "its clean run passes through; where none does, only interchanges ever test it."
        ),
        data=tidy(data.sel(program=[program])[["whole_run", "whole_run_active"]]),
    )


def _duels(data: xr.Dataset, order: list[str]) -> Figure:
    names = [plain(p) for p in order]
    at = data.sel(program=order, rival=order, estimate="value")
    followed = at["duel"].where(at["apart"] > 0).assign_coords(program=names, rival=names)
    return Figure(
        title="Where two programs disagree",
        plot=heatmap_panels({"": followed}, value_title="followed", scale="mass"),
        caption=(
            "Pairs on which two programs say different things, at the delay that separates them "
            "best: how often the model follows the program of the row. Empty where no pair tells "
            "them apart."
        ),
        control="The cell across the diagonal is the rival's share on the same pairs.",
        data=data[["apart", "duel_delay"]].to_dataframe().reset_index(),
    )


def _by_model(result: ProgramComparison) -> Figure:
    data = result.data["whole_run"].sel(stratum=ALL, estimate="value").transpose("program", "model")
    data = data.assign_coords(program=[plain(str(p)) for p in data.program.values])
    return Figure(
        title="Each model against each program",
        plot=heatmap_panels({"": data}, value_title="whole runs", scale="mass"),
        caption=(
            "Pairs on which something happens and the model's answer is the program's at every "
            "delay from an exchange to the end."
        ),
        control="Each model's verdict names its controls.",
        data=result.to_dataframe("whole_run"),
    )


def _drawn(name: str) -> list[Figure]:
    """The circuit of the nearest program, if it is one that is known by its name here."""
    from loopinterp.rasp import draw_program, get_program, list_programs

    if name not in list_programs():
        return []
    program = get_program(name)
    return [
        Figure(
            title=f"The {plain(name)}, as a circuit",
            plot=draw_program(program),
            caption=(
                f"{program.doc} The program compiled into a looped transformer: what each head "
                "selects, what each group of neurons computes, and which variables go around to "
                "the next loop. Choose a node for what is known of it, in the program and in the "
                "model studied here."
            ),
        )
    ]
