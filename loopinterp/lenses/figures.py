"""Findings and figures of lenses, attention and early exits."""

from __future__ import annotations

from itertools import groupby
from typing import SupportsFloat

import numpy as np
import xarray as xr

from loopinterp.core.intervals import ESTIMATE, mean_of, share_of
from loopinterp.core.results import Figure, Finding, figures_of, findings_of, tidy
from loopinterp.core.text import percent
from loopinterp.dynamics.convergence_figures import float32_note
from loopinterp.figures import (
    LinePanel,
    Reference,
    Series,
    by_head,
    head_lines,
    heatmap_panels,
    line_figure,
    line_panels,
    loop_slider_figure,
)
from loopinterp.lenses.attention_by_loop import AttentionResult
from loopinterp.lenses.exits_by_loop import ExitResult
from loopinterp.lenses.fitted_lens import STATE
from loopinterp.lenses.lens_by_loop import LensResult

_LENSES = {
    "logit": "logit lens",
    "coda": "model's own readout",
    "tuned": "tuned lens",
    "jacobian": "Jacobian lens",
}
_LENS_CONTROLS = {
    "plain": "final norm and unembedding alone",
    "coda": "the model's own readout, with its coda",
    "shuffled": "state components shuffled",
}


@findings_of.register
def _(result: LensResult) -> list[Finding]:
    top, lens = result.top.sel(layer=STATE), _LENSES[result.lens]
    converged = result.data["settled"].where(result.asked)
    half = float(converged.quantile(0.5, method="lower"))
    same = {"logit": "model's own readout", "coda": "logit lens"}.get(result.lens)
    note = f" (the same as the {same}, as there is no coda)" if same and not result.has_coda else ""
    text = (
        f"The {lens}{note} has the {_target(result)} on top at {percent(top[1])} of positions "
        "after 1 loop"
    )
    if result.n_loops > 1:
        text += (
            f", at {percent(top[-1])} after {result.n_loops}. Half of the positions have their "
            f"final reading from loop {half:.0f} on, all from loop {float(converged.max()):.0f}"
        )
    text += "."
    findings = [Finding(text, value=f"loop {half:.0f}"), *_distance(result)]
    if "transfer_kl" in result.data:
        between = slice(1, result.n_loops - 1)
        kl = result.data["transfer_kl"].mean("batch").sel(translator=between, applied=between)
        if len(kl) >= 2:
            other = kl.values[~np.eye(len(kl), dtype=bool)].mean()
            text = (
                f"Read through its own map, a state is {_nats(kl.values.diagonal().mean())} from "
                f"the last loop; read through another loop's map, {_nats(other)}."
            )
            findings.append(Finding(text))
    if result.of_other_weights:
        text = f"The {lens} was fitted on other weights than those of the model that it reads."
        findings.append(Finding(text, good=False))
    share = result.decided_by_rounding()
    shown = None if share is None else percent(share)
    compared = "have the same readings."
    if share:
        compared = f"have another reading in {shown} of cases. There rounding decides."
    return [*findings, *float32_note(result, shown, compared)]


