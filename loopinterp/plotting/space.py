"""Lines and points in three dimensions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from loopinterp.errors import InputError
from loopinterp.plotting.axes import Series
from loopinterp.plotting.look import PALETTE, colour, template

_HEIGHT = 520


def joined(paths: np.ndarray) -> np.ndarray:
    """Paths ``[path, point, axis]`` as one line ``[point, axis]``, with a gap after each.

    Example:
        >>> joined(np.ones((2, 1, 2))).tolist()
        [[1.0, 1.0], [nan, nan], [1.0, 1.0], [nan, nan]]
    """
    gap = np.full_like(paths[:, :1], np.nan, dtype=float)
    return np.concatenate([paths, gap], axis=1).reshape(-1, paths.shape[-1])


def space_figure(
    lines: Sequence[Series], heights: Mapping[str, np.ndarray], *, titles: Sequence[str]
) -> go.Figure:
    """Lines in space, that can be turned; a series without connecting line shows points.

    Args:
        lines: Their first two coordinates; NaN leaves a gap. One with ``markers`` is points alone.
        heights: The third coordinate of each line, by its name.
        titles: Of the three axes.

    Raises:
        InputError: If a line has no height, or one of another length.
    """
    figure = go.Figure()
    for place, line in enumerate(lines):
        z = np.asarray(heights.get(line.name, ()), dtype=float)
        if len(z) != len(line.x):
            raise InputError(
                f"heights of line {line.name!r}",
                expected=f"{len(line.x)} values, one for each point",
                given=f"{len(z)}",
                fix="Name heights as the lines are named.",
            )
        shade = PALETTE.get(line.colour or "", line.colour) or colour(place)
        look: dict[str, Any] = {"mode": "lines", "line": {"color": shade, "width": 3}}
        if line.control:
            look["line"] |= {"dash": "dash"}
        if line.markers:
            look = {"mode": "markers", "marker": {"color": shade, "size": 4, "symbol": "x"}}
        hover = f"{line.name}<br>%{{x:.3g}}, %{{y:.3g}}, %{{z:.3g}}<extra></extra>"
        figure.add_scatter3d(
            x=list(line.x), y=list(line.y), z=z, name=line.name, hovertemplate=hover, **look
        )
    named: dict[str, Any] = {
        f"{axis}axis": {"title": {"text": t, "font": {"size": 11}}, "tickfont": {"size": 10}}
        for axis, t in zip("xyz", titles)
    }
    # From so far away, and looking so far below the middle, that the axis titles are seen whole.
    named["camera"] = {"eye": {"x": 1.7, "y": 1.7, "z": 1.1}, "center": {"z": -0.2}}
    return figure.update_layout(
        template=template(), height=_HEIGHT, scene=named, margin={"l": 0, "r": 0}
    )
