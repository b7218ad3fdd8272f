"""Findings and figures of variable interchanges, injected carries and subspaces."""

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
from loopinterp.comparison.words import in_loops, plain, with_interval
from loopinterp.core.results import Figure, Finding, figures_of, findings_of
from loopinterp.core.text import percent
from loopinterp.figures import LinePanel, Reference, Series, heatmap_panels, line_panels
from loopinterp.programs.program import spell_loops


@findings_of.register
def _(result: VariableInterchange) -> list[Finding]:
    """Accuracy of variables' subspaces and controls, and where it is lowest."""
    share, low, high, n = result.pooled()
    name = plain(result.program)
    if not n:
        text = f"“{name}” cannot be tested: no interchange of a variable changes its answer."
        return [Finding(text)]
    wrong = {x: result.pooled(x) for x in INTERVENTIONS if x not in (VARIABLE, SAME_VALUE)}
    wrong = {x: pooled for x, pooled in wrong.items() if pooled[3]}
    text = (
        f"After an interchange of a variable of “{name}”, the program predicts the whole run in "
        f"{with_interval(np.array([share, low, high]))} of {n} interventions."
    )
    if wrong:
        controls = ", ".join(f"{x} {percent(pooled[0])}" for x, pooled in wrong.items())
        text += f" Controls: {controls}."
    good = low >= THRESHOLD and all(low > pooled[2] for pooled in wrong.values())
    unchanged, _, _, n_same = result.pooled(SAME_VALUE)
    if n_same:
        text += f" The same-value control leaves {percent(unchanged)} of {n_same} runs unchanged."
        good = good and unchanged >= THRESHOLD
    findings = [Finding(text, value=percent(share), good=good)]
    if share < 1:
        # The variable, loop and delay at which the program predicts least.
        least = result.iia.where(result.iia == result.iia.min(), drop=True)
        at = {axis: least[axis].values[0] for axis in ("variable", "loop", "delay")}
        n = int(result.data["pairs"].sel(intervention=VARIABLE, **at))
        text = (
            f"“{name}” predicts least ({percent(least.min())} of {n} interventions) for "
            f"“{plain(at['variable'])}” after {spell_loops(int(at['loop']))}, read "
            f"{_when(at['delay'])}. Without intervention it fits "
            f"{percent(result.data['undisturbed'].sel(at))} there."
        )
        findings.append(Finding(text, value=percent(least.min())))
    return findings


def _when(delay: str) -> str:
    return "at the end" if delay == END else in_loops(int(delay))


@figures_of.register
def _(result: VariableInterchange) -> list[Figure]:
    pairs = result.data["pairs"].sel(intervention=VARIABLE)
    delays = [d for d in ("0", "1", END) if d in pairs.delay and pairs.sel(delay=d).any()]
    variables = [str(name) for name in result.data["variable"].values]
    sizes = ", ".join(
        f"{plain(name)}: "
        + (f"{result.ranks[name]} directions" if name in result.ranks else "the whole state")
        for name in variables
    )
    table = result.to_dataframe("agreement", "pairs")
    layout: dict[str, Any] = {"x_title": "loop of the interchange", "scale": "mass", "columns": 3}
    figures = []
    for delay in delays:
        at = result.data.sel(delay=delay).assign_coords(variable=[plain(x) for x in variables])
        agreement = at["agreement"].sel(estimate="value")
        names = [x for x in INTERVENTIONS if at["pairs"].sel(intervention=x).any()]
        panels = {x: agreement.sel(intervention=x) for x in names}
        panels["clean run"] = at["undisturbed"]
        chance = np.nanmax(agreement.sel(intervention=NOTHING).values)
        figure = Figure(
            title=f"Interchange of variables of {plain(result.program)}, read {_when(delay)}",
            plot=heatmap_panels(panels, value_title="share predicted", **layout),
            caption=(
                "Share of whole answers that the program predicts when a variable, and its part of "
                f"the state ({sizes}), come from another run. Only pairs on which the program's "
                "answer changes count; empty: none. Last panel: without intervention."
            ),
            control=(
                "In the same runs: a random change of equal norm; the same directions after "
                "another loop; another variable's; and nothing, which is chance (at most "
                f"{percent(chance)}). The same value in another context must change nothing."
            ),
            data=table.query("delay == @delay", local_dict={"delay": delay}),
        )
        figures.append(figure)
    return figures