def _distance(result: LensResult) -> list[Finding]:
    """Divergence of readings before the last loop, compared with the mean distribution."""
    kl = result.data["reading_kl"].sel(layer=STATE).mean("batch")
    unigram = float(result.data["unigram_kl"].mean())
    lens_kl, lens = kl.sel(reading="lens"), _LENSES[result.lens]
    loops = result.data["loop"].values[1:-1]
    if not len(loops):
        return []
    far = [int(t) for t in loops if float(lens_kl.sel(loop=t)) > 1.1 * unigram]
    if not far:
        text = (
            f"Before the last loop the {lens} is {_nats(lens_kl[1:-1].mean())} from the final "
            f"distribution on average, and {_nats(kl.sel(reading='shuffled')[1:-1].mean())} with "
            f"shuffled state components. The mean final distribution is {_nats(unigram)} away."
        )
        return [Finding(text)]
    # Numbers as spans: [1, 2, 3, 5] is "1 to 3, 5".
    runs = groupby(enumerate(far), lambda numbered: numbered[1] - numbered[0])
    spans = [[t for _, t in run] for _, run in runs]
    after = ", ".join(f"{s[0]} to {s[-1]}" if len(s) > 1 else str(s[0]) for s in spans)
    text = (
        f"After loop{'s' * (len(far) > 1)} {after} the {lens} is further from the final "
        f"distribution than the mean distribution is: {_nats(lens_kl.sel(loop=far[0]))} against "
        f"{_nats(unigram)} after loop {far[0]}. "
    )
    known = result.data["expected_top"].sel(loop=far) if "expected_top" in result.data else None
    if known is None or known.isnull().all():
        text += "Either the state is misread, or it holds an intermediate value."
    else:
        text += f"It reads the known intermediate value at {percent(known.min())} of positions "
        text += "or more."
    return [Finding(text)]


def _target(result: LensResult) -> str:
    return "right answer" if result.targets else "answer of the last loop"


def _nats(value: SupportsFloat) -> str:
    return f"{float(value):.2f} nats"


@figures_of.register
def _(result: LensResult) -> list[Figure]:
    figures = [_by_loop(result)]
    share = result.data["probability"].sel(layer=STATE, drop=True).mean("batch")
    if float(share.max() - share.min()) > 0.05:  # else it is one colour
        converged = result.data["settled"].where(result.asked).mean("batch")
        by_position = Figure(
            title="Target class by position",
            plot=heatmap_panels(
                {"": share},
                value_title="probability of the target class",
                x_title="position",
                y_title="loop",
                scale="mass",
            ),
            caption=(
                f"Mean probability that the reading gives to the {_target(result)}. Empty: "
                "positions without a target."
            ),
            control="A lens that ignores the state gives all loops the same colour at a position.",
            data=tidy({"probability": share, "settled": converged.broadcast_like(share)}).round(4),
        )
        figures.append(by_position)
    if "transfer_kl" in result.data:
        kl = result.data["transfer_kl"].mean("batch")
        kl = kl.assign_coords({axis: list(map(str, kl[axis].values)) for axis in kl.dims})
        transfer = Figure(
            title="Maps of other loops",
            plot=heatmap_panels(
                {"": kl},
                value_title="KL to the last loop, nats",
                x_title="loop that is read",
                y_title="loop of the map",
                square=True,
            ),
            caption=(
                "Divergence of each loop's reading from the last loop's, through the map of each "
                f"loop; on the diagonal through its own. The map of loop {result.n_loops} is the "
                "identity."
            ),
            control=(
                "In a column of one colour, every map reads the state as well as its own map does."
            ),
            data=tidy({"kl": kl}).round(4),
        )
        figures.append(transfer)
    return figures


def _by_loop(result: LensResult) -> Figure:
    panels, columns, lens = [], {}, _LENSES[result.lens]
    majority = float(result.data["majority_top"].mean())
    unigram = float(result.data["unigram_kl"].mean())
    for name, title, reference, y_range in (
        ("reading_top", "target class on top", Reference(majority, "majority class"), (0, 1.03)),
        ("reading_kl", "KL to the last loop, nats", Reference(unigram, "mean distribution"), None),
    ):
        means = mean_of(result.data[name], "batch")
        lines = []
        for reading in means["reading"].values:
            # Controls are drawn of the state alone.
            for layer in means["layer"].values if reading == "lens" else [STATE]:
                name_of_lens = lens if layer == STATE else f"{lens}, {layer}"
                line = means.sel(layer=layer, reading=reading, drop=True)
                label = _LENS_CONTROLS.get(reading, name_of_lens)
                lines.append(Series.of(label, line, control=reading != "lens"))
        panels.append(LinePanel(lines, title, y_range=y_range, references=[reference]))
        columns[name] = means
    controls = [_LENS_CONTROLS[r] for r in result.data["reading"].values if r != "lens"]
    return Figure(
        title=f"{lens[0].upper()}{lens[1:]} by loop",
        plot=line_panels(panels, x_title="loop"),
        caption=(
            f"Above: share of positions with the {_target(result)} on top. Below: divergence of "
            f"the reading from the last loop's. Means over {result.data.sizes['batch']} examples "
            "with 95% intervals; loop 0 is the initial state."
        ),
        control=(
            f"Grey and dashed: {'; '.join(controls)}. Dotted: the majority class, and the mean "
            "final distribution, neither of which reads the state."
        ),
        data=tidy(columns).round(4),
    )


