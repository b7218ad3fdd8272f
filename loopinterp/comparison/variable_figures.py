"""Findings and figures of studies of variables: interchanges, injected carries, subspaces."""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr

from loopinterp.comparison.counts import END
from loopinterp.comparison.injected_carry import KINDS, MOST, TOKENS, InjectedCarry
from loopinterp.comparison.reduced_model import ENOUGH, Reduction
from loopinterp.comparison.rule import LEAST_INPUTS, THRESHOLD
from loopinterp.comparison.subspace_search import PER_TOKEN, READ, WHOLE_STATE, SubspaceSearch
from loopinterp.comparison.variable_interchange import (
    INTERVENTIONS,
    NOTHING,
    SAME_VALUE,
    VARIABLE,
    VariableInterchange,
)
from loopinterp.comparison.words import in_loops, plain
from loopinterp.core.results import Figure, Finding, figures_of, findings_of
from loopinterp.core.text import percent
from loopinterp.figures import LinePanel, Reference, Series, heatmap_panels, line_panels
from loopinterp.programs.program import spell_loops


@findings_of.register
def _(result: VariableInterchange) -> list[Finding]:
    """Whether the variables are where they are said to be, against the controls."""
    share, low, high, n = result.pooled()
    name = plain(result.program)
    if not n:
        text = (
            f"Whether the model holds the variables of “{name}” where they are said to be cannot "
            "be said: no exchange of one of them changes an answer of the program."
        )
        return [Finding(text)]
    wrong = {x: result.pooled(x) for x in INTERVENTIONS if x not in (VARIABLE, SAME_VALUE)}
    wrong = {x: pooled for x, pooled in wrong.items() if pooled[3]}
    text = (
        f"Where a variable of “{name}” is taken from another input's run, the model's whole answer "
        f"is the program's, to the end of the run, after {percent(share)} of {n} exchanges (95% "
        f"interval {percent(low)}–{percent(high)}). Put in its place: "
        f"{', '.join(f'{x} {percent(pooled[0])}' for x, pooled in wrong.items())}."
    )
    good = low >= THRESHOLD and all(low > pooled[2] for pooled in wrong.values())
    unchanged, _, _, n_same = result.pooled(SAME_VALUE)
    if n_same:
        text += (
            f" A donor with the same value in another context leaves {percent(unchanged)} of "
            f"{n_same} runs as they are."
        )
        good = good and unchanged >= THRESHOLD
    findings = [Finding(text, value=percent(share), good=good)]
    if share < 1:
        # The variable, loop and delay at which the model does least of what the program says.
        least = result.iia.where(result.iia == result.iia.min(), drop=True)
        at = {axis: least[axis].values[0] for axis in ("variable", "loop", "delay")}
        when, n = _when(at["delay"]), int(result.data["pairs"].sel(intervention=VARIABLE, **at))
        text = (
            f"The model follows “{name}” least when “{plain(at['variable'])}” is exchanged after "
            f"{spell_loops(int(at['loop']))} and the answer read {when}: in "
            f"{percent(least.min())} of {n} exchanges. Without one it answers as the program there "
            f"in {percent(result.data['undisturbed'].sel(at))}."
        )
        findings.append(Finding(text, value=percent(least.min())))
    return findings


def _when(delay: str) -> str:
    return "at the end" if delay == END else in_loops(int(delay))


@figures_of.register
def _(result: VariableInterchange) -> list[Figure]:
    """A figure for the delays of most interest at which there are pairs."""
    pairs = result.data["pairs"].sel(intervention=VARIABLE)
    delays = [d for d in ("0", "1", END) if d in pairs.delay and pairs.sel(delay=d).any()]
    return [_variable_figure(result, delay) for delay in delays]


