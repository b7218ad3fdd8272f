"""What a patching sweep says and shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
import xarray as xr

from loopinterp.circuits.activation_patching_result import BLOCK, WORDS, PatchingSweep
from loopinterp.plotting import (
    HeatPanel,
    Series,
    bars_with_intervals,
    heatmap_panels,
    line_figure,
)
from loopinterp.results import Figure, Finding, figures_of, findings_of, percent

SECTION = "program"

_MAX_PANELS = 3
_UNPATCHED = "0: unpatched, 1: the other input's"
_DATA = "Colours go up to the largest share. The data has the metric as well."
_CONTROL_TEXT = (
    "An unrelated input: the same patch out of the run of a third input. What it does to the "
    "answers, any disturbance at that place does."
)


@findings_of.register
def _(result: PatchingSweep) -> list[Finding]:
    """The patch that carries most over, against its control."""
    table = result.to_dataframe()
    gain = (table["recovered"] - table["control_recovered"]).to_numpy()
    best = table.to_dict("records")[int(gain.argmax())]
    value = percent(best["recovered"])
    text = (
        f"With {WORDS[result.component]} {_place(result, best)} taken from another input, {value} "
        "of the answers that differ become that input's; taken from an unrelated input, "
        f"{percent(best['control_recovered'])} do."
    )
    return [Finding(kind=SECTION, text=text, value=value)]


def _place(result: PatchingSweep, row: dict[Any, Any]) -> str:
    """Where a row of the table was patched, in words."""
    if result.component == "state":
        where = f"after {row['loop']} loop" + ("s" if row["loop"] != 1 else "")
    elif row["section"] == BLOCK:
        where = f"in loop {row['loop']}, layer {row['layer']}"
    else:
        where = f"in layer {row['layer']} of the {row['section']}"
    if result.data.sizes["head"] > 1:
        where += f", head {row['head']}"
    at = {"all": " at all positions", "chosen": " at one position"}
    return where + at.get(row["pos"], f" at position {row['pos']}")


@figures_of.register
def _(result: PatchingSweep) -> list[Figure]:
    """The sweep over the loops, and the layers around them where there are any."""
    figures = [_loops(result)]
    if result.around():
        figures.append(_around(result))
    return figures


def _loops(result: PatchingSweep) -> Figure:
    data = result.data.stack(site=("layer", "head"), create_index=False)
    if data.sizes["pos"] > 1:
        plot, how = _position_maps(result, data)
    elif data.sizes["site"] > 1:
        plot = _maps(
            _four(result, data.isel(pos=0)),
            ("loop", "site"),
            x=_sites(result),
            y=data["loop"].values,
            x_title="",
            y_title=_loop_title(result),
        )
        how = _scale_text(result)
    else:
        plot, how = _lines(result, data.isel(pos=0, site=0)), _scale_text(result)
    return _figure(result, plot, "loop by loop", how)


def _around(result: PatchingSweep) -> Figure:
    """Layers around the loop: bars, or maps where there are heads or positions."""
    around = result.around()
    layers = [f"{section} {k}" for section, x in around.items() for k in x["layer"].values]
    data = xr.concat(list(around.values()), dim="layer").assign_coords(layer=layers)
    plot: go.Figure
    if data.sizes["pos"] > 1:
        by_head = _by_head(result)
        rows = [f"{k}.{h}" for k in layers for h in data["head"].values] if by_head else layers
        data = data.stack(row=("layer", "head"), create_index=False)
        plot = _maps(
            {"answers recovered": data["recovered"], "unrelated input": data["control_recovered"]},
            ("row", "pos"),
            x=data["pos"].values,
            y=rows,
            x_title="position patched",
            y_title="head" if by_head else "layer",
        )
    elif data.sizes["head"] > 1:
        plot = _maps(
            _four(result, data.isel(pos=0)),
            ("layer", "head"),
            x=[f"head {h}" for h in data["head"].values],
            y=layers,
            x_title="",
            y_title="layer",
        )
    else:
        cell = data.isel(head=0, pos=0)
        bars = [
            Series.of("answers recovered", cell["recovered"]),
            Series.of(result.metric, cell["effect"]),
            Series.of("unrelated input", cell["control_recovered"], control=True),
        ]
        plot = bars_with_intervals(bars, value_title=_UNPATCHED)
    more = _DATA if data.sizes["pos"] > 1 else _scale_text(result)
    how = f"These layers run once, before the loop or after it. {more}"
    return _figure(result, plot, "around the loop", how)


def _figure(result: PatchingSweep, plot: go.Figure, where: str, how: str) -> Figure:
    one_by_one = ", position by position" if result.data.sizes["pos"] > 1 else ""
    return Figure(
        title=f"Patching {WORDS[result.component]}, {where}{one_by_one}",
        plot=plot,
        caption=(
            f"The run of one input goes on with {WORDS[result.component]} of another input's run "
            f"at one place. Answers recovered: the share of the {result.n_scored} answers that "
            f"differ between the two which become the other input's. {how}"
        ),
        control=_CONTROL_TEXT,
        data=result.to_dataframe(),
        section=SECTION,
    )


def _lines(result: PatchingSweep, data: xr.Dataset) -> go.Figure:
    """One site, all positions at once."""
    unrelated = f"unrelated input, {result.metric}"
    series = [
        Series.of("answers recovered", data["recovered"]),
        Series.of(result.metric, data["effect"]),
        Series.of("unrelated input", data["control_recovered"], control=True),
        Series.of(unrelated, data["control_effect"], control=True),
    ]
    return line_figure(series, x_title=_loop_title(result), y_title=_UNPATCHED)


def _position_maps(result: PatchingSweep, data: xr.Dataset) -> tuple[go.Figure, str]:
    """Loops against positions, at the sites where patches do most."""
    gain = (data["recovered"] - data["control_recovered"]).max(["loop", "pos"])
    best = np.argsort(-gain.values, kind="stable")[:_MAX_PANELS]
    names = _sites(result)
    panels = {names[k]: data["recovered"].isel(site=k) for k in best}
    plot = _maps(
        {**panels, "unrelated input": data["control_recovered"].isel(site=best[0])},
        ("loop", "pos"),
        x=data["pos"].values,
        y=data["loop"].values,
        x_title="position patched",
        y_title=_loop_title(result),
    )
    if len(names) == 1:
        return plot, _DATA
    return plot, (
        f"Shown: the {len(best)} of {len(names)} sites where a patch does most, and the control "
        f"of the first; the data has all of them. {_DATA}"
    )


def _four(result: PatchingSweep, data: xr.Dataset) -> dict[str, xr.DataArray]:
    """All measures by title."""
    return {
        "answers recovered": data["recovered"],
        "unrelated input": data["control_recovered"],
        result.metric: data["effect"],
        f"{result.metric}, unrelated": data["control_effect"],
    }


def _maps(
    panels: Mapping[str, xr.DataArray],
    axes: tuple[str, str],
    *,
    x: Sequence[Any] | np.ndarray,
    y: Sequence[Any] | np.ndarray,
    x_title: str,
    y_title: str,
) -> go.Figure:
    """Heat maps from 0 to the most that is in them: one position of many carries only a part."""
    top = max(float(values.max()) for values in panels.values())
    return heatmap_panels(
        [HeatPanel(values.transpose(*axes).values, title) for title, values in panels.items()],
        x=list(x),
        y=list(y),
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


def _sites(result: PatchingSweep) -> list[str]:
    """Each layer, or each head of it, in words."""
    if result.component == "state":
        return ["the state"]
    layers, heads = result.data["layer"].values, result.data["head"].values
    if _by_head(result):
        return [f"head {layer}.{head}" for layer in layers for head in heads]
    return [f"layer {layer}" for layer in layers]
