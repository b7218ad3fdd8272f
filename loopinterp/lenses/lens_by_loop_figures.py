"""What a study of lenses says and shows."""

from __future__ import annotations

import numpy as np

from loopinterp.core.results import Figure, Finding, figures_of, findings_of, tidy
from loopinterp.core.text import percent
from loopinterp.figures import LinePanel, Reference, Series, heatmap_panels, line_panels
from loopinterp.lenses.figures import over_examples
from loopinterp.lenses.fitted_lens import STATE
from loopinterp.lenses.lens_by_loop import LensResult

NAMES = {
    "logit": "the logit lens",
    "coda": "the model's own readout",
    "tuned": "the tuned lens",
    "jacobian": "the Jacobian lens",
}
_CONTROLS = {
    "plain": "final norm and unembedding alone",
    "coda": "the model's own readout, with its coda",
    "shuffled": "components of the state shuffled",
}


@findings_of.register
def _(result: LensResult) -> list[Finding]:
    """When the answer is there; whether the lens is surer than right; what the controls say."""
    top = result.top.sel(layer=STATE)
    settled = result.data["settled"].where(result.asked)
    half = float(settled.quantile(0.5, method="lower"))
    lens = NAMES[result.lens]
    if result.lens == "logit" and not result.has_coda:
        lens += " (the model's own readout, as it has no coda)"
    if result.lens == "coda":
        lens += " (the coda lens)" if result.has_coda else " (logit and coda lens: it has no coda)"
    text = (
        f"Through {lens} the {_target(result)} is on top at {percent(top[1])} of positions after 1 "
        f"loop, at {percent(top[-1])} after {result.n_loops}; readings stay from loop {half:.0f} "
        f"on at half of them, from loop {float(settled.max()):.0f} on at all."
    )
    findings = [Finding(text, value=f"loop {half:.0f}"), *_beyond_chance(result)]
    between = slice(1, result.n_loops - 1)
    if "transfer_kl" in result.data:
        kl = result.data["transfer_kl"].mean("batch").sel(translator=between, applied=between)
        if len(kl) >= 2:
            other = kl.values[~np.eye(len(kl), dtype=bool)].mean()
            text = (
                f"Read with its own map a state is {_nats(kl.values.diagonal().mean())} from the "
                f"last loop on average, and {_nats(other)} with that of another loop."
            )
            findings.append(Finding(text))
    if result.of_other_weights:
        text = f"{_opening(result)} was fitted on other weights than those that it reads here."
        findings.append(Finding(text, good=False))
    return findings


def _beyond_chance(result: LensResult) -> list[Finding]:
    """The loops at which one distribution for all is closer to the end than the reading is."""
    kl = result.data["reading_kl"].sel(layer=STATE).mean("batch")
    unigram = float(result.data["unigram_kl"].mean())
    lens_kl, loops = kl.sel(reading="lens"), result.data["loop"].values
    worse = [int(t) for t in loops[1:-1] if float(lens_kl.sel(loop=t)) > 1.1 * unigram]
    if worse:
        top = result.top.sel(layer=STATE, loop=worse[0])
        majority = result.data["majority_top"].mean()
        entropy = result.data["entropy"].sel(layer=STATE, loop=worse[0]).where(result.asked).mean()
        text = (
            f"After loop{'s' * (len(worse) > 1)} {_ranges(worse)} {NAMES[result.lens]} is further "
            "from the last loop than one distribution for all is "
            f"({_nats(lens_kl.sel(loop=worse[0]))} against {_nats(unigram)} after loop {worse[0]}; "
            f"right at {percent(top)}, one class for all at {percent(majority)}, entropy "
            f"{_nats(entropy)}). {_intermediate(result, worse)}"
        )
        return [Finding(text)]
    between = lens_kl[1:-1]
    if not between.size:
        return []
    shuffled = kl.sel(reading="shuffled")[1:-1].mean()
    text = (
        f"{_opening(result)} is {_nats(between.mean())} from the last loop on average over the "
        f"loops before it, against {_nats(shuffled)} with the state's components shuffled and "
        f"{_nats(unigram)} for one distribution for all."
    )
    return [Finding(text)]


def _intermediate(result: LensResult, loops: list[int]) -> str:
    """What the distance from the end says of the reading: more where the state's value is known."""
    if "expected_top" in result.data:
        least = float(result.data["expected_top"].sel(loop=loops).min())
        return (
            "What the model holds after each of these loops is known, and the lens reads it at "
            f"{percent(least)} of positions or more: the distance is how far the computation has "
            "still to go, and none of the lens."
            if least >= 0.99
            else f"What the model holds there is known, and the lens reads it at {percent(least)} "
            "of positions at worst."
        )
    return (
        "A state that holds an intermediate value is as far from the end as one that the lens "
        "misreads; this distance does not tell them apart."
    )


