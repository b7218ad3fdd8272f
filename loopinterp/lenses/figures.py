"""What the studies of attention and exits say and show."""

from __future__ import annotations

import numpy as np
import xarray as xr

from loopinterp.core.intervals import ESTIMATE, mean_estimate, share_of
from loopinterp.core.results import Figure, Finding, figures_of, findings_of, tidy
from loopinterp.core.text import percent
from loopinterp.figures import (
    LinePanel,
    Reference,
    Series,
    by_head,
    head_lines,
    line_figure,
    line_panels,
    loop_slider_figure,
)
from loopinterp.lenses.attention_by_loop import AttentionResult
from loopinterp.lenses.exits_by_loop import ExitResult

_ATTENTION = "attention"


def over_examples(values: xr.DataArray) -> xr.DataArray:
    """The mean over the axis ``batch``, as an estimate with its 95% interval."""
    estimate = xr.apply_ufunc(
        mean_estimate, values, input_core_dims=[["batch"]], output_core_dims=[[ESTIMATE]]
    )
    return estimate.assign_coords({ESTIMATE: ["value", "low", "high"]})


@findings_of.register
def _(result: AttentionResult) -> list[Finding]:
    """The heads that prefer a distance and a place most, the clearer preference first."""
    preferences = {"mass": result.strongest(), "received": result.strongest_sink()}
    heads = by_head(result.data["entropy"])["head"].values
    clear: list[tuple[float, Finding]] = []
    for name, best in preferences.items():
        if best is None:
            continue
        *_, (axis, at) = best.items()
        share = result.data[name].sel(best).mean("loop")
        value, low = (float(share.sel({ESTIMATE: end})) for end in ("value", "low"))
        even = float(result.data[f"{name}_even"].sel({"head": best["head"], axis: at}))
        if low <= even:  # even attention lies within the interval
            continue
        where = place(at) if axis == "distance" else _key(result, at)
        means = ["loops"] if result.data.sizes["loop"] > 1 else []
        means += ["positions, whatever their distance"] if axis != "distance" else []
        over = f" (mean over {' and '.join(means)})" if means else ""
        head = str(heads[best["layer"] * result.data.sizes["head"] + best["head"]])
        text = (
            f"{head.capitalize()} gives {percent(value)} of its attention to {where}{over}, "
            f"against {percent(even)} if it were spread evenly over what a position may see."
        )
        finding = Finding(text, kind=_ATTENTION, value=f"{percent(value)} on {where}")
        clear.append((value - even, finding))
    if clear:
        return [finding for _, finding in sorted(clear, key=lambda one: one[0], reverse=True)]
    text = (
        "No head clearly prefers a distance or a place: none gives any of them more attention "
        "than if it were spread evenly, by more than the interval over examples."
    )
    return [Finding(text, kind=_ATTENTION, value="no preference")]


def _key(result: AttentionResult, key: int) -> str:
    """A place in words; by what stands there, if that is the same in all examples."""
    named = result.fixed[key] and result.labels[key] != str(key)
    return result.labels[key] if named else f"position {key}"


@figures_of.register
def _(result: AttentionResult) -> list[Figure]:
    """The patterns with their slider, and where heads look by loop."""
    return [_patterns(result), _attention_by_loop(result)]


def _patterns(result: AttentionResult) -> Figure:
    numbered = result.labels == [str(k) for k in range(len(result.labels))]
    places = [label if numbered else f"{k} · {label}" for k, label in enumerate(result.labels)]
    patterns = by_head(result.data["patterns"]).transpose("loop", "head", "query", "key")
    patterns = patterns.assign_coords(query=places, key=places)
    plot = loop_slider_figure(
        patterns, x_title="looked at (key)", y_title="looking (query)", value_title="attention"
    )
    several = result.data.sizes["loop"] > 1
    move = (
        " Move the slider to go from loop to loop; a pattern that no longer changes belongs to a "
        "head that has settled."
    )
    return Figure(
        title="Attention patterns, loop by loop" if several else "Attention patterns",
        section=_ATTENTION,
        plot=plot,
        caption=(
            "One example. Each row is a position, and its colour shows how much it looks at each "
            f"position of the sequence (a row sums to 1).{move if several else ''}"
        ),
        control=(
            "A head without preference colours alike all positions that a row may see; “Where "
            "heads look” measures every head against that, over many examples."
        ),
        data=tidy({"attention": patterns}).query("attention > 1e-3").round(4),
    )