@findings_of.register
def _(result: AttentionResult) -> list[Finding]:
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
        if low <= even:
            continue
        where = place(at) if axis == "distance" else _key(result, at)
        means = ["loops"] if result.data.sizes["loop"] > 1 else []
        means += ["query positions"] if axis != "distance" else []
        over = f" (mean over {' and '.join(means)})" if means else ""
        head = str(heads[best["layer"] * result.data.sizes["head"] + best["head"]])
        text = (
            f"{head.capitalize()} gives {percent(value)} of its attention to {where}{over}. "
            f"Even attention would give {percent(even)}."
        )
        finding = Finding(text, value=f"{percent(value)} on {where}")
        clear.append((value - even, finding))
    if clear:
        return [finding for _, finding in sorted(clear, key=lambda one: one[0], reverse=True)]
    text = (
        "No head prefers one offset or one position: none receives clearly more than under even "
        "attention (95% intervals over examples)."
    )
    return [Finding(text, value="no preference")]


def _key(result: AttentionResult, key: int) -> str:
    """A position by its label if all examples have the same input there, else by its number."""
    named = result.fixed[key] and result.labels[key] != str(key)
    return result.labels[key] if named else f"position {key}"


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


@figures_of.register
def _(result: AttentionResult) -> list[Figure]:
    patterns = result.data["patterns"]
    query, key = np.nonzero((patterns > 0).any(("loop", "layer", "head")).values)
    offsets = result.data["distance"].values  # those that some head may see
    within = np.isin(query - key, offsets).all() and abs(offsets).max() < patterns.sizes["key"] - 1
    if not within or len(offsets) > 6:
        return [_patterns(result), _attention_by_loop(result)]
    # A narrow window: its offsets are all there is to see.
    mass, even = by_head(result.data["mass"]), result.data["mass_even"]
    n_heads, panels = result.data.sizes["head"], []
    for k, head in enumerate(mass["head"].values):
        shares = mass.sel(head=head).dropna("distance", how="all")
        lines = Series.each(shares, "distance", name=place)
        # One line for offsets of equal control; [distance] of this head.
        for value in np.unique(even.isel(head=k % n_heads).dropna("distance").round(3)):
            level = xr.full_like(shares["loop"], value, dtype=float)
            lines.append(Series.of("even attention", level, control=True, markers=len(level) == 1))
        panels.append(LinePanel(lines, "attention", title=str(head), y_range=(0, 1.02)))
    by_offset = Figure(
        title="Attention by offset",
        plot=line_panels(panels, x_title="loop", columns=min(len(panels), 4)),
        caption=(
            "The share of attention that each head gives to each offset in its window, mean over "
            f"positions and {result.n_examples} examples with 95% intervals."
        ),
        control="Dashed: even attention, the same to all positions in the window.",
        data=tidy({"mass": result.data["mass"]}).round(4),
    )
    return [by_offset]


