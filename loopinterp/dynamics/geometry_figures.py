"""What a geometry study says and shows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pandas as pd
import xarray as xr

from loopinterp.core.intervals import band_of
from loopinterp.core.results import Figure, Finding, figures_of, findings_of, tidy
from loopinterp.core.text import percent
from loopinterp.dynamics.convergence_figures import (
    answer_figure,
    exact_panel,
    value_of,
    with_exact,
    with_rounding,
)
from loopinterp.dynamics.geometry import EMBEDDING, LIMITS, GeometryResult
from loopinterp.dynamics.inside_loop import NoLayers
from loopinterp.dynamics.measures import SETTLED
from loopinterp.dynamics.regimes import Regime, SettlingClass
from loopinterp.figures import (
    LinePanel,
    Reference,
    Series,
    joined,
    line_figure,
    line_panels,
    space_figure,
)

_ONE_POINT = 1e-3
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
    exact = float(value_of(result.exact_match().isel(loop=-1)))
    verbs = {"settling": "settle", "marginal": "are marginal", "drifting": "drift or turn"}
    shares = ", ".join(f"{percent(n / total)} {verbs[kind]}" for kind, n in each.items() if n)
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
    if spread <= _ONE_POINT:
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
        reasons = {
            NoLayers.NO_HOOKS.value: "the model has no hooks inside its loop",
            NoLayers.ONE_LAYER.value: "the block has one layer",
        }
        why = reasons.get(result.no_layers, result.no_layers)  # older files have the clause
        text = f"Limits of layers inside the loop are not compared: {why}."
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
    gaps, cosine = (
        result.of_pairs(f"layer_{name}").isel(batch=rests.values) for name in ("distance", "cosine")
    )
    gaps = gaps.median(("batch", "pos"))
    nearest = gaps["pair"][int(gaps.argmin("pair"))].item()
    measured = (
        f"layers {nearest} are nearest, {float(gaps.min()):.2g} of their size apart in the "
        f"median, while the last loop moves none by more than {moved:.1g}; the least cosine of any "
        f"two at a token is {float(cosine.min()):.2f}"
    )
    where = f"In the {int(rests.sum())} of {rests.size} examples in which all tokens settle"
    if float(gaps.min()) > 10 * max(moved, _ONE_POINT):
        text = (
            f"{where}, each of the {n_layers} layers comes to a limit of its own, so the block "
            f"goes round a cycle of distinct points: {measured}."
        )
        return Finding(text, value="distinct limits")
    text = f"{where}, the limits of its layers are not told apart: {measured}."
    return Finding(text, value="layers not told apart")


_CLASSES = (
    "Settling: updates fall geometrically, or are no more than rounding. Marginal: they fall, too "
    "slowly for the loops seen to tell that the path ends. Drifting: they do not fall."
)


@figures_of.register
def _(result: GeometryResult) -> list[Figure]:
    """Classes, dimension by loop, trajectories in two and three dimensions, layers."""
    caption = f"How the updates of each token fall over the second half of the run. {_CLASSES}"
    figures = [
        answer_figure("Do the trajectories end?", caption, result.classes()),
        _ranks(result),
        *(_trajectories(result) if result.data["path"].notnull().any() else []),
    ]
    return figures if result.no_layers else [*figures, _layer_residuals(result)]


def _ranks(result: GeometryResult) -> Figure:
    """Effective rank and participation ratio by loop, above the spread and exact match."""
    data, loops = result.data, slice(1, None)
    lines = {name: data[name].sel(loop=loops) for name in ("rank", "participation", "spread")}
    exact = result.exact_match().sel(loop=loops)
    levels = {
        "as many Gaussian vectors": data["control_rank"].mean("draw").sel(set=EMBEDDING),
        "embeddings": data["set_rank"].sel(set=EMBEDDING),
        "limits": data["set_rank"].sel(set=LIMITS),
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
        LinePanel([Series.of("spread", lines["spread"], colour="magenta")], "spread"),
        exact_panel(exact),
    ]
    return Figure(
        title="In how many directions do the states lie?",
        plot=line_panels(panels, x_title="loops"),
        caption=(
            "Above: effective rank and participation ratio of the states of all tokens about their "
            "mean. Middle: how far they are from the mean, over their size (near 0 they are one "
            "point). Below: exact match if read at that loop."
        ),
        control=(
            "Dashed: the effective rank of as many Gaussian vectors, which bounds that of so few "
            "states; of the embeddings at the same tokens; and of the limits found."
        ),
        data=with_exact(tidy(lines), exact),
    )


def _layer_residuals(result: GeometryResult) -> Figure:
    """Residual of the state after each layer by loop, above exact match."""
    loops = slice(2, None)
    residual = band_of(result.data["layer_residual"].sel(loop=loops), "batch")
    lines = Series.each(residual.where(residual > 0), "layer", "layer {}".format, in_order=True)
    exact = result.exact_match().sel(loop=loops)
    settled = [Reference(SETTLED, "settled")]
    panels = [
        LinePanel(lines, "relative residual", y_log=True, references=settled),
        exact_panel(exact),
    ]
    gaps, cosine = (
        result.of_pairs(f"layer_{name}").median(("batch", "pos")) for name in ("distance", "cosine")
    )
    ends = {"nearest": int(gaps.argmin("pair")), "farthest": int(gaps.argmax("pair"))}
    pairs = "; ".join(
        f"{name}, layers {gaps['pair'][k].item()}: {float(gaps[k]):.2g}, {float(cosine[k]):.2f}"
        for name, k in ends.items()
    )
    return Figure(
        title="Does each layer have a limit?",
        plot=line_panels(panels, x_title="loops"),
        caption=(
            "How far a loop moves the state after each layer, over its norm (median of the "
            "examples, band: 80%). Below: exact match if read at that loop."
        ),
        control=(
            "Distance over norm, and cosine, of the states after two layers in the last loop "
            f"(medians of the tokens): {pairs}."
        ),
        data=with_exact(tidy({"residual": residual}), exact),
    )


def _trajectories(result: GeometryResult) -> Iterator[Figure]:
    """Trajectories along two and three principal axes."""
    tokens = _shown(result)
    lines, space, heights = [], [], {}
    for name, paths, colour, dashed in _groups(tokens):
        style = {"colour": colour, "markers": False, "control": dashed}
        x, y, *others = joined(paths).T
        lines.append(Series(name, x, y, **style))
        space.append(Series(name, x, y, **style))
        heights[name] = others[0] if others else None
    ends = tokens["path_limit"].transpose("token", "component").values
    if len(ends := ends[np.isfinite(ends).all(axis=1)]):
        style = {"colour": "green", "markers": True}
        lines.append(Series("limit", *joined(ends[:, None])[:, :2].T, **style))
        space.append(Series("limit", *ends[:, :2].T, **style))
        heights["limit"] = ends[:, -1]
    shares = result.data["explained"].values
    titles = [f"component {k + 1} ({percent(share)})" for k, share in enumerate(shares)]
    legend = (
        "Colours are classes and regimes, dashes stand for wrong answers at the end; crosses and "
        "marked points are limits that the search found, of cycles their mean state."
    )
    n_shown, table = tokens.sizes["token"], _table(tokens)
    yield Figure(
        title="Trajectories in the plane",
        plot=line_figure(lines, x_title=titles[0], y_title=titles[1]),
        caption=(
            f"The states of {n_shown} tokens of the first examples, loop after loop, along the two "
            "directions in which they spread most. " + _CLASSES
        ),
        control=legend,
        data=table,
    )
    if len(titles) > 2:
        yield Figure(
            title="Trajectories in space",
            plot=space_figure(space, heights, titles=titles),
            caption=(
                f"The same {n_shown} tokens along three directions, which hold "
                f"{percent(float(shares.sum()))} of the variance of their states."
            ),
            control=legend,
            data=table,
        )


def _shown(result: GeometryResult) -> xr.Dataset:
    """The first 24 tokens whose trajectories are drawn, [token], with what is known of each."""
    n_shown = result.data.sizes["shown"]
    of_tokens = result.data[["right", "regime", "settling"]].isel(batch=slice(n_shown))
    drawn = result.data[["path", "path_limit"]].merge(of_tokens.rename(batch="shown"))
    tokens = drawn.stack(token=("shown", "pos"), create_index=False)
    complete = tokens["path"].notnull().all(("loop", "component"))
    return tokens.isel(token=complete.values.nonzero()[0][:24])


def _groups(tokens: xr.Dataset) -> Iterator[tuple[str, np.ndarray, str, bool]]:
    """Name, paths ``[path, loop, component]``, colour, and dashes of each kind of trajectory."""
    paths = tokens["path"].transpose("token", "loop", "component").values
    # Of classes, and of regimes of what drifts; others are magenta.
    colours = {"settling": "blue", "marginal": "ochre", "orbit": "red"}
    for kind, regime, wrong in itertools.product(SettlingClass, Regime, (False, True)):
        rows = (tokens["settling"] == kind) & (tokens["regime"] == regime)
        rows = (rows & ((tokens["right"] == 0) == wrong)).values
        if rows.any():
            name = f"{kind.label} ({regime.label})" + ", wrong" * wrong
            colour = colours.get(kind.label) or colours.get(regime.label, "magenta")
            yield name, paths[rows], colour, wrong


def _table(tokens: xr.Dataset) -> pd.DataFrame:
    along = {
        f"component {k + 1}": tokens["path"].isel(component=k, drop=True)
        for k in range(tokens.sizes["component"])
    }
    table = tidy(along)
    for name, labels in (("settling", SettlingClass), ("regime", Regime)):
        words = [labels(int(code)).label for code in tokens[name].values]
        table[name] = table["token"].map(dict(enumerate(words)))
    return table.assign(right=table["token"].map(dict(enumerate(tokens["right"].values.tolist()))))
