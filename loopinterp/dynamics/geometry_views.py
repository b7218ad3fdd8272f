"""What a study of geometry says and shows."""

from __future__ import annotations

import numpy as np
import xarray as xr

from loopinterp.dynamics.geometry import EMBEDDING, LIMITS, GeometryResult
from loopinterp.dynamics.measures import SETTLED
from loopinterp.dynamics.rounding import with_rounding
from loopinterp.dynamics.trajectory_figures import CLASSES, plane_figure, space_figure_of
from loopinterp.intervals import ESTIMATE, band_of
from loopinterp.plotting import (
    LinePanel,
    Reference,
    Series,
    bars_with_intervals,
    line_panels,
)
from loopinterp.results import Figure, Finding, figures_of, findings_of, percent, tidy

SECTION = "limits"

ONE_POINT = 1e-3
"""Spread, relative to the size of the states, up to which a set counts as one point."""


@findings_of.register
@with_rounding
def _(result: GeometryResult) -> list[Finding]:
    """How trajectories end, in how many directions the states lie, and about the layers."""
    return [_classes(result), _dimension(result), _layers(result)]


def _classes(result: GeometryResult) -> Finding:
    counts = result.classes()
    total = int(counts.sum())
    each = {str(kind): int(counts.sel(settling=kind).sum()) for kind in counts["settling"].values}
    exact = float(result.exact_match().isel(loop=-1).sel({ESTIMATE: "value"}))
    said = {"settling": "settle", "marginal": "are marginal", "drifting": "drift or turn"}
    shares = ", ".join(f"{percent(n / total)} {said[kind]}" for kind, n in each.items() if n)
    text = f"Of {total} trajectories of tokens over {result.n_loops} loops {shares}; " + (
        f"{percent(exact)} of the answers are right at the end."
        if (result.data["right"] >= 0).any()
        else "the readout gives one number, so no answer is right or wrong."
    )
    if n_wrong := int(counts.sel(settling="settling", answer="wrong")):
        text += f" {n_wrong} of the settling ones settle on a wrong answer."
    settles = each["settling"] / total
    return Finding(text, value=f"{percent(settles)} settling", good=settles >= 0.99)


def _dimension(result: GeometryResult) -> Finding:
    last = result.data.isel(loop=-1)
    rank, spread = float(last["rank"]), float(last["spread"])
    size, embedded = (float(last[f"set_{name}"].sel(set=EMBEDDING)) for name in ("size", "rank"))
    if np.isnan(rank):
        text = "The states leave the finite numbers, so their dimension is not known."
        return Finding(text, value="not finite", good=False)
    if spread <= ONE_POINT:
        text = (
            f"After {result.n_loops} loops the states of all {size:.0f} tokens lie within "
            f"{spread:.1g} of their size of one point: nothing of the input is left in them but "
            "what is small."
        )
        return Finding(text, value="one point", good=False)
    chance = float(last["control_rank"].sel(set=EMBEDDING).mean())
    text = (
        f"The states of {size:.0f} tokens lie in effectively {rank:.1f} directions after "
        f"{result.n_loops} loops (participation ratio {float(last['participation']):.1f}); as many "
        f"Gaussian vectors would lie in {chance:.1f}, and the embeddings there in {embedded:.1f}."
    )
    n_limits = int(last["set_size"].sel(set=LIMITS))
    if n_limits:
        of_limits = float(last["set_rank"].sel(set=LIMITS))
        text += f" The {n_limits} limits that were found lie in {of_limits:.1f}."
    return Finding(text, value=f"{rank:.1f} directions")


def _layers(result: GeometryResult) -> Finding:
    if result.no_layers:
        text = f"Limits of layers inside the loop are not compared: {result.no_layers}."
        return Finding(text, value="not compared")
    rests, n_layers = result.rests(), result.data.sizes["layer"]
    if not rests.any():
        text = (
            f"In no example do all tokens settle, so it cannot be said whether the {n_layers} "
            "layers of the block have limits of their own."
        )
        return Finding(text, value="no limits of layers", good=False)
    residual = result.data["layer_residual"].isel(loop=-1, batch=rests.values)
    moved = float(residual.median("batch").max("layer"))
    apart, cosine = (
        result.of_pairs(f"layer_{name}").isel(batch=rests.values) for name in ("distance", "cosine")
    )
    apart = apart.median(("batch", "pos"))
    nearest = apart["pair"][int(apart.argmin("pair"))].item()
    measured = (
        f"layers {nearest} are nearest, {float(apart.min()):.2g} of their size apart in the "
        f"median, while the last loop moves none by more than {moved:.1g}; the least cosine of any "
        f"two at a token is {float(cosine.min()):.2f}"
    )
    where = f"In the {int(rests.sum())} of {rests.size} examples in which all tokens settle"
    if float(apart.min()) > 10 * max(moved, ONE_POINT):
        text = (
            f"{where}, each of the {n_layers} layers comes to a limit of its own, so the block "
            f"goes round a cycle of distinct points: {measured}."
        )
        return Finding(text, value="distinct limits")
    text = f"{where}, the limits of its layers are not told apart: {measured}."
    return Finding(text, value="layers not told apart")