def _variable_figure(result: VariableInterchange, delay: str) -> Figure:
    at, when = result.data.sel(delay=delay), _when(delay)
    variables = [str(name) for name in at["variable"].values]
    shown = at.assign_coords(variable=[plain(name) for name in variables])
    agreement = shown["agreement"].sel(estimate="value")
    names = [x for x in INTERVENTIONS if at["pairs"].sel(intervention=x).any()]
    panels = {x: agreement.sel(intervention=x) for x in names}
    panels["agreement without an exchange"] = shown["undisturbed"]
    layout: dict[str, Any] = {"x_title": "loops before the exchange", "scale": "mass", "columns": 3}
    sizes = ", ".join(
        f"{plain(name)}: "
        + (f"{result.ranks[name]} directions" if name in result.ranks else "the whole state")
        for name in variables
    )
    chance = agreement.sel(intervention=NOTHING).values
    table = result.to_dataframe("agreement", "pairs")
    return Figure(
        title=f"Variables of {plain(result.program)} exchanged between inputs, read {when}",
        plot=heatmap_panels(panels, value_title="agreement", **layout),
        caption=(
            "A variable of the program is taken from another input's run, at one position and "
            "after so many loops, and so is the part of the model's state that is said to hold it "
            f"({sizes}). A cell says how often the model's whole answer, read {when}, is then the "
            "program's. Only pairs of inputs are used on which the exchange changes the program's "
            "answer; where there are none a cell is empty. Last panel: how often the model "
            "answers as the program does without an exchange."
        ),
        control=(
            "In the same runs, against the same answers: a change of equal norm in a random "
            "direction; the same directions of the state after another loop; those of another "
            f"variable; and nothing, which is chance (at most {percent(np.nanmax(chance))}). A "
            "donor with the same value in another context must leave the answer as it is."
        ),
        data=table.query("delay == @delay", local_dict={"delay": delay}),
    )


@findings_of.register
def _(result: InjectedCarry) -> list[Finding]:
    findings = []
    several = result.data.sizes["model"] > 1
    for model in map(str, result.data.model.values):
        where = f"In {model}, a" if several else "A"
        injected, erased = (_persistence(result, model, kind) for kind in KINDS)
        text = (
            f"{where} carry that is put in by hand behind the front is held for {injected}"
            f"{_recovery(result.counts(model))}; one that is taken away stays away for {erased}. A "
            "plain ripple holds either for 1 loop, a sticky one holds a planted carry for ever."
        )
        value = _loops(result.quantile(0.5, model))
        label = f"Hold time of a carry{f', {model}' if several else ''}"
        findings.append(Finding(text, value=value, label=label))
    return findings


def _persistence(result: InjectedCarry, model: str, kind: str) -> str:
    middle, low, high = (result.quantile(q, model, kind) for q in (0.5, 0.05, 0.95))
    if np.isnan(middle):
        return "an unknown time (no such pair)"
    span = f"{low:.0f} to {_loops(high)}" if low != high else "all of them"
    n = int(result.counts(model, kind).sum())
    return f"{_loops(middle)} (median of {n}; 5% to 95%: {span})"


def _recovery(lives: np.ndarray) -> str:
    """How many carries ended; those of :data:`MOST` loops were not seen to end."""
    ended, n = int(lives[:MOST].sum()), int(lives.sum())
    if ended == n:
        return " and then mended" if n else ""
    return f"; {percent(ended / n) if ended else 'none'} of them were seen to be mended"


def _loops(life: float) -> str:
    return f"{MOST} loops or more" if life >= MOST else spell_loops(round(life))


@figures_of.register
def _(result: InjectedCarry) -> list[Figure]:
    axes = {"token": list(TOKENS), "token to the left": list(TOKENS)}
    panels = {}
    for model in map(str, result.data.model.values):
        for kind in KINDS:
            medians = [
                [result.quantile(0.5, model, kind, token=t, left_token=s) for s in TOKENS]
                for t in TOKENS
            ]
            name = f"{model}, {kind}" if result.data.sizes["model"] > 1 else kind
            panels[name] = xr.DataArray(medians, axes)
    return [
        Figure(
            title="How long a carry that was put in by hand lives",
            plot=heatmap_panels(panels, value_title="loops", value_range=(0, MOST), columns=2),
            caption=(
                f"Median number of loops for which the answer shows the other carry, {KINDS[0]} "
                f"(a carry where there is none) and {KINDS[1]} (none where there is one), by the "
                "token at the bit and the one to its left. Empty: no such pair, as the left "
                f"neighbour decides the carry. {MOST} means {MOST} or more."
            ),
            control=(
                "Known programs: 1 everywhere for a plain ripple; for a sticky one, planted "
                f"carries stay for ever ({MOST}) and erased ones come back after 1 loop."
            ),
            data=result.to_dataframe(),
        )
    ]


