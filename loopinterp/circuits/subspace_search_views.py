"""What a search for subspaces shows: how few directions carry an exchange, and for how long."""

from __future__ import annotations

from loopinterp.circuits.subspace_search import CARRIED, WHOLE, SubspaceSearch
from loopinterp.circuits.verdict import delay_groups, plain
from loopinterp.plotting import LinePanel, Reference, Series, line_panels
from loopinterp.results import Figure, Finding, figures_of, findings_of, percent

SECTION = "program"
_MOST_DELAYS = 16


@findings_of.register
def _findings(result: SubspaceSearch) -> list[Finding]:
    enough = {m: r for m, r in result.smallest.items() if r}
    worst = {str(s): _worst(result, str(s)) for s in result.data.subspace.values}
    width = result.ranks[-1]
    found = []
    if enough:
        method = min(enough, key=lambda m: enough[m])
        name = f"{method}, {enough[method]}"
        rest = float(result.data["complement"].sel(subspace=name, estimate="value").max())
        text = (
            f"{enough[method]} of {width} directions ({method}) carry what an exchange of the "
            f"state changes: the same whole answers in {percent(worst[name])} of pairs at the "
            f"worst delay, on inputs they were not fitted on; everything but these directions "
            f"does so in at most {percent(rest)}."
        )
        value = f"{enough[method]} of {width}"
        label = "Directions that carry an exchange"
        found.append(Finding(text, value=value, good=True, label=label))
    else:
        best = max((s for s in worst if s != WHOLE), key=lambda s: worst[s])
        text = (
            f"No subspace that was tried carries what an exchange of the state changes in "
            f"{percent(CARRIED)} of pairs at every delay; the best ({best}) does in "
            f"{percent(worst[best])} at its worst delay."
        )
        found.append(Finding(text))
    probes = [s for s in worst if s.startswith("probe")]
    if probes:
        said = "; ".join(f"{s.rsplit(',', 1)[0]}: {percent(worst[s])}" for s in probes)
        text = (
            f"Exchanging only what linear probes of {_names(result)} read carries, at the worst "
            f"delay, {said}. That is what these probes read, not all of what can be read."
        )
        found.append(Finding(text))
    return found


def _names(result: SubspaceSearch) -> str:
    return " and ".join(f"“{plain(name)}”" for name in result.variables)


def _worst(result: SubspaceSearch, subspace: str) -> float:
    active = result.data["active"].values
    share = result.data["carried"].sel(subspace=subspace, estimate="value").fillna(0).values
    return min(
        float((share[a : b + 1] * active[a : b + 1]).sum() / max(active[a : b + 1].sum(), 1))
        for a, b in delay_groups(active)
    )


def _shown(result: SubspaceSearch) -> list[str]:
    """Of the first method all ranks up to the smallest that carries it; of others that one."""
    first, shown = result.methods[0], []
    for name, method, rank in zip(result.data.subspace.values, result.methods, result.ranks):
        if method == WHOLE:
            continue
        ranks = [r for m, r in zip(result.methods, result.ranks) if m == method]
        last = result.smallest[method] or max(ranks)
        if rank == last or (method == first and rank < last):
            shown.append(str(name))
    return shown


@figures_of.register
def _figures(result: SubspaceSearch) -> list[Figure]:
    active = result.data["active"]
    delays = active["delay"].values[active.values > 0][:_MOST_DELAYS]
    at = result.data.sel(delay=delays, subspace=_shown(result))
    at = at.assign_coords(delay=[int(delay) for delay in delays])
    of_whole = {"y_title": "as the whole state", "y_range": (0, 1.03)}
    panels = [
        LinePanel(
            Series.each(at["carried"], "subspace"),
            title="the subspace exchanged",
            references=[Reference(CARRIED, "carries it")],
            **of_whole,
        ),
        LinePanel(
            Series.each(at["complement"], "subspace"),
            title="everything but the subspace exchanged",
            **of_whole,
        ),
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
                "rank."
            ),
            control=(
                "Below: everything but the subspace. A subspace that holds all of it leaves "
                "nothing there; one that holds a part leaves the rest."
            ),
            data=result.to_dataframe("carried"),
        )
    ]
