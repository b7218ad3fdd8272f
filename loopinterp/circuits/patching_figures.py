"""Figures of a patching sweep."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from loopinterp.circuits.patching_result import MEASURES, WORDS
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

    from loopinterp.circuits.patching_result import PatchingSweep

_MAX_PANELS = 3
_RECOVERED, _EFFECT, _CONTROL, _CONTROL_EFFECT = range(len(MEASURES))
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
    return Figure(
        title=f"Patching {WORDS[result.component]}, loop by loop",
        plot=plot,
        caption=f"{_about(result)} {how}",
        control=_CONTROL_TEXT,
        data=result.to_frame(),
        section="program",
    )


def _about(result: PatchingSweep) -> str:
    return (
        f"The run of one input goes on with {WORDS[result.component]} of another input's run at "
        f"one place. Answers recovered: the share of the {result.n_scored} answers that differ "
        "between the two which become the other input's."
    )


def _lines(result: PatchingSweep, values: np.ndarray) -> tuple[go.Figure, str]:
    """One site, all positions at once."""
    series = [
        Series("answers recovered", result.loops, values[_RECOVERED]),
        Series(result.metric, result.loops, values[_EFFECT]),
        Series("unrelated input", result.loops, values[_CONTROL], control=True),
        Series(
            f"unrelated input, {result.metric}", result.loops, values[_CONTROL_EFFECT], control=True
        ),
    ]
    plot = line_figure(series, x_title=_loop_title(result), y_title="0: unpatched, 1: the other")
    return plot, _effect_text(result)


def _site_maps(
    result: PatchingSweep, values: np.ndarray, sites: list[tuple[int, int]]
) -> tuple[go.Figure, str]:
    """Loops against layers and heads."""
    flat = values[..., 0].reshape(*values.shape[:2], len(sites))
    plot = heatmap_panels(
        [
            HeatPanel(flat[_RECOVERED], "answers recovered"),
            HeatPanel(flat[_CONTROL], "unrelated input"),
            HeatPanel(flat[_EFFECT], result.metric),
            HeatPanel(flat[_CONTROL_EFFECT], f"{result.metric}, unrelated"),
        ],
        x=[_site(result, *site) for site in sites],
        y=result.loops,
        x_title="layer.head" if len(result.heads) > 1 else "layer",
        y_title=_loop_title(result),
        value_title="share",
        value_range=(0, 1),
        scale="mass",
        y_down=True,
    )
    return plot, f"{_effect_text(result)} Both have one scale; values beyond it are in the data."


def _position_maps(
    result: PatchingSweep, values: np.ndarray, sites: list[tuple[int, int]]
) -> tuple[go.Figure, str]:
    """Loops against positions, at the sites where patches do most."""
    gain = (values[_RECOVERED] - values[_CONTROL]).max((0, 3)).reshape(-1)
    shown = [sites[k] for k in np.argsort(-gain, kind="stable")[:_MAX_PANELS]]
    panels = [HeatPanel(values[_RECOVERED, :, k, h], _site_title(result, k, h)) for k, h in shown]
    k, h = shown[0]
    panels.append(HeatPanel(values[_CONTROL, :, k, h], "unrelated input"))
    plot = heatmap_panels(
        panels,
        x=result.positions,
        y=result.loops,
        x_title="position patched",
        y_title=_loop_title(result),
        value_title="recovered",
        value_range=(0, 1),
        scale="mass",
        y_down=True,
    )
    if len(sites) == 1:
        return plot, "The data has the metric as well."
    return plot, (
        f"Shown: the {len(shown)} of {len(sites)} sites where a patch does most, and the control "
        "of the first. The data has all of them, and the metric."
    )


def _around(result: PatchingSweep) -> Figure:
    names, columns = [], []
    for section, values in result.around().items():
        for k, h in np.ndindex(values.shape[1:3]):
            names.append(f"{section} {k}" + (f".{h}" if len(result.heads) > 1 else ""))
            columns.append(values[:, k, h])
    values = np.stack(columns, axis=1)
    plot: Any
    if len(result.positions) > 1:
        plot = heatmap_panels(
            [
                HeatPanel(values[_RECOVERED], "answers recovered"),
                HeatPanel(values[_CONTROL], "unrelated input"),
            ],
            x=result.positions,
            y=names,
            x_title="position patched",
            y_title="layer.head" if len(result.heads) > 1 else "layer",
            value_title="recovered",
            value_range=(0, 1),
            scale="mass",
            y_down=True,
        )
    else:
        plot = bars_with_intervals(
            [
                Series("answers recovered", names, values[_RECOVERED, :, 0]),
                Series(result.metric, names, values[_EFFECT, :, 0]),
                Series("unrelated input", names, values[_CONTROL, :, 0], control=True),
            ],
            value_title="0: unpatched, 1: the other input's",
        )
    return Figure(
        title=f"Patching {WORDS[result.component]}, around the loop",
        plot=plot,
        caption=f"{_about(result)} These layers run once, before the loop or after it.",
        control=_CONTROL_TEXT,
        data=result.to_frame(),
        section="program",
    )


def _effect_text(result: PatchingSweep) -> str:
    return (
        f"The {result.metric} is scaled to be 0 without a patch and 1 in the other input's own run."
    )


def _loop_title(result: PatchingSweep) -> str:
    return "loops done" if result.component == "state" else "loop"


def _site(result: PatchingSweep, layer: int, head: int) -> str:
    """A layer, or a head of it."""
    name = str(result.layers[layer])
    return f"{name}.{result.heads[head]}" if len(result.heads) > 1 else name


def _site_title(result: PatchingSweep, layer: int, head: int) -> str:
    if result.component == "state":
        return "the state"
    return f"{'head' if len(result.heads) > 1 else 'layer'} {_site(result, layer, head)}"