@findings_of.register
def _(result: SubspaceSearch) -> list[Finding]:
    smallest, width = result.smallest, result.ranks[-1]
    shared = {m: r for m, r in smallest.items() if r and not m.endswith(PER_TOKEN)}
    names = [str(name) for name in result.data.subspace.values if name != WHOLE_STATE]
    if shared:
        method = min(shared, key=lambda m: shared[m])
        name = f"{method}, {shared[method]}"
        text = (
            f"{shared[method]} of {width} directions ({method}) carry what an exchange of the "
            f"state changes: the same whole answers in {_interval(result, name)} of pairs at the "
            f"worst delay, on inputs they were not fitted on; everything but these directions "
            f"does so in at most {percent(_rest(result, name))}."
        )
        value, label = f"{shared[method]} of {width}", "Directions that carry an exchange"
        good = _rest(result, name) <= 1 - THRESHOLD or None
        findings = [Finding(text, value=value, good=good, label=label)]
    else:
        best = max(names, key=lambda n: result.worst(n)[1])
        text = (
            f"No subspace for all tokens that was tried carries what an exchange of the state "
            f"changes at every delay (lower end of the interval at least {percent(THRESHOLD)}); "
            f"the best of all, “{best}”, does in {_interval(result, best)} at its worst delay."
        )
        findings = [Finding(text)]
    methods = zip(names, result.methods)
    if read := [name for name, method in methods if method.removesuffix(PER_TOKEN) in READ]:
        shares = "; ".join(
            f"“{name}” {_interval(result, name)}, all but it {percent(_rest(result, name))}"
            for name in read
        )
        variables = " and ".join(f"“{plain(name)}”" for name in result.variables)
        text = (
            f"What the directions found by reading {variables} carry at the worst delay, and "
            f"all but them at its best (a number is how many): {shares}. Which direction reads a "
            "variable best and which one the model uses are two questions."
        )
        findings.append(Finding(text))
    return findings


def _rest(result: SubspaceSearch, subspace: str) -> float:
    return float(result.data["complement"].sel(subspace=subspace, estimate="value").max())


def _interval(result: SubspaceSearch, subspace: str) -> str:
    value, low, high = result.worst(subspace)
    return f"{percent(value)} (95% interval {percent(low)} to {percent(high)})"


@figures_of.register
def _(result: SubspaceSearch) -> list[Figure]:
    # Of each method the smallest rank that carries it, or the largest; of the first one less, too.
    # Of read directions only those per token: ten lines would not be legible.
    shown = []
    for method in dict.fromkeys(result.methods[:-1]):
        ranks = [rank for m, rank in zip(result.methods, result.ranks) if m == method]
        last = ranks.index(result.smallest[method] or max(ranks))
        first = max(last - 1, 0) if method == result.methods[0] else last
        if method not in READ:
            shown += [f"{method}, {rank}" for rank in ranks[first : last + 1]]
    active = result.data["active"]
    delays = active["delay"].values[active.values > 0][:16]
    at = result.data.sel(delay=delays, subspace=shown)
    at = at.assign_coords(delay=[int(delay) for delay in delays])
    layout = {"y_title": "as the whole state", "y_range": (0, 1.03)}
    needed = [Reference(THRESHOLD, "needed of the lower end")]
    carried, rest = (Series.each(at[name], "subspace") for name in ("carried", "complement"))
    panels = [
        LinePanel(carried, title="the subspace exchanged", references=needed, **layout),
        LinePanel(rest, title="everything but the subspace exchanged", **layout),
    ]
    return [
        Figure(
            title="In how many directions the exchanged state lives",
            plot=line_panels(panels, x_title="loops after the exchange"),
            caption=(
                "How often exchanging a subspace gives the same whole answer as exchanging the "
                f"whole state, on {result.scored_on} pairs of inputs that nothing was fitted on; "
                f"only pairs count in which the whole exchange changes an answer ({int(active[0])} "
                f"at once, {int(active[len(delays) - 1])} at the last delay shown). A number is a "
                "rank; the smallest that carries an exchange was chosen on these pairs."
            ),
            control=(
                "Below: everything but the subspace. A subspace that holds all of it leaves "
                "nothing there; one that holds a part leaves the rest."
            ),
            data=result.to_dataframe("carried"),
        )
    ]


