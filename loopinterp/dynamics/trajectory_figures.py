"""Trajectories of a study of geometry, drawn along two and three principal axes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd
import xarray as xr

from loopinterp.dynamics.geometry import GeometryResult
from loopinterp.dynamics.regimes import Regime
from loopinterp.dynamics.settling_classes import SettlingClass
from loopinterp.plotting import Series, joined, line_figure, space_figure
from loopinterp.results import Figure, percent, tidy

MOST_SHOWN = 24
"""Trajectories that are drawn."""

_COLOURS = {"settling": "blue", "marginal": "ochre", "orbit": "red"}
"""Of classes, and of regimes of what drifts; others are magenta."""

CLASSES = (
    "Settling: a loop moves the state by less and less, geometrically, or no more than rounding. "
    "Marginal: by less and less, but so slowly that the loops seen do not tell that it ends. "
    "Drifting: not by less (a slide, an orbit, or none of these)."
)
_LEGEND = (
    "Colours are classes and regimes, dashes stand for tokens whose answer is wrong at the end; "
    "crosses and marked points are limits that the search found, of cycles their mean state."
)


def plane_figure(result: GeometryResult) -> Figure:
    """Trajectories along the first two principal axes."""
    groups = list(_groups(result))
    lines = [
        Series(name, *joined(paths)[:, :2].T, colour=shade, markers=False, control=dashed)
        for name, paths, shade, dashed in groups
    ]
    ends = _limits(result)
    if len(ends):
        at = joined(ends[:, None])[:, :2].T
        lines.append(Series("limit", *at, colour="green", markers=True))
    names = _axis_names(result)
    return Figure(
        title="Trajectories in the plane",
        plot=line_figure(lines, x_title=names[0], y_title=names[1]),
        caption=(
            f"The states of {_n_shown(result)} tokens of the first examples, loop after loop, "
            "along the two directions in which they spread most. " + CLASSES
        ),
        control=_LEGEND,
        data=_table(result),
    )


def space_figure_of(result: GeometryResult) -> Figure:
    """Trajectories along three principal axes."""
    lines, heights = [], {}
    for name, paths, shade, dashed in _groups(result):
        x, y, heights[name] = joined(paths).T
        lines.append(Series(name, x, y, colour=shade, markers=False, control=dashed))
    if len(ends := _limits(result)):
        x, y, heights["limit"] = ends.T
        lines.append(Series("limit", x, y, colour="green", markers=True))
    return Figure(
        title="Trajectories in space",
        plot=space_figure(lines, heights, titles=_axis_names(result)),
        caption=(
            f"The same {_n_shown(result)} tokens along three directions, which hold "
            f"{percent(float(result.data['explained'].sum()))} of the variance of their states."
        ),
        control=_LEGEND,
        data=_table(result),
    )


def _shown(result: GeometryResult) -> xr.Dataset:
    """The tokens whose trajectories are drawn, [token], with what is known of each."""
    n_shown = result.data.sizes["shown"]
    of_tokens = result.data[["right", "regime", "settling"]].isel(batch=slice(n_shown))
    drawn = result.data[["path", "path_limit"]].merge(of_tokens.rename(batch="shown"))
    tokens = drawn.stack(token=("shown", "pos"), create_index=False)
    kept = tokens["path"].notnull().all(("loop", "component"))
    return tokens.isel(token=kept.values.nonzero()[0][:MOST_SHOWN])


def _n_shown(result: GeometryResult) -> int:
    return _shown(result).sizes["token"]


def _groups(result: GeometryResult) -> Iterator[tuple[str, np.ndarray, str, bool]]:
    """Name, paths ``[path, loop, component]``, colour, and dashes of each kind of trajectory."""
    tokens = _shown(result)
    paths = tokens["path"].transpose("token", "loop", "component").values
    for kind in SettlingClass:
        for regime in Regime:
            here = (tokens["settling"] == kind) & (tokens["regime"] == regime)
            for wrong in (False, True):
                rows = (here & ((tokens["right"] == 0) == wrong)).values
                if rows.any():
                    name = f"{kind.label} ({regime.label})" + ", wrong" * wrong
                    shade = _COLOURS.get(kind.label) or _COLOURS.get(regime.label, "magenta")
                    yield name, paths[rows], shade, wrong


def _limits(result: GeometryResult) -> np.ndarray:
    """Where limits lie, ``[limit, component]``."""
    ends = _shown(result)["path_limit"].transpose("token", "component").values
    return ends[np.isfinite(ends).all(axis=1)]


def _axis_names(result: GeometryResult) -> list[str]:
    shares = result.data["explained"].values
    return [f"component {k + 1} ({percent(share)})" for k, share in enumerate(shares)]


def _table(result: GeometryResult) -> pd.DataFrame:
    tokens = _shown(result)
    names = [f"component {k + 1}" for k in range(tokens.sizes["component"])]
    along = {name: tokens["path"].isel(component=k, drop=True) for k, name in enumerate(names)}
    table = tidy(along)
    for name, labels in (("settling", SettlingClass), ("regime", Regime)):
        words = [labels(int(code)).label for code in tokens[name].values]
        table[name] = table["token"].map(dict(enumerate(words)))
    return table.assign(right=table["token"].map(dict(enumerate(tokens["right"].values.tolist()))))