@findings_of.register
def _(result: InjectedCarry) -> list[Finding]:
    findings = []
    several = result.data.sizes["model"] > 1
    for model in map(str, result.data.model.values):
        injected, erased = (_persistence(result, model, kind) for kind in KINDS)
        text = (
            f"{f'{model}: an' if several else 'An'} injected carry persists for {injected}"
            f"{_recovery(result.counts(model))}. An erased carry stays erased for {erased}. In a "
            "plain ripple both persist for 1 loop; in a sticky one an injected carry persists for "
            "ever."
        )
        value = _loops(result.quantile(0.5, model))
        label = f"Persistence of an injected carry{f', {model}' if several else ''}"
        findings.append(Finding(text, value=value, label=label))
    return findings


def _persistence(result: InjectedCarry, model: str, kind: str) -> str:
    middle, low, high = (result.quantile(q, model, kind) for q in (0.5, 0.05, 0.95))
    if np.isnan(middle):
        return "an unknown time (no such pair)"
    span = f"; 5% to 95%: {low:.0f} to {_loops(high)}" if low != high else ""
    return f"{_loops(middle)} (median of {int(result.counts(model, kind).sum())}{span})"


def _recovery(lives: np.ndarray) -> str:
    ended, n = int(lives[:MOST].sum()), int(lives.sum())
    if n and lives[0] == n:
        return ": the answer never changes"
    if ended == n:
        return ", then the answer recovers" if n else ""
    return f"; {percent(ended / n) if ended else 'none'} of the answers recover within {MOST} loops"


def _loops(life: float) -> str:
    return f"{MOST} loops or more" if life >= MOST else spell_loops(round(life))