@findings_of.register
def _(result: Reduction) -> list[Finding]:
    rank = result.enough or int(result.data["rank"].values[-1])
    kind, n, share = result.weakest(rank)
    if np.isnan(share.value) or (share.inputs < LEAST_INPUTS and share.high >= ENOUGH):
        text = (
            "Too few interchanges of a state change an answer to say how few numbers per position "
            "predict what becomes of them."
        )
        return [Finding(text)]
    later = f"{share.first}" if share.first == share.last else f"{share.first} to {share.last}"
    where = (
        f"where it is right least often ({kind}, length {n}, {later} loops later), it gives "
        f"{percent(share.value)} of the model's whole answers (95% interval {percent(share.low)} "
        f"to {percent(share.high)})"
    )
    rest = float(result.data["others"].sel(rank=rank, estimate="value").max())
    value = f"{rank} of {result.width}"
    text = (
        f"{value} numbers per position are enough to say what becomes of "
        f"interchanges. Reduced to them after every loop, {where}. The model that keeps all other "
        f"directions is right after {percent(rest)} at most."
    )
    if not result.enough:
        value = f"more than {value}"
        text = f"Reduced to {rank} numbers per position, the most that were tried: {where}."
    return [Finding(text, value=value, label="Numbers per position that predict interchanges")]


@figures_of.register
def _(result: Reduction) -> list[Figure]:
    ranks = result.data["rank"].values.tolist()
    weakest = [result.weakest(rank).share for rank in ranks]
    worst = xr.DataArray(
        [(share.value, share.low, share.high) for share in weakest],
        dims=("rank", "estimate"),
        coords={"rank": ranks, "estimate": result.data["estimate"]},
    )
    panels = [
        LinePanel(
            [Series.of("right least often", worst)],
            title="where it is right least often",
            y_title="answers as the model's",
            y_range=(0, 1.03),
            references=[Reference(ENOUGH, "needed")],
        )
    ]
    for n in result.data["n"].values:
        at = result.data.sel(n=n)
        rest = Series.of("all other directions", at["others"].isel(kind=0), control=True)
        panels.append(
            LinePanel(
                [*Series.each(at["whole_run"], "kind"), rest],
                title=f"whole runs, length {n}",
                y_title="runs as the model's",
                y_range=(0, 1.03),
            )
        )
    pairs = int(np.nanmax(result.data["active"].values))
    return [
        Figure(
            title="How few numbers per position predict interchanges",
            plot=line_panels(panels, x_title="numbers kept per position"),
            caption=(
                "The model itself, but after every loop the state of a position is moved to the "
                "nearest point with the mean of its token and so many of that token's principal "
                "directions. How often its whole answers after an interchange are the model's: at "
                "the delays at which it is right least often (those with few pairs are taken "
                "together), then over whole runs. Only pairs count in which an answer changes (at "
                f"most {pairs} at one delay). "
                f"Directions were fitted at length {result.fitted_at}, on other inputs."
            ),
            control="Dashed: the model that keeps all directions but these, "
            f"{result.data['kind'].values[0]}.",
            data=result.to_dataframe("whole_run"),
        )
    ]