def _attention_by_loop(result: AttentionResult) -> Figure:
    best, sink = result.strongest()["distance"], result.strongest_sink()
    where = place(best)
    shares = {f"Attention to {where}": ("mass", {"distance": best})}
    if sink:
        key = {"key": sink["key"]}
        shares[f"Attention to {_key(result, sink['key'])}, from afar too"] = ("received", key)
    panels, columns = [], {"entropy": result.data["entropy"]}
    for title, (name, at) in shares.items():
        share = result.data[name].sel(at, drop=True)
        even = result.data[f"{name}_even"].sel(at, drop=True)
        lines = [*head_lines(share), *_even_lines(even, share["loop"])]
        panels.append(LinePanel(lines, "attention", title=title, y_range=(0, 1.02)))
        columns |= {name: share, f"{name}_even": even.broadcast_like(result.data["entropy"])}
    entropy, even = result.data["entropy"], result.data["entropy_even"]
    columns |= {"entropy_even": even.broadcast_like(entropy)}
    lines = [*head_lines(entropy), *_even_lines(even, entropy["loop"])]
    panels.append(LinePanel(lines, "bits", title="Entropy of attention"))
    of_sink = ", and to the place that gets most from all positions that may see it" if sink else ""
    return Figure(
        title="Where heads look" + " as loops go on" * (result.data.sizes["loop"] > 1),
        section=_ATTENTION,
        plot=line_panels(panels, x_title="loop"),
        caption=(
            f"Above, the share of attention that each head gives to {where}{of_sink}, with 95% "
            f"intervals over {result.n_examples} examples. Below, how widely a head spreads its "
            "attention: 0 bits is a single position."
        ),
        control=(
            "The dashed grey line is attention spread evenly over the positions that may be seen. "
            "A head on that line has no preference."
        ),
        data=tidy(columns).assign(distance=best),
    )


def _even_lines(even: xr.DataArray, loop: xr.DataArray) -> list[Series]:
    """The control of each head; one line for all heads that may see alike."""
    alike: dict[float, list[str]] = {}
    for head in even.dropna("head"):
        alike.setdefault(float(head), []).append(str(int(head["head"])))
    return [
        Series.of(
            "even attention" if len(alike) == 1 else f"even attention, head {', '.join(heads)}",
            xr.full_like(loop, value, dtype=float),
            control=True,
        )
        for value, heads in alike.items()
    ]


def place(distance: int) -> str:
    """A distance in words.

    Example:
        >>> place(0), place(1), place(-3)
        ('the position itself', 'the left neighbour', '3 positions to the right')
    """
    if distance == 0:
        return "the position itself"
    side = "left" if distance > 0 else "right"
    if abs(distance) == 1:
        return f"the {side} neighbour"
    return f"{abs(distance)} positions to the {side}"


@findings_of.register
def _(result: ExitResult) -> list[Finding]:
    """What an oracle could save, and which rule saves how much of it."""
    best, at = result.best_loop()
    if best == 0:
        text = f"No example is right after any one number of loops up to {result.n_loops}."
        return [Finding(f"{text} There is nothing to be saved by reading it early.")]
    share, mean = result.oracle()
    another = result.data["another"]
    right = "right" if result.targets else "as the last loop does"
    text = (
        f"One number of loops for all reads at best {percent(best)} of the examples {right} ({at} "
        f"of {result.n_loops} loops); reading each at its first such loop, {percent(share)} after "
        f"{mean:.1f} on average"
    )
    if another.notnull().any():
        chance = float(another.mean())
        text += f". Another example's answer turns up at some loop in {percent(chance)}"
        text += ", so that this oracle says little" if chance > 0.5 else ""
    return [Finding(f"{text}."), _rules(result, at)]