@figures_of.register
def _(result: InjectedCarry) -> list[Figure]:
    axes = {"token": list(TOKENS), "token to the left": list(TOKENS)}
    panels = {}
    for model in map(str, result.data.model.values):
        for kind, name in zip(KINDS, ("injected", "erased")):  # files have older names
            medians = [
                [result.quantile(0.5, model, kind, token=t, left_token=s) for s in TOKENS]
                for t in TOKENS
            ]
            title = f"{model}, {name}" if result.data.sizes["model"] > 1 else name
            panels[title] = xr.DataArray(medians, axes)
    return [
        Figure(
            title="Persistence of an injected or erased carry",
            plot=heatmap_panels(panels, value_title="loops", value_range=(0, MOST), columns=2),
            caption=(
                "Median number of loops for which the answer shows the other carry, by the token "
                f"at the bit and the one to its left. {MOST} means {MOST} or more. Empty: the left "
                "neighbour decides the carry, so that there is no such pair."
            ),
            control=(
                f"Known programs: 1 everywhere in a plain ripple; {MOST} (injected) and 1 (erased) "
                "in a sticky one."
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
        value = f"{shared[method]} of {width}"
        text = (
            f"An interchange in {value} directions ({method}) has the same effect as an "
            f"interchange of the whole state in {_worst(result, name)} of held-out pairs at the "
            f"worst delay. All other directions together have it in at most "
            f"{percent(_rest(result, name))}."
        )
        good = _rest(result, name) <= 1 - THRESHOLD or None
        label = "Directions that carry an interchange"
        findings = [Finding(text, value=value, good=good, label=label)]
    else:
        best = max(names, key=lambda n: result.worst(n)[1])
        text = (
            "No subspace for all tokens gives the effect of an interchange of the whole state at "
            f"every delay. The best of all, “{best}”, gives it in {_worst(result, best)} of "
            f"held-out pairs at its worst delay (needed: an interval from {percent(THRESHOLD)})."
        )
        findings = [Finding(text)]
    methods = zip(names, result.methods)
    if read := [name for name, method in methods if method.removesuffix(PER_TOKEN) in READ]:
        shares = "; ".join(
            f"“{name}” {percent(result.worst(name)[0])} ({percent(_rest(result, name))})"
            for name in read
        )
        variables = " and ".join(f"“{plain(name)}”" for name in result.variables)
        text = (
            f"Directions fitted to {variables} (method, number of directions) have this effect in "
            f"the following shares of pairs at the worst delay: {shares}. In brackets: all other "
            "directions, at their best delay."
        )
        findings.append(Finding(text))
    return findings


def _rest(result: SubspaceSearch, subspace: str) -> float:
    return float(result.data["complement"].sel(subspace=subspace, estimate="value").max())


def _worst(result: SubspaceSearch, subspace: str) -> str:
    return with_interval(np.array(result.worst(subspace)))


@figures_of.register
def _(result: SubspaceSearch) -> list[Figure]:
    # Of each method the smallest rank that carries it, or the largest; of the first one less, too.
    # Of read directions only those per token: ten lines would not be legible.
    shown = []
    for method, smallest in result.smallest.items():
        ranks = [rank for m, rank in zip(result.methods, result.ranks) if m == method]
        last = ranks.index(smallest or max(ranks))
        first = max(last - 1, 0) if method == result.methods[0] else last
        if method not in READ:
            shown += [f"{method}, {rank}" for rank in ranks[first : last + 1]]
    changed = result.data["changed"]
    delays = changed["delay"].values[changed.values > 0][:16]
    at = result.data.sel(delay=delays, subspace=shown[:5])  # colours are five
    at = at.assign_coords(delay=[int(delay) for delay in delays])
    layout = {"y_title": "share carried", "y_range": (0, 1.03)}
    needed = [Reference(THRESHOLD, "needed of the lower end")]
    carried, rest = (Series.each(at[name], "subspace") for name in ("carried", "complement"))
    panels = [
        LinePanel(carried, title="the subspace", references=needed, **layout),
        LinePanel(rest, title="all other directions", **layout),
    ]
    return [
        Figure(
            title="Directions that carry the interchange",
            plot=line_panels(panels, x_title="loops after the interchange"),
            caption=(
                "Share of held-out pairs in which an interchange of a subspace gives the same "
                "whole answer as one of the whole state. At each delay, pairs count if the latter "
                f"interchange changes the answer ({int(changed[0])} at once, "
                f"{int(changed[len(delays) - 1])} at the last delay). The number beside a "
                "method is that of its directions, chosen on these pairs."
            ),
            control=(
                "Below: an interchange of all other directions. It changes nothing if the subspace "
                "holds everything."
            ),
            data=result.to_dataframe("carried"),
        )
    ]


@findings_of.register
def _(result: Reduction) -> list[Finding]:
    rank = result.enough or int(result.data["rank"].values[-1])
    kind, n, share = result.weakest(rank)
    if np.isnan(share.value) or (share.inputs < LEAST_INPUTS and share.high >= ENOUGH):
        return [Finding("Too few interchanges change an answer to reduce the state.")]
    later = in_loops(share.first)
    if share.first != share.last:
        later = f"{share.first} to {share.last} loops later"
    rest = float(result.data["others"].sel(rank=rank, estimate="value").max())
    value, text = f"{rank} of {result.width}", f"{rank} of {result.width} numbers per position"
    text += " predict interchanges" if result.enough else ", the most tried"
    # Without a sufficient rank, some accuracy is too low, or rests on too few inputs.
    if not result.enough and share.value < ENOUGH:
        text += ", are too few"
    text += (
        f": the projected model gives {with_interval(np.array(share[2:5]))} of the model's whole "
        f"answers at worst ({kind}, length {n}, {later}). All other directions predict at most "
        f"{percent(rest)}."
    )
    value = value if result.enough else f"more than {value}"
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
    layout: dict[str, Any] = {"y_title": "share predicted", "y_range": (0, 1.03)}
    lowest, needed = [Series.of("lowest", worst)], [Reference(ENOUGH, "needed")]
    panels = [LinePanel(lowest, title="lowest accuracy", references=needed, **layout)]
    for n in result.data["n"].values:
        at = result.data.sel(n=n)
        rest = Series.of("all other directions", at["others"].isel(kind=0), control=True)
        lines = [*Series.each(at["whole_run"], "kind"), rest]
        panels.append(LinePanel(lines, title=f"whole runs, length {n}", **layout))
    return [
        Figure(
            title="How few numbers per position predict interchanges",
            plot=line_panels(panels, x_title="numbers kept per position"),
            caption=(
                "After every loop the state is projected onto this number of principal directions "
                "of its token. First panel: share of whole answers after an interchange that stay "
                "the same, lowest over kinds, lengths and delays. Other panels: share of whole "
                f"runs that stay the same. Directions were fitted to other inputs of length "
                f"{result.fitted_at}."
            ),
            control="Dashed: the projection keeps all other directions instead "
            f"({result.data['kind'].values[0]}).",
            data=result.to_dataframe("whole_run"),
        )
    ]
