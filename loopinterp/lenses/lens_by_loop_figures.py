"""What a study of lenses says and shows."""

from __future__ import annotations

import numpy as np
import xarray as xr

from loopinterp.core.intervals import ESTIMATE, mean_estimate
from loopinterp.core.results import Figure, Finding, figures_of, findings_of, tidy
from loopinterp.core.text import percent
from loopinterp.figures import LinePanel, Reference, Series, heatmap_panels, line_panels
from loopinterp.lenses.fitted_lens import STATE
from loopinterp.lenses.lens_by_loop import LensResult

_FURTHER = 1.1
"""How many times further off than one distribution for all a reading is that is said to be so."""

_READ = 0.99
"""Share of known intermediate values from which on a lens is said to read them."""

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
    return [_arrival(result), *_beyond_chance(result), *_others_map(result), *_others(result)]


def _arrival(result: LensResult) -> Finding:
    top = result.top.sel(layer=STATE)
    has_target = result.asked
    settled = result.data["settled"].where(has_target)
    half = float(settled.quantile(0.5, method="lower"))
    thing = "right answer" if result.targets else "answer of the last loop"
    lens = NAMES[result.lens] + _also(result)
    text = (
        f"Through {lens} the {thing} is on top at {percent(top[1])} of positions after 1 loop, at "
        f"{percent(top[-1])} after {result.n_loops}; readings stay from loop {half:.0f} on at half "
        f"of them, from loop {float(settled.max()):.0f} on at all."
    )
    return Finding(text, value=f"loop {half:.0f}")


def _beyond_chance(result: LensResult) -> list[Finding]:
    """The loops at which one distribution for all is closer to the end than the reading is."""
    kl = result.data["reading_kl"].sel(layer=STATE).mean("batch")
    unigram = float(result.data["unigram_kl"].mean())
    lens_kl, loops = kl.sel(reading="lens"), result.data["loop"].values
    worse = [int(t) for t in loops[1:-1] if float(lens_kl.sel(loop=t)) > _FURTHER * unigram]
    lens = _opening(result)
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
        f"{lens} is {_nats(between.mean())} from the last loop on average over the loops before "
        f"it, against {_nats(shuffled)} with the state's components shuffled and "
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
            if least >= _READ
            else f"What the model holds there is known, and the lens reads it at {percent(least)} "
            "of positions at worst."
        )
    return (
        "A state that holds an intermediate value is as far from the end as one that the lens "
        "misreads; this distance does not tell them apart."
    )


def _others_map(result: LensResult) -> list[Finding]:
    """Whether the loops between the first and the last need maps of their own."""
    if "transfer_kl" not in result.data:
        return []
    between = slice(1, result.n_loops - 1)
    kl = result.data["transfer_kl"].mean("batch").sel(translator=between, applied=between).values
    if len(kl) < 2:
        return []
    own_map = kl.diagonal().mean()
    other = kl[~np.eye(len(kl), dtype=bool)].mean()
    text = (
        f"Read with its own map a state is {_nats(own_map)} from the last loop on average, and "
        f"{_nats(other)} with that of another loop."
    )
    return [Finding(text)]


def _others(result: LensResult) -> list[Finding]:
    """Whether the lens is another model's."""
    if not result.of_other_weights:
        return []
    text = f"{_opening(result)} was fitted on other weights than those that it reads here."
    return [Finding(text, good=False)]


def _also(result: LensResult) -> str:
    """What else a lens is that needs no fit, in brackets."""
    if result.lens == "logit" and not result.has_coda:
        return " (the model's own readout, as it has no coda)"
    if result.lens == "coda":
        return " (the coda lens)" if result.has_coda else " (logit and coda lens: it has no coda)"
    return ""


def _opening(result: LensResult) -> str:
    """The name of the lens at the beginning of a sentence."""
    return NAMES[result.lens].replace("the", "The", 1)


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
        means = xr.apply_ufunc(
            mean_estimate,
            result.data[name],
            input_core_dims=[["batch"]],
            output_core_dims=[[ESTIMATE]],
        ).assign_coords({ESTIMATE: ["value", "low", "high"]})
        lines = [
            Series.of(_line(result, layer, reading), _along(means, layer, reading), control=control)
            for reading in means["reading"].values
            for layer in means["layer"].values
            if not (control := reading != "lens") or layer == STATE
        ]
        panels.append(LinePanel(lines, title, y_range=y_range, references=[reference]))
        columns[name] = means
    plot = line_panels(panels, x_title="loop")
    return Figure(
        title=f"{_opening(result)} by loop",
        plot=plot,
        caption=(
            "Above, the share of positions asked at which the "
            f"{'right answer' if result.targets else 'answer of the last loop'} is the most "
            "probable one if the state is read after that many loops; below, how far what is read "
            f"lies from what the last loop says. Means over {result.data.sizes['batch']} examples "
            "with 95% intervals; loop 0 is the initial state."
        ),
        control=(
            "Grey and dashed: "
            + "; ".join(_CONTROLS[r] for r in result.data["reading"].values if r != "lens")
            + ". Dotted: the most frequent class everywhere, and the mean of what the last loop "
            "says, which read nothing of the state."
        ),
        data=tidy(columns).round(4),
    )


def _line(result: LensResult, layer: str, reading: str) -> str:
    if reading != "lens":
        return _CONTROLS[reading]
    name = NAMES[result.lens].removeprefix("the ")
    return name if layer == STATE else f"{name}, {layer}"


def _along(means: xr.DataArray, layer: str, reading: str) -> xr.DataArray:
    return means.sel(layer=layer, reading=reading, drop=True)


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
            "Mean probability that the reading gives to the "
            f"{'right answer' if result.targets else 'answer of the last loop'}; positions where "
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
            "How far from the last loop a state is read with the map of another loop. Along the "
            f"diagonal, its own. The map of loop {result.n_loops} is the identity."
        ),
        control="Columns of one colour are states that any of the maps reads as well as their own.",
        data=tidy({"kl": kl}).round(4),
    )
