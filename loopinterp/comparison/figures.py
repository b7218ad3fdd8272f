"""Findings and figures: verdicts, heads, decodable variables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from loopinterp.comparison import variable_figures  # noqa: F401  registers the others
from loopinterp.comparison.counts import ALL, END, MANIFOLD, REACHED, UNREACHED
from loopinterp.comparison.heads import TOLERANCE, HeadMatch
from loopinterp.comparison.pair_strategies import BOTH, TOKEN
from loopinterp.comparison.program_comparison import ProgramComparison
from loopinterp.comparison.rule import LEAST_INPUTS, THRESHOLD, Verdict
from loopinterp.comparison.variables import Decodability
from loopinterp.comparison.words import UNTRIED, parts, plain, quoted
from loopinterp.core.results import Figure, Finding, figures_of, findings_of, tidy
from loopinterp.core.text import percent
from loopinterp.figures import (
    LinePanel,
    Reference,
    Series,
    bars_with_intervals,
    heatmap_panels,
    line_panels,
)

if TYPE_CHECKING:
    import xarray as xr

_READABLE = 0.95  # least balanced accuracy of a variable that can be read

_DELAYS = "loops after the interchange"
_KINDS = {REACHED: "on-distribution", UNREACHED: "off-distribution"}
"""Kinds of states in files -> words."""


@findings_of.register
def _comparison_findings(result: ProgramComparison) -> list[Finding]:
    verdict, several = result.verdict, len(result.verdicts) > 1
    value = "none identified"
    if verdict.identified:
        value = plain(verdict.identified)
    elif verdict.refuted:
        only = result.data.sizes["program"] == 1
        value = f"not {plain(verdict.closest)}" if only else "none of these"
    each = {name: parts(result, name) for name in result.verdicts}
    text = " ".join(f"{name}: {first}" if several else first for name, (first, *_) in each.items())
    good = bool(verdict.identified) or None
    findings = [Finding(text, section="verdict", value=value, good=good)]
    for name, (_, *rest) in each.items():
        rest += _controls(result.data.sel(model=name), result.verdicts[name].closest)
        findings += [Finding(f"{name}: {t}" if several else t) for t in rest if t]
    if verdict.untried:
        kinds = "; ".join(UNTRIED[kind] for kind in verdict.untried)
        findings.append(Finding(f"Interchanges that were not tried: {kinds}."))
    return findings


def _controls(data: xr.Dataset, program: str) -> Iterator[str]:
    data, quote = data.sel(program=program), f"“{plain(program)}”"
    value = data.sel(estimate="value")
    sentences = []
    # Controls exist only where some pair tests them.
    if not np.isnan([value["specific"], value["random_change"]]).any():
        sentences.append(
            f"Where {quote} predicts a change, the model follows it in "
            f"{percent(value['specific'])} of runs (control, a random perturbation of equal norm: "
            f"{percent(value['random_change'])})."
        )
    if not np.isnan(value["same_value"]):
        unchanged = percent(value["same_value"])
        sentences.append(f"The same-value control leaves {unchanged} of runs unchanged.")
    if sentences:
        yield " ".join(sentences)
    names = data["rival"].values[data["alike"].values].tolist()  # this program included
    if len(names) >= 2:
        which = quoted(names) if len(names) <= 3 else f"{len(names)} programs ({quote} included)"
        yield f"In clean runs {which} give identical answers; only interchanges separate them."
    parts = []
    for label, kind in _KINDS.items():
        at = data.sel(stratum=f"{MANIFOLD}: {label}")
        n = int(at["whole_run_effective"])
        if not n:
            continue
        share, _, high = at["whole_run"].values
        # Few inputs decide nothing unless even the upper end is too low.
        known = int(at["whole_run_inputs"]) >= LEAST_INPUTS or high < THRESHOLD
        of = f"{n} interventions that lead to {kind} states"
        share = percent(share) if known else "an unknown share (too few inputs)"
        parts.append(f"{share} of {of}")
    if parts:
        yield f"{quote} predicts {' and '.join(parts)}."


@figures_of.register
def _comparison_figures(result: ProgramComparison) -> list[Figure]:
    if len(result.verdicts) > 1:
        rates = result.data["whole_run"].sel(stratum=ALL, estimate="value")
        rates = rates.assign_coords(program=[plain(str(p)) for p in rates["program"].values])
        by_model = Figure(
            title="Each model against each program",
            plot=heatmap_panels(
                {"": rates.transpose("program", "model")},
                value_title="whole-run accuracy",
                scale="mass",
            ),
            caption="Share of effective interventions that a program predicts at every delay.",
            control="Each model's verdict names its controls.",
            data=result.to_dataframe("whole_run"),
        )
        return [by_model]
    ((name, verdict),) = result.verdicts.items()
    data = result.data.sel(model=name)
    # Programs in the order of their whole-run accuracy.
    score = data["whole_run"].sel(stratum=ALL, estimate="value").fillna(-1).values
    order = data["program"].values[np.argsort(-score, kind="stable")].tolist()
    return [
        _by_delay(result, data, order),
        _misses(data, verdict.closest),
        _overall(result, data, order),
        _by_stratum(result, data, verdict.closest),
        *([_duels(data, order)] if len(order) > 1 else []),
        *_circuit(verdict),
    ]


def _early(data: xr.Dataset, most: int = 24) -> xr.Dataset:
    effective = (
        data["effective"].sel(stratum=ALL).max("program").to_series().drop(END, errors="ignore")
    )
    delays = effective.index[effective > 0][:most]
    return data.sel(delay=delays).assign_coords(delay=delays.astype(int))


def _strata(data: xr.Dataset, prefix: str) -> list[str]:
    return [str(s) for s in data["stratum"].values if str(s).startswith(f"{prefix}: ")]


def _by_delay(result: ProgramComparison, data: xr.Dataset, order: list[str]) -> Figure:
    at = _early(data).sel(stratum=ALL, program=order[:5])
    first = at.isel(program=0)
    # The control is that of the first program, on its effective pairs.
    control = Series.of("no interchange", first["no_interchange"], control=True)
    needed = [Reference(result.threshold, "needed")]
    titles = {"followed": "at every delay so far", "iia": "at this delay alone"}
    panels = [
        LinePanel(
            [*Series.each(at[name], "program", plain), *([control] if name == "iia" else [])],
            title=title,
            y_title="share predicted",
            y_range=(0, 1.03),
            references=needed,
        )
        for name, title in titles.items()
    ]
    return Figure(
        title="What happens after an interchange, delay by delay",
        plot=line_panels(panels, x_title=_DELAYS),
        caption=(
            "Top: share of interventions predicted at every delay up to this one. Below: share "
            "predicted at this delay, of those effective there (closest program: "
            f"{int(first['effective'][0])} at delay 0, {int(first['effective'][-1])} at the last). "
            "Programs may rank differently in the two panels. Bands: 95% intervals."
        ),
        control=(
            "No interchange: the score of predicting no change, on the pairs effective for the "
            "closest program."
        ),
        data=tidy(data[["followed", "iia", "effective", "no_interchange"]].sel(stratum=ALL)),
    )


def _misses(data: xr.Dataset, program: str) -> Figure:
    # By both tokens, where the task has such strata; else by the token alone.
    prefix = BOTH if len(_strata(data, BOTH)) >= 2 else TOKEN
    strata = _strata(data, prefix)
    cells = _early(data, most=12).sel(program=program, stratum=strata)
    cells = cells.assign_coords(stratum=[s.removeprefix(f"{prefix}: ") for s in strata])
    panels = {
        "share predicted": cells["iia"].sel(estimate="value"),
        "interventions, of the most": cells["effective"] / max(int(cells["effective"].max()), 1),
    }
    axes: dict[str, Any] = {"x_title": _DELAYS, "y_title": "token at the position"}
    return Figure(
        title=f"Where “{plain(program)}” fails, by token",
        plot=heatmap_panels(panels, value_title="share", scale="mass", **axes),
        caption=(
            "Left: share of interventions that the closest program predicts, by the token at the "
            "position and its left neighbour. A better program would have to differ from it "
            "in pale rows or columns."
        ),
        control="Right: how many interventions are effective. A cell without any is empty.",
        data=tidy(data.sel(program=[program], stratum=strata)[["iia", "effective"]]),
    )


def _overall(result: ProgramComparison, data: xr.Dataset, order: list[str]) -> Figure:
    at = data.sel(program=order, stratum=ALL).assign_coords(program=[plain(p) for p in order])
    return Figure(
        title="Each program, over whole runs",
        plot=bars_with_intervals(
            [
                Series.of("after an interchange, at every delay", at["whole_run"]),
                Series.of("clean runs, at every loop", at["undisturbed"]),
                Series.of("after a random perturbation", at["random_change"], control=True),
            ],
            value_title="share predicted",
            value_range=(0, 1.02),
            references=[Reference(result.threshold, "needed")],
        ),
        caption=(
            "After an interchange: interventions whose whole answer is predicted at every delay. "
            "Clean runs: loops whose whole answer is the program's. Programs with overlapping "
            "intervals are indistinguishable."
        ),
        control="A random perturbation of equal norm, where the program predicts a change.",
        data=tidy(data[["whole_run", "whole_run_effective"]]),
    )


def _by_stratum(result: ProgramComparison, data: xr.Dataset, program: str) -> Figure:
    at = data.sel(program=program)
    effective = at["whole_run_effective"].to_series()
    strata = [s for s in effective.index[effective > 0] if s not in _strata(data, BOTH)]
    words = {f"{MANIFOLD}: {label}": f"state: {kind}" for label, kind in _KINDS.items()}
    names = [words.get(s, s) for s in strata]
    whole_run = at["whole_run"].sel(stratum=strata).assign_coords(stratum=names)
    return Figure(
        title=f"“{plain(program)}” in every stratum",
        plot=bars_with_intervals(
            [Series.of("whole runs", whole_run)],
            value_title="whole-run accuracy",
            value_range=(0, 1.02),
            references=[Reference(result.threshold, "needed in each")],
        ),
        caption=(
            "Whole-run accuracy of the closest program in each stratum of effective interventions. "
            "An identified program reaches the needed share in all of them."
        ),
        control=(
            "On-distribution: the program's clean run passes through the state after the "
            "interchange. Off-distribution states are reached by interventions only."
        ),
        data=tidy(data.sel(program=[program])[["whole_run", "whole_run_effective"]]),
    )


def _duels(data: xr.Dataset, order: list[str]) -> Figure:
    names = [plain(p) for p in order]
    at = data.sel(program=order, rival=order, estimate="value")
    # [program, rival], empty where no pair separates the two.
    followed = at["duel"].where(at["apart"] > 0).assign_coords(program=names, rival=names)
    return Figure(
        title="Where two programs disagree",
        plot=heatmap_panels({"": followed}, value_title="share predicted", scale="mass"),
        caption=(
            "Of the pairs that separate two programs: the share on which the program of the row "
            "predicts the model, at the delay that best separates the two. Empty: no "
            "such pair."
        ),
        control="The cell across the diagonal is the rival's share on the same pairs.",
        data=data[["apart", "duel_delay"]].to_dataframe().reset_index(),
    )


def _circuit(verdict: Verdict) -> list[Figure]:
    from loopinterp.compiler import draw_program
    from loopinterp.programs import get_program, list_programs

    if verdict.closest not in list_programs():
        return []
    program, name = get_program(verdict.closest), plain(verdict.closest)
    title, note = f"The {name}, as a circuit", ""
    if not verdict.identified:
        title = f"The closest candidate, {name}, as a circuit"
        note = "Not the model's circuit: this candidate is not identified. "
    return [
        Figure(
            title=title,
            plot=draw_program(program),
            caption=(
                f"{note}{program.doc} The program compiled into a looped transformer: heads, "
                "neurons, and variables that go on to the next loop. Choose a node to read more."
            ),
        )
    ]


@findings_of.register
def _head_findings(result: HeadMatch) -> list[Finding]:
    # An idle head would match selectors of nothing or of everything.
    idle = {*result.nothing, *result.everything}
    telling = [name for name in result.selectors if name not in idle]
    computed = {s: h for s, h in zip(result.selectors, result.computes) if h and s in telling}
    findings = []
    if computed:
        pairs = "; ".join(f"“{name}” by {', '.join(heads)}" for name, heads in computed.items())
        value = f"{len(computed)} of {len(telling)}"
        text = f"Heads compute {value} selectors at every loop: {pairs}."
        findings.append(Finding(text, value=value))
    elif telling:
        # The best match of a head and a selector, against even attention.
        mean = result.data[["overlap", "overlap_even"]].sel(selector=telling).mean("loop")
        gain = (mean["overlap"] - mean["overlap_even"]).transpose("head", "selector")
        best = mean.isel(gain.argmax(["head", "selector"]))
        value = percent(best["overlap"])
        text = (
            f"No head computes a selector. The best match of {len(result.heads)} heads is "
            f"{best['head'].item()} with “{best['selector'].item()}”: their attention overlaps by "
            f"{value} (even attention: {percent(best['overlap_even'])})."
        )
        if not float(gain.max()) > 0:
            value = "none"
            text = (
                f"None of {len(result.heads)} heads matches any selector better than even "
                "attention does."
            )
        findings.append(Finding(text, value=value))
    for names, why in (
        (result.nothing, "they select nothing in these inputs"),
        (result.everything, "they select every visible key, as an idle head does"),
    ):
        if names:
            listed = ", ".join(f"“{name}”" for name in names)
            findings.append(Finding(f"Selectors skipped ({why}): {listed}."))
    return findings


@figures_of.register
def _head_figures(result: HeadMatch) -> list[Figure]:
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
                "Overlap of a head's attention with even attention to a selector's keys, mean over "
                "loops: 1 if it attends to these keys alone. Last panel: attention to selected "
                f"keys. Best assignment (“exactly”: to {TOLERANCE:g} at every loop): "
                f"{'; '.join(matches)}."
            ),
            control=(
                "Mean pattern: the head's attention averaged over examples; equal to the first "
                "panel if attention ignores the input. Even attention: over all visible keys."
            ),
            data=result.to_dataframe(),
        )
    ]


@findings_of.register
def _decodability_findings(result: Decodability) -> list[Finding]:
    def readable(name: str) -> set[str]:
        if name not in result.data:
            return set()
        # Model and program at the same loop, mean over loops: [variable].
        later = result.loop_for_loop(name).sel(loop=slice(1, None)).mean("loop")
        return set(later["variable"].values[(later >= _READABLE).values].tolist())

    read = readable("accuracy")
    names = [name for name in result.data["variable"].values.tolist() if name in read]
    more = [f"{len(names) - 4} more"] if len(names) > 5 else []
    listed = f" ({', '.join([*names[: 4 if more else 5], *more])})" if names else ""
    value = f"{len(names)} of {result.data.sizes['variable']}"
    text = (
        f"A linear probe reads {value} program variables{listed} from the model, loop for loop "
        f"(balanced accuracy of at least {_READABLE})."
    )
    if both := read & (readable("embedding") | readable("random_weights")):
        text += f" It reads {len(both)} of them from the input alone or with shuffled weights too."
    return [Finding(f"{text} A readable variable need not be used.", value=value)]


@figures_of.register
def _decodability_figures(result: Decodability) -> list[Figure]:
    accuracy, loops = result.data["accuracy"], ("loop", "program_loop")
    # Maps of one colour are left out.
    telling = (accuracy.max(loops) - accuracy.min(loops) > 0.05).values
    names = accuracy["variable"].values
    first: dict[str, str] = {}  # of each program
    for name in names[telling].tolist() or names[:1].tolist():
        first.setdefault(name.split(".")[0], name)
    shown = list(first.values())[:6]
    panels = {plain(name): accuracy.sel(variable=name) for name in shown}
    if "random_weights" in result.data:
        shuffled = result.data["random_weights"].sel(variable=shown[0])
        panels[f"{plain(shown[0])}, shuffled weights"] = shuffled
    layout: dict[str, Any] = {"y_title": "model loop", "value_range": (0.4, 1), "square": True}
    return [
        Figure(
            title="Program variables that a probe reads, loop by loop",
            plot=heatmap_panels(panels, value_title="balanced accuracy", **layout),
            caption=(
                "Balanced accuracy of a linear probe of a program's variable after each program "
                "loop (across) on the model's state after each model loop (up). A sharp diagonal: "
                "the model keeps up with the program, loop for loop."
            ),
            control=(
                "Last panel: the model with shuffled weights. The data also has probes of other "
                "examples' labels and of the input embedding, and chance."
            ),
            data=result.to_dataframe(),
        )
    ]
