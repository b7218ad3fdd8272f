"""Findings and figures of lenses."""

from __future__ import annotations

from itertools import groupby
from typing import SupportsFloat

import numpy as np

from loopinterp.core.intervals import mean_of
from loopinterp.core.results import Figure, Finding, figures_of, findings_of, tidy
from loopinterp.core.text import percent
from loopinterp.dynamics.convergence_figures import float32_note
from loopinterp.figures import LinePanel, Reference, Series, heatmap_panels, line_panels
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
