"""Findings and figures of the studies of comparison: verdicts, heads, decodable variables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from loopinterp.comparison import variable_figures  # noqa: F401  registers the others
from loopinterp.comparison.counts import ALL, END, MANIFOLD, REACHED, UNREACHED
from loopinterp.comparison.heads import TOLERANCE, HeadMatch
from loopinterp.comparison.pair_strategies import BOTH, TOKEN
from loopinterp.comparison.program_comparison import ProgramComparison
from loopinterp.comparison.rule import LEAST_INPUTS, THRESHOLD
from loopinterp.comparison.variables import Decodability
from loopinterp.comparison.words import UNTRIED, in_loops, plain, quoted, statement
from loopinterp.core.results import Figure, Finding, figures_of, findings_of, tidy
from loopinterp.core.text import percent
from loopinterp.figures import Reference, Series, bars_with_intervals, heatmap_panels, line_figure

if TYPE_CHECKING:
    import xarray as xr


_READABLE = 0.95
"""Least balanced accuracy of a variable that can be read."""

_DELAYS = "loops after the interchange"


@findings_of.register
def _comparison_findings(result: ProgramComparison) -> list[Finding]:
    verdict, several = result.verdict, len(result.verdicts) > 1
    value = "none identified"
    if verdict.identified:
        value = plain(verdict.identified)
    elif verdict.refuted:
        only = result.data.sizes["program"] == 1
        value = f"not {plain(verdict.closest)}" if only else "none of these"
    text = statement(result)
    if several:
        text = f"{len(result.verdicts)} models, each with its verdict. {text}"
    good = True if verdict.identified else None
    findings = [Finding(text, kind="verdict", value=value, good=good)]
    for name, each in result.verdicts.items():
        model = f" ({name})" if several else ""
        details = _details(result.data.sel(model=name), each.closest)
        findings += [Finding(text + model) for text in details]
    if verdict.untried:
        kinds = "; ".join(UNTRIED[kind] for kind in verdict.untried)
        findings.append(Finding(f"Interchanges that were not tried: {kinds}."))
    return findings


def _details(data: xr.Dataset, program: str) -> Iterator[str]:
    """The controls of one model, programs that answer alike, and states that no run reaches."""
    data, quote = data.sel(program=program), f"“{plain(program)}”"
    value = data.sel(estimate="value")
    # Controls exist only where some pair tests them.
    sentences = []
    if not np.isnan([value["specific"], value["random_change"]]).any():
        sentences.append(
            f"Where {quote} predicts that an interchange changes an answer, the whole "
            f"run follows it in {percent(value['specific'])}; after a random change of the same "
            f"norm, in {percent(value['random_change'])}."
        )
    if not np.isnan(value["same_value"]):
        sentences.append(
            "A source with the same values in another context leaves all answers as they are in "
            f"{percent(value['same_value'])}."
        )
    if sentences:
        yield " ".join(sentences)
    # Programs, this one included, with the same clean answers.
    names = data["rival"].values[data["alike"].values].tolist()
    if len(names) >= 2:
        which = quoted(names) if len(names) <= 3 else f"{len(names)} programs, {quote} among them,"
        yield (
            f"Without intervention, {which} give the same answers at every loop: only interchanges "
            "tell them apart."
        )
    parts = []
    for label in (REACHED, UNREACHED):
        at = data.sel(stratum=f"{MANIFOLD}: {label}")
        share, _, high = at["whole_run"].values
        # Few inputs tell nothing unless even the upper end is too low.
        known = int(at["whole_run_inputs"]) >= LEAST_INPUTS or high < THRESHOLD
        right = percent(share) if known else "an unknown share (too few inputs)"
        parts.append(f"{right} of {int(at['whole_run_active'])} that make a state {label}")
    yield (
        f"Of the effective interchanges, {quote} predicts the whole run in {parts[0]}, and in "
        f"{parts[1]}."
    )


@figures_of.register
def _comparison_figures(result: ProgramComparison) -> list[Figure]:
    if len(result.verdicts) > 1:
        return [_by_model(result)]
    (name,) = result.verdicts
    data, closest = result.data.sel(model=name), result.verdicts[name].closest
    # Programs in the order of their whole-run accuracy.
    score = data["whole_run"].sel(stratum=ALL, estimate="value").fillna(-1).values
    order = data["program"].values[np.argsort(-score, kind="stable")].tolist()
    return [
        _by_delay(result, data, order),
        _misses(data, closest),
        _overall(result, data, order),
        _by_stratum(result, data, closest),
        _duels(data, order),
        *_circuit(closest),
    ]


def _early(data: xr.Dataset, most: int = 24) -> xr.Dataset:
    """The delays from 0 on at which some interchange is effective, as many as a figure shows."""
    active = data["active"].sel(stratum=ALL).max("program").to_series().drop(END, errors="ignore")
    delays = active.index[active > 0][:most]
    return data.sel(delay=delays).assign_coords(delay=delays.astype(int))


def _strata(data: xr.Dataset, prefix: str) -> list[str]:
    return [str(s) for s in data["stratum"].values if str(s).startswith(f"{prefix}: ")]


def _by_delay(result: ProgramComparison, data: xr.Dataset, order: list[str]) -> Figure:
    at = _early(data).sel(stratum=ALL, program=order[:5])
    first = at.isel(program=0)
    pairs, last = first["active"], int(first["delay"][-1])
    # The control is that of the first program, on its effective pairs.
    control = Series.of("no interchange", first["no_interchange"], control=True)
    return Figure(
        title="What happens after an interchange, delay by delay",
        plot=line_figure(
            [*Series.each(at["iia"], "program", plain), control],
            x_title=_DELAYS,
            y_title="IIA (whole answers)",
            y_range=(0, 1.03),
            references=[Reference(result.threshold, "needed at every delay")],
        ),
        caption=(
            "The state of one position comes from another input's run, half of the time from "
            "another loop; a tenth of the runs get a second interchange. A line is the share of "
            "effective interchanges after which the model's whole answer, so many loops later, is "
            f"the program's (for the first program, of {int(pairs[0])} at once and of "
            f"{int(pairs[-1])} {in_loops(last)}). Bands: 95% intervals."
        ),
        control="No interchange: share of the same pairs in which doing nothing would be right.",
        data=tidy(data[["iia", "active", "no_interchange"]]),
    )


def _misses(data: xr.Dataset, program: str) -> Figure:
    # By both tokens, where the task has such strata; else by the token alone.
    prefix = BOTH if len(_strata(data, BOTH)) >= 2 else TOKEN
    strata = _strata(data, prefix)
    cells = _early(data, most=12).sel(program=program, stratum=strata)
    cells = cells.assign_coords(stratum=[s.removeprefix(f"{prefix}: ") for s in strata])
    panels = {
        "IIA": cells["iia"].sel(estimate="value"),
        "pairs, of the most": cells["active"] / max(int(cells["active"].max()), 1),
    }
    axes: dict[str, Any] = {"x_title": _DELAYS, "y_title": "token at the position"}
    return Figure(
        title=f"What “{plain(program)}” misses",
        plot=heatmap_panels(panels, value_title="share", scale="mass", **axes),
        caption=(
            "Accuracy of the closest program by the token at the position and the one to its "
            "left. A pale row or column shows where another program would have to differ."
        ),
        control=("Right: how many interchanges are effective. A cell without any is empty."),
        data=tidy(data.sel(program=[program], stratum=strata)[["iia", "active"]]),
    )


def _overall(result: ProgramComparison, data: xr.Dataset, order: list[str]) -> Figure:
    at = data.sel(program=order, stratum=ALL).assign_coords(program=[plain(p) for p in order])
    return Figure(
        title="Each program, over whole runs",
        plot=bars_with_intervals(
            [
                Series.of("after an interchange, at every delay", at["whole_run"]),
                Series.of("without intervention, at every loop", at["undisturbed"]),
                Series.of("after a random change", at["random_change"], control=True),
            ],
            value_title="whole answers that are the program's",
            value_range=(0, 1.02),
            references=[Reference(result.threshold, "needed")],
        ),
        caption=(
            "After an interchange: pairs on which the answer is the program's at every delay. "
            "Without intervention: loops of clean runs whose whole answer is the program's; "
            "programs that answer alike there have the same bar."
        ),
        control=(
            "A random change of the state, of the norm of the interchange, where the program "
            "predicts a change."
        ),
        data=tidy(data[["whole_run", "whole_run_active"]]),
    )


def _by_stratum(result: ProgramComparison, data: xr.Dataset, program: str) -> Figure:
    at = data.sel(program=program)
    active = at["whole_run_active"].to_series()
    strata = [s for s in active.index[active > 0] if s not in _strata(data, BOTH)]
    return Figure(
        title=f"“{plain(program)}” in every stratum",
        plot=bars_with_intervals(
            [Series.of("whole runs", at["whole_run"].sel(stratum=strata))],
            value_title="whole runs that are the program's",
            value_range=(0, 1.02),
            references=[Reference(result.threshold, "needed in each")],
        ),
        caption=(
            "Effective interchanges by token, position, loop, loop of the source, second "
            "interchange, chain length and input length. An identified program holds in each."
        ),
        control=(
            "“States that a run reaches”: the program's clean run passes through its state after "
            "the interchange. Only interchanges test the program in other states."
        ),
        data=tidy(data.sel(program=[program])[["whole_run", "whole_run_active"]]),
    )


def _duels(data: xr.Dataset, order: list[str]) -> Figure:
    names = [plain(p) for p in order]
    at = data.sel(program=order, rival=order, estimate="value")
    # [program, rival], empty where no pair separates the two.
    followed = at["duel"].where(at["apart"] > 0).assign_coords(program=names, rival=names)
    return Figure(
        title="Where two programs disagree",
        plot=heatmap_panels({"": followed}, value_title="followed", scale="mass"),
        caption=(
            "Share of the pairs that separate two programs, at the delay that does so best, on "
            "which the model follows the program of the row. Empty where no pair does."
        ),
        control="The cell across the diagonal is the rival's share on the same pairs.",
        data=data[["apart", "duel_delay"]].to_dataframe().reset_index(),
    )


def _by_model(result: ProgramComparison) -> Figure:
    data = result.data["whole_run"].sel(stratum=ALL, estimate="value").transpose("program", "model")
    data = data.assign_coords(program=[plain(str(p)) for p in data["program"].values])
    return Figure(
        title="Each model against each program",
        plot=heatmap_panels({"": data}, value_title="whole runs", scale="mass"),
        caption=(
            "Effective interchanges after which the model's answer is the program's at every delay "
            "to the end."
        ),
        control="Each model's verdict names its controls.",
        data=result.to_dataframe("whole_run"),
    )


def _circuit(name: str) -> list[Figure]:
    """The circuit of the closest program, if it is a registered one."""
    from loopinterp.compiler import draw_program
    from loopinterp.programs import get_program, list_programs

    if name not in list_programs():
        return []
    program = get_program(name)
    return [
        Figure(
            title=f"The {plain(name)}, as a circuit",
            plot=draw_program(program),
            caption=(
                f"{program.doc} The program compiled into a looped transformer: what each head "
                "selects, what each group of neurons computes, and which variables go on to the "
                "next loop. Choose a node to read about it, in the program and in this model."
            ),
        )
    ]


@findings_of.register
def _head_findings(result: HeadMatch) -> list[Finding]:
    """The selectors that some head computes, or the best match; and those that tell nothing."""
    # Selectors of nothing or of everything tell no head from an idle one.
    idle = {*result.empty, *result.everything}
    telling = [name for name in result.selectors if name not in idle]
    computed = {s: h for s, h in zip(result.selectors, result.computes) if h and s in telling}
    findings = []
    if computed:
        pairs = "; ".join(f"“{name}” by {', '.join(heads)}" for name, heads in computed.items())
        value = f"{len(computed)} of {len(telling)}"
        text = (
            f"{value} selectors are computed by a head, whose attention is that of the "
            f"selector to {TOLERANCE:g} at every loop: {pairs}."
        )
        findings.append(Finding(text, value=value))
    elif telling:
        # The best match of a head and a selector, against even attention.
        mean = result.data[["overlap", "overlap_even"]].sel(selector=telling).mean("loop")
        gain = (mean["overlap"] - mean["overlap_even"]).transpose("head", "selector")
        best = mean.isel(gain.argmax(["head", "selector"]))
        n, value = len(result.heads), percent(best["overlap"])
        text = (
            f"Of {n} heads, {best['head'].item()} comes closest to a selector: its "
            f"attention overlaps by {value} with that of “{best['selector'].item()}” over all "
            f"loops, against {percent(best['overlap_even'])} if attention were spread evenly."
        )
        if not float(gain.max()) > 0:
            value = "none"
            text = f"None of {n} heads matches any selector better than even attention."
        findings.append(Finding(text, value=value))
    for names, why in (
        (result.empty, "select nothing at any query of the sample"),
        (result.everything, "select all that can be seen, as an idle head attends to it"),
    ):
        if names:
            listed = ", ".join(f"“{name}”" for name in names)
            findings.append(Finding(f"Selectors that {why} are not judged: {listed}."))
    return findings


@figures_of.register
def _head_figures(result: HeadMatch) -> list[Figure]:
    """Overlap of each head with each selector, beside its controls."""
    # Names that fit beside an axis; the number of a longer one tells it from others.
    names = [
        text if len(text) <= 24 else f"{text[:18]}… ({k})"
        for k, text in enumerate(map(plain, result.selectors))
    ]
    mean = result.data.mean("loop").assign_coords(selector=names, head=result.heads)
    panels = {
        "overlap": mean["overlap"],
        "mean pattern": mean["overlap_by_position"],
        "even attention": mean["overlap_even"].broadcast_like(mean["overlap"]),
        "mass on selected": mean["mass"],
    }
    matches = [
        f"{name}: {', '.join(exact)} (exactly)" if exact else f"{name}: {best or 'none'}"
        for name, exact, best in zip(names, result.computes, result.assigned)
    ]
    return [
        Figure(
            title="Heads against selectors",
            plot=heatmap_panels(panels, value_title="share", scale="mass"),
            caption=(
                "Overlap of each head's attention with attention spread evenly over the keys that "
                "a selector selects: 1 for a head that attends to all of them and to no others. "
                "The last panel is the attention to them, which is 1 also for a head that attends "
                "to some of them. Means over all loops; empty where nothing is selected. Best "
                "one-to-one assignment, and all heads that compute a selector exactly: "
                f"{'; '.join(matches)}."
            ),
            control=(
                "Mean pattern: the head's mean attention over examples; as dark as the first panel "
                "where attention does not depend on the input. Even attention: spread evenly over "
                "the keys within reach."
            ),
            data=result.to_dataframe(),
        )
    ]


@findings_of.register
def _decodability_findings(result: Decodability) -> list[Finding]:
    """How many variables can be read at equal loops of model and program, from loop 1 on.

    Before the first loop there may be nothing to read: an initial state of zeros holds nothing.
    """

    def readable(name: str) -> set[str]:
        if name not in result.data:
            return set()
        # Model and program at the same loop, mean over loops: [variable].
        later = result.loop_for_loop(name).sel(loop=slice(1, None)).mean("loop")
        return set(later["variable"].values[(later >= _READABLE).values].tolist())

    read = readable("accuracy")
    names = [name for name in result.data["variable"].values.tolist() if name in read]
    listed = f" ({', '.join(names)})" if names else ""
    value = f"{len(names)} of {result.data.sizes['variable']}"
    text = (
        f"{value} program variables{listed} can be read from the model loop for loop, after one "
        f"loop and more, with balanced accuracy of at least {_READABLE}"
    )
    if both := read & (readable("embedding") | readable("random_weights")):
        text += f"; {len(both)} of them just as well from the input alone or with shuffled weights"
    text += (
        ". That says where to look, not what is used: rival programs' variables can be read alike."
    )
    return [Finding(text, value=value)]


@figures_of.register
def _decodability_figures(result: Decodability) -> list[Figure]:
    """Loop-by-loop matrices of the variables, beside a model with shuffled weights."""
    first: dict[str, str] = {}  # of each program
    for name in result.data["variable"].values.tolist():
        first.setdefault(name.split(".")[0], name)
    shown = list(first.values())[:6]
    panels = {plain(name): result.data["accuracy"].sel(variable=name) for name in shown}
    if "random_weights" in result.data:
        shuffled = result.data["random_weights"].sel(variable=shown[0])
        panels[f"{plain(shown[0])}, shuffled weights"] = shuffled
    layout: dict[str, Any] = {"y_title": "model loop", "value_range": (0.4, 1), "square": True}
    return [
        Figure(
            title="Which program variables can be read, loop against loop",
            plot=heatmap_panels(panels, value_title="balanced accuracy", **layout),
            caption=(
                "Balanced accuracy of a linear probe of each program's variable after each program "
                "loop (across), on the model's state after each of its loops (up). A sharp "
                "diagonal: the model keeps up with the program, loop for loop. A readable variable "
                "need not be used: the verdict rests on interchange interventions."
            ),
            control=(
                "The last panel is the model with shuffled weights; the data also has the probe "
                "on labels of other examples, on the input embedding alone, and chance."
            ),
            data=result.to_dataframe(),
        )
    ]