def _patterns(result: AttentionResult) -> Figure:
    numbered = result.labels == [str(k) for k in range(len(result.labels))]
    places = [label if numbered else f"{k} · {label}" for k, label in enumerate(result.labels)]
    patterns = by_head(result.data["patterns"]).transpose("loop", "head", "query", "key")
    patterns = patterns.assign_coords(query=places, key=places)
    several = result.data.sizes["loop"] > 1
    return Figure(
        title="Attention patterns by loop" if several else "Attention patterns",
        plot=loop_slider_figure(
            patterns, x_title="key position", y_title="query position", value_title="attention"
        ),
        caption=(
            "Attention of each query position (row, sums to 1) to each key position, in one "
            f"example.{' The slider selects the loop.' if several else ''}"
        ),
        control="Under even attention, all keys that a row may see have one colour.",
        data=tidy({"attention": patterns}).query("attention > 1e-3").round(4),
    )


def _attention_by_loop(result: AttentionResult) -> Figure:
    best, sink = result.strongest()["distance"], result.strongest_sink()
    shares = {f"Attention to {place(best)}": ("mass", {"distance": best})}
    if sink:
        key = {"key": sink["key"]}
        shares[f"Attention to {_key(result, sink['key'])}"] = ("received", key)
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
    preferred = "offset and position" if sink else "offset"
    return Figure(
        title="Preferred offset by loop" if result.data.sizes["loop"] > 1 else "Preferred offset",
        plot=line_panels(panels, x_title="loop"),
        caption=(
            f"The share of attention that each head gives to the most preferred {preferred}, with "
            f"95% intervals over {result.n_examples} examples, and the entropy of its attention "
            "(0 bits: a single position)."
        ),
        control="Dashed: even attention, the same to all positions that may be seen.",
        data=tidy(columns).assign(distance=best),
    )


def _even_lines(even: xr.DataArray, loop: xr.DataArray) -> list[Series]:
    """The control of each head; one line for heads with equal controls."""
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


@findings_of.register
def _(result: ExitResult) -> list[Finding]:
    n_decided = result.decided_by_rounding()
    compared = f"are right in the same {result.per}s at the same loops."
    if n_decided:
        compared = (
            f"read {n_decided} of {result.data.sizes['batch']} {result.per}s right at other loops. "
            "There rounding decides."
        )
    in_float32 = float32_note(result, n_decided, compared)
    best, at = result.best_loop()
    if best == 0:
        text = f"No {result.per} is right after any fixed number of loops up to {result.n_loops}."
        return [Finding(f"{text} Early exits cannot save anything."), *in_float32]
    share, mean = result.oracle()
    right = "right" if result.targets else "to agree with the last loop"
    text = (
        f"A fixed budget of {at} of {result.n_loops} loops gets {percent(best)} of {result.per}s "
        f"{right}. An oracle exit gets {percent(share)} with {mean:.1f} loops on average."
    )
    another = result.data["another"]
    if another.notnull().any() and float(another.mean()) > 0.5:
        text += (
            f" The oracle is no evidence: the answer of another {result.per} appears at some loop "
            f"in {percent(another.mean())}."
        )
    findings = [Finding(text), _rules(result, at)]
    if "weighted_exact" in result.data:
        exact, loops, dealt = (
            result.data[f"weighted_{name}"].mean() for name in ("exact", "loops", "dealt")
        )
        text = (
            f"Answers of all loops, weighted by the gate, are right for {percent(exact)} of "
            f"{result.per}s at a mean exit of {float(loops):.1f}. Weights of other tokens get "
            f"{percent(dealt)}."
        )
        findings.append(Finding(text, value=percent(exact)))
    return [*findings, *in_float32]


def _rules(result: ExitResult, at: int) -> Finding:
    """The rule that matches the best fixed budget of ``at`` loops with fewest loops."""
    costs = {str(rule): result.cheapest(rule) for rule in result.data["rule"].values}
    cheaper = {rule: cost for rule, cost in costs.items() if cost is not None and cost < at}
    if not cheaper:
        budget = f"{at} loop{'s' if at != 1 else ''}"
        return Finding(f"No stopping rule matches the fixed budget of {budget} with fewer loops.")
    rule = min(cheaper, key=cheaper.__getitem__)
    exact, dealt, loops = result.gain(rule)
    text = (
        f"Stopping by {rule} matches the best fixed budget with {cheaper[rule]:.1f} loops on "
        f"average (tolerance chosen on the same data). At {loops:.1f} loops it gets "
        f"{percent(exact)}; random stops get {percent(dealt)}."
    )
    return Finding(text, value=f"{cheaper[rule]:.1f} loops")


