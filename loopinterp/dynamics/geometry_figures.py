"""Findings and figures of a geometry study."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from loopinterp.core.intervals import band_of
from loopinterp.core.results import Figure, Finding, figures_of, findings_of, tidy
from loopinterp.core.text import percent
from loopinterp.dynamics.convergence_figures import (
    NO_ANSWER,
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
"""Relative spread up to which a set counts as one point."""


@findings_of.register
@with_rounding
def _(result: GeometryResult) -> list[Finding]:
    counts = result.classes()
    total = int(counts.sum())
    each = {str(kind): int(counts.sel(settling=kind).sum()) for kind in counts["settling"].values}
    exact = float(value_of(result.exact_match().isel(loop=-1)))
    verbs = {"settling": "converge", "marginal": "are marginal", "drifting": "drift or cycle"}
    shares = ", ".join(f"{percent(n / total)} {verbs[kind]}" for kind, n in each.items() if n)
    asked = (result.data["right"] >= 0).any()
    answers = f"{percent(exact)} of the answers are right at the end." if asked else NO_ANSWER
    text = f"Of {total} trajectories over {result.n_loops} loops, {shares}. {answers}"
    if n_wrong := int(counts.sel(settling="settling", answer="wrong")):
        text += f" {n_wrong} trajectories converge to a wrong answer."
    settles = each["settling"] / total
    finding = Finding(text, value=f"{percent(settles)} settling", good=settles >= 0.99)
    return [finding, _dimension(result), _layers(result)]


def _dimension(result: GeometryResult) -> Finding:
    last = result.data.isel(loop=-1)
    rank, spread = float(last["rank"]), float(last["spread"])
    size, embedded = (float(last[f"set_{name}"].sel(set=EMBEDDING)) for name in ("size", "rank"))
    if np.isnan(rank):
        text = "The states diverge to infinity, so their dimension is not known."
        return Finding(text, value="not finite", good=False)
    if spread <= _ONE_POINT:
        text = (
            f"The states collapse: after {result.n_loops} loops all {size:.0f} tokens are one "
            f"point, up to {spread:.1g} of their norm."
        )
        return Finding(text, value="one point", good=False)
    chance = float(last["control_rank"].sel(set=EMBEDDING).mean())
    text = (
        f"The effective rank of the states of {size:.0f} tokens is {rank:.1f} after "
        f"{result.n_loops} loops. Controls: {chance:.1f} for as many Gaussian vectors, "
        f"{embedded:.1f} for the embeddings."
    )
    return Finding(text, value=f"{rank:.1f} directions")


def _layers(result: GeometryResult) -> Finding:
    if result.no_layers:
        reasons = {
            NoLayers.NO_HOOKS.value: "the model has no hooks inside its loop",
            NoLayers.ONE_LAYER.value: "the block has one layer",
        }
        why = reasons.get(result.no_layers, result.no_layers)  # older files have the clause
        return Finding(f"Limits of layers: skipped ({why}).", value="not compared")
    converged, n_layers = result.converged(), result.data.sizes["layer"]
    if not converged.any():
        text = f"Limits of the {n_layers} layers: skipped (no example converges at all tokens)."
        return Finding(text, value="no limits of layers")
    residual = result.data["layer_residual"].isel(loop=-1, batch=converged.values)
    moved = float(residual.median("batch").max("layer"))
    gaps = result.of_pairs("layer_distance").isel(batch=converged.values).median(("batch", "pos"))
    nearest = gaps["pair"][int(gaps.argmin("pair"))].item()
    measured = (
        f"Layers {nearest} are closest ({float(gaps.min()):.2g} of their norm apart); the last "
        f"loop moves no layer by more than {moved:.1g}."
    )
    where = f"{int(converged.sum())} of {converged.size} examples converge at all tokens"
    if float(gaps.min()) > 10 * max(moved, _ONE_POINT):
        text = f"Each of the {n_layers} layers has a limit of its own ({where}). {measured}"
        return Finding(text, value="distinct limits")
    text = f"The limits of the layers cannot be distinguished ({where}). {measured}"
    return Finding(text, value="layers not distinguished")


@figures_of.register
def _(result: GeometryResult) -> list[Figure]:
    figures = [_ranks(result)]
    if result.data["path"].notnull().any():
        figures += _trajectories(result)
    if result.no_layers:
        return figures
    loops = slice(2, None)
    residual = band_of(result.data["layer_residual"].sel(loop=loops), "batch")
    lines = Series.each(residual.where(residual > 0), "layer", "layer {}".format, in_order=True)
    exact = result.exact_match().sel(loop=loops)
    threshold = [Reference(SETTLED, "threshold")]
    panels = [
        LinePanel(lines, "relative residual", y_log=True, references=threshold),
        exact_panel(exact),
    ]
    gaps, cosine = (
        result.of_pairs(f"layer_{name}").median(("batch", "pos")) for name in ("distance", "cosine")
    )
    ends = {"closest": int(gaps.argmin("pair")), "farthest": int(gaps.argmax("pair"))}
    pairs = "; ".join(
        f"{name}, layers {gaps['pair'][k].item()}: {float(gaps[k]):.2g}, {float(cosine[k]):.2f}"
        for name, k in ends.items()
    )
    layers = Figure(
        title="Does each layer have a limit?",
        plot=line_panels(panels, x_title="loops"),
        caption=(
            "Residual of the state after each layer (median of the examples, band: 80%). Below: "
            "exact match if read at that loop."
        ),
        control=(
            "Relative distance, and cosine, of the states after two layers in the last loop "
            f"(medians of the tokens): {pairs}."
        ),
        data=with_exact(tidy({"residual": residual}), exact),
    )
    return [*figures, layers]


def _ranks(result: GeometryResult) -> Figure:
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
            "mean. Middle: their distance from the mean, relative to their norm (near 0 all states "
            "are alike). Below: exact match if read at that loop."
        ),
        control=(
            "Dashed: effective rank of as many Gaussian vectors (an upper bound), of the "
            "embeddings at the same tokens, and of the limits found."
        ),
        data=with_exact(tidy(lines), exact),
    )


def _trajectories(result: GeometryResult) -> Iterator[Figure]:
    n_drawn = result.data.sizes["shown"]
    of_tokens = result.data[["right", "regime", "settling"]].isel(batch=slice(n_drawn))
    drawn = result.data[["path", "path_limit"]].merge(of_tokens.rename(batch="shown"))
    every = drawn.stack(token=("shown", "pos"), create_index=False)
    complete = every["path"].notnull().all(("loop", "component"))
    tokens = every.isel(token=complete.values.nonzero()[0][:24])
    lines, heights = _class_lines(tokens)
    legend = "Colours: class of the trajectory."
    if any(line.control for line in lines):
        legend += " Dashed: wrong answers at the end."
    space = list(lines)
    ends = tokens["path_limit"].transpose("token", "component").values
    if len(ends := ends[np.isfinite(ends).all(axis=1)]):
        legend += " Green marks: limits (of cycles their mean state)."
        style = {"colour": "green", "markers": True}
        # In the plane with gaps, so that no line joins them.
        lines.append(Series("limit", *joined(ends[:, None])[:, :2].T, **style))
        space.append(Series("limit", *ends[:, :2].T, **style))
        heights["limit"] = ends[:, -1]
    shares = result.data["explained"].values
    titles = [f"component {k + 1} ({percent(share)})" for k, share in enumerate(shares)]
    n_shown, table = tokens.sizes["token"], _table(tokens)
    yield Figure(
        title="Trajectories in the plane",
        plot=line_figure(lines, x_title=titles[0], y_title=titles[1]),
        caption=(
            f"States of {n_shown} tokens, loop after loop, along their first two principal "
            "components. Settling: updates fall geometrically. Marginal: they fall too slowly to "
            "tell that the path ends. Drifting: they do not fall."
        ),
        control=legend,
        data=table,
    )
    if len(titles) > 2 and shares[2] >= 0.05:
        yield Figure(
            title="Trajectories in space",
            plot=space_figure(space, heights, titles=titles),
            caption=f"The same {n_shown} tokens along their first three principal components.",
            control=legend,
            data=table,
        )


def _class_lines(tokens: xr.Dataset) -> tuple[list[Series], dict[str, Any]]:
    """The paths of each class as a line in the plane; their heights above it."""
    paths = tokens["path"].transpose("token", "loop", "component").values
    settling, regime = tokens["settling"], tokens["regime"]
    drifting = settling == SettlingClass.DRIFTING
    kinds = {
        "settling": ("blue", settling == SettlingClass.SETTLING),
        "marginal": ("ochre", settling == SettlingClass.MARGINAL),
        "drifting (orbit)": ("red", drifting & (regime == Regime.ORBIT)),
        "drifting (drift)": ("magenta", drifting & (regime == Regime.DRIFT)),
        "drifting (other)": ("grey", drifting & ~regime.isin([Regime.ORBIT, Regime.DRIFT])),
    }
    lines, heights = [], {}  # a height is None without a third component
    for (kind, (colour, rows)), wrong in itertools.product(kinds.items(), (False, True)):
        chosen = (rows & ((tokens["right"] == 0) == wrong)).values
        if chosen.any():
            name = kind + ", wrong" * wrong
            x, y, *others = joined(paths[chosen]).T
            lines.append(Series(name, x, y, colour=colour, markers=False, control=wrong))
            heights[name] = others[0] if others else None
    return lines, heights


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
