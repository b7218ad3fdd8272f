"""What a match of heads with selectors says and shows."""

from __future__ import annotations

from loopinterp.circuits.head_matching import TOLERANCE, HeadMatch
from loopinterp.plotting import heatmap_panels
from loopinterp.results import Figure, Finding, figures_of, findings_of, percent

SECTION = "program"
_MAX_NAME = 24


@findings_of.register
def _(result: HeadMatch) -> list[Finding]:
    """Which selectors are computed by a head, or the best match; and which say nothing."""
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
        findings.append(_nearest(result, telling))
    for names, why in (
        (result.empty, "Nothing is selected at any query of the sample"),
        (result.everything, "All that can be seen is selected, as an idle head looks at it"),
    ):
        if names:
            listed = ", ".join(f"“{name}”" for name in names)
            findings.append(Finding(f"{why}, so nothing is said, by: {listed}."))
    return findings


def _nearest(result: HeadMatch, telling: list[str]) -> Finding:
    """The best match of a head and a selector, against even attention."""
    mean = result.data[["overlap", "overlap_even"]].sel(selector=telling).mean("loop")
    gain = (mean["overlap"] - mean["overlap_even"]).transpose("head", "selector")
    if not float(gain.max()) > 0:
        text = f"None of {len(result.heads)} heads looks at any selector more than even attention."
        return Finding(text, value="none")
    best = mean.isel(gain.argmax(["head", "selector"]))
    value = percent(best["overlap"].item())
    text = (
        f"Of {len(result.heads)} heads, {best['head'].item()} comes nearest to a selector: its "
        f"attention overlaps by {value} with that of “{best['selector'].item()}” over all "
        f"loops, against {percent(best['overlap_even'].item())} if attention were spread evenly."
    )
    return Finding(text, value=value)


@figures_of.register
def _(result: HeadMatch) -> list[Figure]:
    """Overlap of each head with each selector, beside its controls."""
    names = [_short(name, k) for k, name in enumerate(result.selectors)]
    mean = result.data.mean("loop").assign_coords(selector=names, head=result.heads)
    plot = heatmap_panels(
        {
            "overlap": mean["overlap"],
            "mean pattern": mean["overlap_by_position"],
            "even attention": mean["overlap_even"].broadcast_like(mean["overlap"]),
            "mass on selected": mean["mass"],
        },
        value_title="share",
        scale="mass",
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
            data=result.to_dataframe(),
        )
    ]


def _found(result: HeadMatch) -> str:
    """The head of each selector, or all that compute it, in words."""
    said = []
    for k, (name, exact) in enumerate(zip(result.selectors, result.computes)):
        heads = f"{', '.join(exact)} (exactly)" if exact else result.assigned[k]
        said.append(f"{_short(name, k)}: {heads or 'none'}")
    return "; ".join(said)


def _short(name: str, number: int) -> str:
    """A name that fits beside an axis; its number keeps it apart from others."""
    plain = name.replace("_", " ")
    return plain if len(plain) <= _MAX_NAME else f"{plain[: _MAX_NAME - 6]}… ({number})"