@figures_of.register
def _(result: GeometryResult) -> list[Figure]:
    """Classes, dimension by loop, trajectories in two and three dimensions, layers."""
    figures = [class_figure(result), rank_figure(result)]
    if result.data["path"].notnull().any():
        figures.append(plane_figure(result))
        if result.data.sizes["component"] > 2:
            figures.append(space_figure_of(result))
    return figures if result.no_layers else [*figures, layer_figure(result)]


def class_figure(result: GeometryResult) -> Figure:
    """Tokens of each class, by whether their answer is right at the end."""
    counts = result.classes()
    shades = {"right": "green", "wrong": "red", "not asked": "grey"}
    bars = [
        Series.of(f"{name} at the end", counts.sel(answer=name), colour=shade)
        for name, shade in shades.items()
        if name != "not asked" or counts.sel(answer=name).any()
    ]
    return Figure(
        title="Do the trajectories end?",
        plot=bars_with_intervals(bars, value_title="tokens"),
        caption=f"How the updates of each token fall over the second half of the run. {CLASSES}",
        control="Bars are split by accuracy: whether the answer at that token is right at the end.",
        data=tidy({"tokens": counts}),
    )


def rank_figure(result: GeometryResult) -> Figure:
    """Effective rank and participation ratio by loop, above the spread and exact match."""
    loops = slice(1, None)
    lines = {name: result.data[name].sel(loop=loops) for name in ("rank", "participation")}
    spread, exact = (
        values.sel(loop=loops) for values in (result.data["spread"], result.exact_match())
    )
    beside = result.data["set_rank"]
    levels = {
        "as many Gaussian vectors": result.data["control_rank"].mean("draw").sel(set=EMBEDDING),
        "embeddings": beside.sel(set=EMBEDDING),
        "limits": beside.sel(set=LIMITS),
    }
    flat = [
        Series.of(name, xr.full_like(lines["rank"], float(value)), control=True, markers=False)
        for name, value in levels.items()
        if float(value) > 0
    ]
    rank = Series.of("effective rank", lines["rank"])
    ratio = Series.of("participation ratio", lines["participation"])
    panels = [
        LinePanel([rank, ratio, *flat], "directions", y_log=True),
        LinePanel([Series.of("spread", spread, colour="magenta")], "spread"),
        LinePanel(
            [Series.of("exact match", exact, colour="green")], "exact match", y_range=(0, 1.03)
        ),
    ]
    table = tidy({**lines, "spread": spread})
    share = exact.sel({ESTIMATE: "value"}).to_series()
    return Figure(
        title="In how many directions do the states lie?",
        plot=line_panels(panels, x_title="loops"),
        caption=(
            "Above: effective rank and participation ratio of the states of all tokens about their "
            "mean. Middle: how far they are from the mean, over their size; near 0 they are one "
            "point, whatever the rank of what is left. Below: exact match if read at that loop."
        ),
        control=(
            "Dashed: the effective rank of as many Gaussian vectors, beyond which so few states "
            "cannot go; of the embeddings at the same tokens, with which the input enters; and of "
            "the limits found."
        ),
        data=table.assign(exact_match=table["loop"].map(share)),
    )


def layer_figure(result: GeometryResult) -> Figure:
    """Residual of the state after each layer by loop, above exact match."""
    loops = slice(2, None)
    residual = band_of(result.data["layer_residual"].sel(loop=loops), "batch")
    positive = residual.where(residual > 0)
    lines = Series.each(positive, "layer", lambda layer: f"layer {layer}", in_order=True)
    exact = result.exact_match().sel(loop=loops)
    panels = [
        LinePanel(
            lines, "relative residual", y_log=True, references=[Reference(SETTLED, "settled")]
        ),
        LinePanel(
            [Series.of("exact match", exact, colour="green")], "exact match", y_range=(0, 1.03)
        ),
    ]
    apart = result.of_pairs("layer_distance").median(("batch", "pos"))
    cosine = result.of_pairs("layer_cosine").median(("batch", "pos"))
    ends = {"nearest": int(apart.argmin("pair")), "farthest": int(apart.argmax("pair"))}
    pairs = "; ".join(
        f"{name}, layers {apart['pair'][k].item()}: {float(apart[k]):.2g}, {float(cosine[k]):.2f}"
        for name, k in ends.items()
    )
    table, share = tidy({"residual": residual}), exact.sel({ESTIMATE: "value"}).to_series()
    return Figure(
        title="Does each layer have a limit?",
        plot=line_panels(panels, x_title="loops"),
        caption=(
            "How far a loop moves the state after each layer of the block, over its size (median "
            "of the examples, band: 80% of them). Below: exact match if read at that loop."
        ),
        control=(
            "Layers that rest need not rest at different states. Distance over size, and cosine, "
            f"of the states after two layers in the last loop (medians of the tokens): {pairs}."
        ),
        data=table.assign(exact_match=table["loop"].map(share)),
    )