def _opening(result: LensResult) -> str:
    """The name of the lens at the beginning of a sentence."""
    return NAMES[result.lens].replace("the", "The", 1)


def _target(result: LensResult) -> str:
    return "right answer" if result.targets else "answer of the last loop"


def _nats(value: object) -> str:
    return f"{float(value):.2f} nats"  # type: ignore[arg-type]


def _ranges(loops: list[int]) -> str:
    """Numbers as spans: [1, 2, 3, 5] is "1 to 3, 5"."""
    spans: list[list[int]] = []
    for t in loops:
        if spans and t == spans[-1][-1] + 1:
            spans[-1].append(t)
        else:
            spans.append([t])
    return ", ".join(f"{s[0]} to {s[-1]}" if len(s) > 1 else str(s[0]) for s in spans)


@figures_of.register
def _(result: LensResult) -> list[Figure]:
    """Readings by loop beside their controls, and the wanted class by loop and position."""
    figures = [_by_loop(result), _by_position(result)]
    if "transfer_kl" in result.data:
        figures.append(_transfer(result))
    return figures


def _by_loop(result: LensResult) -> Figure:
    panels, columns = [], {}
    majority = float(result.data["majority_top"].mean())
    unigram = float(result.data["unigram_kl"].mean())
    for name, title, reference, y_range in (
        ("reading_top", "wanted class on top", Reference(majority, "always the same"), (0, 1.03)),
        ("reading_kl", "KL to the last loop, nats", Reference(unigram, "one for all"), None),
    ):
        means = over_examples(result.data[name])
        lines, lens = [], NAMES[result.lens].removeprefix("the ")
        for reading in means["reading"].values:
            # Of controls the state alone.
            for layer in means["layer"].values if reading == "lens" else [STATE]:
                name_of_lens = lens if layer == STATE else f"{lens}, {layer}"
                lines.append(
                    Series.of(
                        _CONTROLS.get(reading, name_of_lens),
                        means.sel(layer=layer, reading=reading, drop=True),
                        control=reading != "lens",
                    )
                )
        panels.append(LinePanel(lines, title, y_range=y_range, references=[reference]))
        columns[name] = means
    return Figure(
        title=f"{_opening(result)} by loop",
        plot=line_panels(panels, x_title="loop"),
        caption=(
            f"Above, the share of positions asked at which the {_target(result)} is on top if the "
            "state is read after that many loops; below, how far the reading is from the last "
            f"loop's. Means over {result.data.sizes['batch']} examples with 95% intervals; loop 0 "
            "is the initial state."
        ),
        control=(
            "Grey and dashed: "
            + "; ".join(_CONTROLS[r] for r in result.data["reading"].values if r != "lens")
            + ". Dotted: the most frequent class everywhere, and the mean of what the last loop "
            "says, which read nothing of the state."
        ),
        data=tidy(columns).round(4),
    )


def _by_position(result: LensResult) -> Figure:
    share = result.data["probability"].sel(layer=STATE, drop=True).mean("batch")
    settled = result.data["settled"].where(result.asked).mean("batch")
    plot = heatmap_panels(
        {"": share},
        value_title="probability of the wanted class",
        x_title="position",
        y_title="loop",
        scale="mass",
    )
    return Figure(
        title="The wanted class by position",
        plot=plot,
        caption=(
            f"Mean probability that the reading gives to the {_target(result)}; positions where "
            "nothing is asked stay empty."
        ),
        control="A lens that reads nothing gives every row the same colour at a position.",
        data=tidy({"probability": share, "settled": settled.broadcast_like(share)}).round(4),
    )


def _transfer(result: LensResult) -> Figure:
    kl = result.data["transfer_kl"].mean("batch")
    kl = kl.assign_coords({axis: list(map(str, kl[axis].values)) for axis in kl.dims})
    plot = heatmap_panels(
        {"": kl},
        value_title="KL to the last loop, nats",
        x_title="loop that is read",
        y_title="loop whose map reads it",
        square=True,
    )
    return Figure(
        title="Maps of other loops",
        plot=plot,
        caption=(
            "How far from the last loop a state is read with each loop's map; its own is on the "
            f"diagonal. The map of loop {result.n_loops} is the identity."
        ),
        control="Columns of one colour are states that any of the maps reads as well as their own.",
        data=tidy({"kl": kl}).round(4),
    )
