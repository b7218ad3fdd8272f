"""Findings and figures of a search for subspaces: rank, and the loops for which it carries."""

from __future__ import annotations

from loopinterp.comparison.rule import THRESHOLD
from loopinterp.comparison.subspace_search import PER_TOKEN, READ, WHOLE_STATE, SubspaceSearch
from loopinterp.comparison.words import plain
from loopinterp.core.results import Figure, Finding, figures_of, findings_of
from loopinterp.core.text import percent
from loopinterp.figures import LinePanel, Reference, Series, line_panels


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