def _rules(result: ExitResult, at: int) -> Finding:
    """Whether a rule is as often right as with ``at`` loops for all, with fewer on average."""
    costs = {str(rule): result.cheapest(rule) for rule in result.data["rule"].values}
    cheaper = {rule: cost for rule, cost in costs.items() if cost is not None and cost < at}
    if not cheaper:
        text = (
            f"No rule is as often right with fewer loops on average than {at}, the best number "
            "for all, at any tolerance tried."
        )
        return Finding(text)
    rule = min(cheaper, key=cheaper.__getitem__)
    exact, dealt, loops = result.gain(rule)
    text = (
        f"The rule {rule!r} is as often right with {cheaper[rule]:.1f} loops on average, at the "
        f"best tolerance in hindsight. Stopping after {loops:.1f}, it has {percent(exact)} right, "
        f"and {percent(dealt)} with its stops dealt to the examples at random."
    )
    others = [name for name in costs if name not in cheaper]
    if others:
        text += f" Never so: {', '.join(others)}."
    return Finding(text, value=f"{cheaper[rule]:.1f} loops")


@figures_of.register
def _(result: ExitResult) -> list[Figure]:
    """Right answers against loops spent, and what is read and moves at each loop."""
    return [_spent(result), _exits_by_loop(result)]


def _spent(result: ExitResult) -> Figure:
    def swept(
        name: str, rule: str, values: str, *, first: int = 0, control: bool = False
    ) -> Series:
        at = result.data.sel(rule=rule).isel(step=slice(first, None))
        order = np.argsort(at["swept_loops"].values, kind="stable")
        x, y = (at[each].values[order] for each in ("swept_loops", values))
        return Series(name, x, y, control=control, markers=False)

    rules = [str(rule) for rule in result.data["rule"].values]
    exact = share_of(result.data["exact"].isel(loop=slice(1, None)), "batch")
    share, mean = result.oracle()
    gains = {rule: result.gain(rule) for rule in rules}
    best = max(gains, key=lambda name: gains[name][0] - gains[name][1])
    lines = [
        Series.of("one loop for all", exact),
        *(swept(rule, rule, "swept_exact", first=1) for rule in rules),
        Series("oracle", [mean], [share], markers=True),
        swept(f"stops of {best!r}, dealt at random", best, "swept_dealt", control=True),
    ]
    plot = line_figure(
        lines,
        x_title="loops, mean over examples",
        y_title="exact match" if result.targets else "as after the last loop",
        y_range=(0, 1.03),
    )
    return Figure(
        title="Early exits",
        plot=plot,
        caption=(
            "Each line is a rule with all tolerances, from one at which every example stops at "
            f"once to one at which none does before loop {result.n_loops}; the line with a band is "
            "one number of loops for all, with 95% intervals. The oracle stops each example at its "
            f"first right loop. {result.data.sizes['batch']} examples."
        ),
        control=(
            "Grey: the same numbers of loops as the rule with the greatest gain chose, dealt to "
            "the examples at random. What lies above it is what the rule knows of an example."
        ),
        data=tidy(
            {name: result.data[name] for name in ("swept_loops", "swept_exact", "swept_dealt")}
        ).round(4),
    )


def _exits_by_loop(result: ExitResult) -> Figure:
    names = ("exact", "agreement", "confidence", "entropy", "readout_kl", "norm", "residual")
    data = result.data.isel(loop=slice(1, None))
    means = {name: over_examples(data[name].astype(float)) for name in names}
    ends = np.unique(result.data["answer_loops"]).tolist()
    marks = [Reference(ends[0], "T(n)", "x")] if result.targets and len(ends) == 1 else []
    shares = {
        "exact match": means["exact"],
        "positions as after the last loop": means["agreement"],
        "probability of the class on top": means["confidence"],
    }
    nats = {"entropy": means["entropy"], "KL to the loop before": means["readout_kl"]}
    # Of the cosines, those of the examples whose updates are above rounding.
    moves = {
        "relative residual": means["residual"], "cosine of updates": data["cosine"].mean("batch"),
    }  # fmt: skip
    above, middle, below = ([Series.of(*line) for line in x.items()] for x in (shares, nats, moves))
    panels = [
        LinePanel(above, "share", y_range=(0, 1.03), references=marks),
        LinePanel(middle, "nats"),
        LinePanel(below, "of the state"),
    ]
    return Figure(
        title="Readings and updates",
        plot=line_panels(panels, x_title="loop"),
        caption=(
            "Means over examples with 95% intervals. Entropy and probability say how sure the "
            "readout is; the other lines, how much it and the state still change."
        ),
        control="Exact match: a rule is worth what its signal does where that one rises.",
        data=tidy(means).round(4),
    )
