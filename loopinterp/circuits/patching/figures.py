"""Figures of a patching sweep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from loopinterp.circuits.patching.result import MEASURES, WORDS
from loopinterp.plotting import (
    HeatPanel,
    Series,
    bars_with_intervals,
    heatmap_panels,
    line_figure,
)
from loopinterp.results import Figure

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from loopinterp.circuits.patching.result import PatchingSweep

_MAX_PANELS = 3
_RECOVERED, _EFFECT, _CONTROL, _CONTROL_EFFECT = range(len(MEASURES))
_UNPATCHED = "0: unpatched, 1: the other input's"
_DATA = "Colours go up to the largest share. The data has the metric as well."
_CONTROL_TEXT = (
    "An unrelated input: the same patch out of the run of a third input. What it does to the "
    "answers, any disturbance at that place does."
)


def patching_figures(result: PatchingSweep) -> list[Figure]:
    """The sweep over the loops, and the layers around them where there are any."""
    figures = [_loops(result)]
    if result.around():
        figures.append(_around(result))
    return figures


def _loops(result: PatchingSweep) -> Figure:
    values = np.stack([getattr(result, name) for name in MEASURES])
    sites = [(k, h) for k in range(len(result.layers)) for h in range(len(result.heads))]
    if len(result.positions) > 1:
        plot, how = _position_maps(result, values, sites)
    elif len(sites) > 1:
        plot, how = _site_maps(result, values, sites)
    else:
        plot, how = _lines(result, values[:, :, 0, 0, 0])
    return _figure(result, plot, "loop by loop", how)


def _around(result: PatchingSweep) -> Figure:
    """Layers around the loop: bars, or maps where there are heads or positions."""
    around = result.around()
    layers = [f"{section} {k}" for section, x in around.items() for k in range(x.shape[1])]
    values = np.concatenate(list(around.values()), axis=1)  # [measure, layer, head, pos]
    plot: go.Figure
    if len(result.positions) > 1:
        rows = [f"{k}.{h}" for k in layers for h in result.heads] if _by_head(result) else layers
        flat = values.reshape(len(MEASURES), len(rows), -1)
        plot = _maps(
            {"answers recovered": flat[_RECOVERED], "unrelated input": flat[_CONTROL]},
            x=result.positions,
            y=rows,
            x_title="position patched",
            y_title="head" if _by_head(result) else "layer",
        )
    elif len(result.heads) > 1:
        plot = _maps(
            _four(result, values[..., 0]),
            x=[f"head {h}" for h in result.heads],
            y=layers,
            x_title="",
            y_title="layer",
        )
    else:
        bars = [
            Series("answers recovered", layers, values[_RECOVERED, :, 0, 0]),
            Series(result.metric, layers, values[_EFFECT, :, 0, 0]),
            Series("unrelated input", layers, values[_CONTROL, :, 0, 0], control=True),
        ]
        plot = bars_with_intervals(bars, value_title=_UNPATCHED)
    more = _DATA if len(result.positions) > 1 else _scale_text(result)
    how = f"These layers run once, before the loop or after it. {more}"
    return _figure(result, plot, "around the loop", how)


def _figure(result: PatchingSweep, plot: go.Figure, where: str, how: str) -> Figure:
    one_by_one = ", position by position" if len(result.positions) > 1 else ""
    return Figure(
        title=f"Patching {WORDS[result.component]}, {where}{one_by_one}",
        plot=plot,
        caption=(
            f"The run of one input goes on with {WORDS[result.component]} of another input's run "
            f"at one place. Answers recovered: the share of the {result.n_scored} answers that "
            f"differ between the two which become the other input's. {how}"
        ),
        control=_CONTROL_TEXT,
        data=result.to_frame(),
        section="program",
    )


def _lines(result: PatchingSweep, values: np.ndarray) -> tuple[go.Figure, str]:
    """One site, all positions at once."""
    unrelated = f"unrelated input, {result.metric}"
    series = [
        Series("answers recovered", result.loops, values[_RECOVERED]),
        Series(result.metric, result.loops, values[_EFFECT]),
        Series("unrelated input", result.loops, values[_CONTROL], control=True),
        Series(unrelated, result.loops, values[_CONTROL_EFFECT], control=True),
    ]
    plot = line_figure(series, x_title=_loop_title(result), y_title=_UNPATCHED)
    return plot, _scale_text(result)


def _site_maps(
    result: PatchingSweep, values: np.ndarray, sites: list[tuple[int, int]]
) -> tuple[go.Figure, str]:
    """Loops against layers and heads."""
    plot = _maps(
        _four(result, values[..., 0].reshape(*values.shape[:2], len(sites))),
        x=[_site(result, *site) for site in sites],
        y=result.loops,
        x_title="",
        y_title=_loop_title(result),
    )
    return plot, _scale_text(result)


def _position_maps(
    result: PatchingSweep, values: np.ndarray, sites: list[tuple[int, int]]
) -> tuple[go.Figure, str]:
    """Loops against positions, at the sites where patches do most."""
    gain = (values[_RECOVERED] - values[_CONTROL]).max((0, 3)).reshape(-1)
    shown = [sites[k] for k in np.argsort(-gain, kind="stable")[:_MAX_PANELS]]
    panels = {_site(result, k, h): values[_RECOVERED, :, k, h] for k, h in shown}
    k, h = shown[0]
    plot = _maps(
        {**panels, "unrelated input": values[_CONTROL, :, k, h]},
        x=result.positions,
        y=result.loops,
        x_title="position patched",
        y_title=_loop_title(result),
    )
    if len(sites) == 1:
        return plot, _DATA
    return plot, (
        f"Shown: the {len(shown)} of {len(sites)} sites where a patch does most, and the control "
        f"of the first; the data has all of them. {_DATA}"
    )


def _four(result: PatchingSweep, values: np.ndarray) -> dict[str, np.ndarray]:
    """All measures [measure, row, column], by title."""
    return {
        "answers recovered": values[_RECOVERED],
        "unrelated input": values[_CONTROL],
        result.metric: values[_EFFECT],
        f"{result.metric}, unrelated": values[_CONTROL_EFFECT],
    }


def _maps(
    panels: dict[str, np.ndarray], *, x: Sequence[Any], y: Sequence[Any], x_title: str, y_title: str
) -> go.Figure:
    """Heat maps from 0 to the most that is in them: one position of many carries only a part."""
    top = max(float(values.max()) for values in panels.values())
    return heatmap_panels(
        [HeatPanel(values, title) for title, values in panels.items()],
        x=x,
        y=y,
        x_title=x_title,
        y_title=y_title,
        value_title="share",
        value_range=(0, min(top, 1) if top > 0 else 1),
        scale="mass",
        y_down=True,
    )


def _scale_text(result: PatchingSweep) -> str:
    return (
        f"The {result.metric} is scaled to be 0 without a patch and 1 in the other input's own run."
    )


def _loop_title(result: PatchingSweep) -> str:
    return "loops done" if result.component == "state" else "loop"


def _by_head(result: PatchingSweep) -> bool:
    return result.component == "z"


def _site(result: PatchingSweep, layer: int, head: int) -> str:
    """A layer, or a head of it, in words."""
    if result.component == "state":
        return "the state"
    number = result.layers[layer]
    return f"head {number}.{result.heads[head]}" if _by_head(result) else f"layer {number}"