@figures_of.register
def _(result: ExitResult) -> list[Figure]:
    names = ("exact", "agreement", "confidence", "entropy", "readout_kl", "norm", "residual")
    data = result.data.isel(loop=slice(1, None))
    means = {name: mean_of(data[name].astype(float), "batch") for name in names}
    ends = np.unique(result.data["answer_loops"]).tolist()
    marks = [Reference(ends[0], "T(n)", "x")] if result.targets and len(ends) == 1 else []
    shares = {
        "exact match": means["exact"],
        "positions that agree with the last loop": means["agreement"],
        "probability of the top class": means["confidence"],
    }
    # On a logarithmic axis an interval that ends below 0 has no place.
    changes = {
        name: means[key].sel({ESTIMATE: "value"})
        for name, key in (("readout KL, nats", "readout_kl"), ("residual", "residual"))
    }
    above, below = ([Series.of(*line) for line in x.items()] for x in (shares, changes))
    panels = [
        LinePanel(above, "share", y_range=(0, 1.03), references=marks),
        LinePanel(below, "change in a loop", y_log=True),
    ]
    by_loop = Figure(
        title="Readings and updates",
        plot=line_panels(panels, x_title="loop"),
        caption=(
            "Above: how right and how confident the readout is after each loop (95% intervals). "
            f"Below: how much readout and state change in that loop. Means over {result.per}s."
        ),
        control="A stopping rule works if its signal changes at the loop where exact match rises.",
        data=tidy(means).round(4),
    )
    return [_spent(result), by_loop]


def _spent(result: ExitResult) -> Figure:
    def swept(
        name: str, rule: str, values: str, *, first: int = 0, control: bool = False
    ) -> Series:
        at = result.data.sel(rule=rule).isel(step=slice(first, None))
        order = np.argsort(at["swept_loops"].values, kind="stable")
        x, y = (at[each].values[order] for each in ("swept_loops", values))
        return Series(name, x, y, control=control, markers=False)

    rules = [str(rule) for rule in result.data["rule"].values]
    exact = result.data["exact"].isel(loop=slice(1, None))
    if result.per == "example":
        budgets = share_of(exact, "batch")
    else:  # an interval over examples, as tokens of one are alike
        by_example = exact.astype(float).groupby(result.data["example"]).mean()
        budgets = mean_of(by_example, "example")
    share, mean = result.oracle()
    gains = {rule: result.gain(rule) for rule in rules}
    best = max(gains, key=lambda name: gains[name][0] - gains[name][1])
    lines = [
        Series.of("fixed budget", budgets),
        Series("oracle", [mean], [share], markers=True),
        *(swept(rule, rule, "swept_exact", first=1) for rule in rules),
        swept(f"random stops, as many loops as {best}", best, "swept_dealt", control=True),
    ]
    return Figure(
        title="Early exits",
        plot=line_figure(
            lines,
            x_title=f"loops, mean over {result.per}s",
            y_title="exact match" if result.targets else "agreement with the last loop",
            y_range=(0, 1.03),
        ),
        caption=(
            "Each line is a stopping rule with all tolerances, from a stop after one loop to none "
            f"before loop {result.n_loops}. The line with a band (95% interval) is a fixed budget; "
            f"the oracle stops each {result.per} at its first right loop. "
            f"{result.data.sizes['batch']} {result.per}s."
        ),
        control=(
            f"Grey: the stops of the rule with the largest gain, assigned to {result.per}s at "
            f"random. The gap above it is what the rule gains by choosing for each {result.per}."
        ),
        data=tidy(
            {name: result.data[name] for name in ("swept_loops", "swept_exact", "swept_dealt")}
        ).round(4),
    )
