"""What a patching sweep says and shows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import plotly.graph_objects as go
import xarray as xr

from loopinterp.circuits.activation_patching_result import BLOCK, MEASURES, STATE, PatchingSweep
from loopinterp.plotting import Series, bars_with_intervals, heatmap_panels, line_figure
from loopinterp.results import Figure, Finding, figures_of, findings_of, percent

SECTION = "program"

_MAX_PANELS = 3
_RECOVERED, _CONTROL, _PATCHED = "answers recovered", "unrelated input", "position patched"
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
    if not np.nanmax(gain) > 0:
        text = (
            f"At none of the {len(table)} places do {result.words} from another input carry more "
            "of its answers over than from an unrelated one."
        )
        return [Finding(text, value="none")]
    best = table.to_dict("records")[int(np.nanargmax(gain))]
    value = percent(best["recovered"])
    text = (
        f"With {result.words} {_place(result, best)} taken from another input, {value} "
        "of the answers that differ become that input's; taken from an unrelated input, "
        f"{percent(best['control_recovered'])} do."
    )
    alike = int((gain == np.nanmax(gain)).sum())
    if alike > 1:
        text += f" {alike} of {len(table)} places do as much."
    return [Finding(text, value=value)]


def _place(result: PatchingSweep, row: dict[Any, Any]) -> str:
    """Where a row of the table was patched, in words."""
    if result.component == STATE:
        where = f"after {row['loop']} loop" + ("s" if row["loop"] != 1 else "")
    elif row["section"] == BLOCK:
        where = f"in loop {row['loop']}" + (f", layer {row['layer']}" if result.by_layer else "")
    else:
        where = f"in layer {row['layer']} of the {row['section']}"
    if result.by_head:
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
    """Loops against positions at the best sites, against the sites, or alone."""
    data = result.data[list(MEASURES)].stack(site=("layer", "head"), create_index=False)
    data = data.assign_coords(site=_sites(result))
    loops = "loops done" if result.component == STATE else "loop"
    if data.sizes["pos"] > 1:
        plot, how = _position_maps(data, y_title=loops)
    elif data.sizes["site"] > 1:
        plot, how = _maps(_named(result, data.isel(pos=0)), x_title=""), _scale_text(result)
    else:
        lines = _lines(result, data.isel(pos=0, site=0))
        plot, how = line_figure(lines, x_title=loops, y_title=_UNPATCHED), _scale_text(result)
    return _figure(result, plot, "loop by loop", how)


def _around(result: PatchingSweep) -> Figure:
    """Layers around the loop: bars, or maps where there are heads or positions."""
    around = result.around()
    layers = [f"{section} {k}" for section, x in around.items() for k in x["layer"].values]
    data = xr.concat(list(around.values()), dim="layer").assign_coords(layer=layers)
    plot: go.Figure
    if data.sizes["pos"] > 1:
        row, names = "layer", layers
        if result.by_head:
            row, names = "head", [f"{k}.{h}" for k in layers for h in data["head"].values]
        rows = data.stack(row=("layer", "head"), create_index=False)
        rows = rows.transpose("row", "pos").assign_coords(row=names)
        panels = {_RECOVERED: rows["recovered"], _CONTROL: rows["control_recovered"]}
        plot, how = _maps(panels, x_title=_PATCHED, y_title=row), _DATA
    elif data.sizes["head"] > 1:
        heads = [f"head {h}" for h in data["head"].values]
        plot = _maps(_named(result, data.isel(pos=0).assign_coords(head=heads)), x_title="")
        how = _scale_text(result)
    else:
        bars = _lines(result, data.isel(head=0, pos=0))
        plot = bars_with_intervals(bars, value_title=_UNPATCHED)
        how = _scale_text(result)
    how = f"These layers run once, before the loop or after it. {how}"
    return _figure(result, plot, "around the loop", how)


def _named(result: PatchingSweep, data: xr.Dataset) -> dict[str, xr.DataArray]:
    """Each measure by what figures call it, its control after it; metrics have any name."""
    taken = result.metric in (_RECOVERED, _CONTROL)
    effect = f"metric {result.metric!r}" if taken else result.metric
    return {
        _RECOVERED: data["recovered"],
        _CONTROL: data["control_recovered"],
        effect: data["effect"],
        f"{_CONTROL}, {effect}": data["control_effect"],
    }


def _position_maps(data: xr.Dataset, *, y_title: str) -> tuple[go.Figure, str]:
    """Loops against positions, at the sites where patches do most."""
    names = data["site"].values.tolist()
    gain = (data["recovered"] - data["control_recovered"]).max(["loop", "pos"])
    best = np.argsort(-gain.values, kind="stable")[:_MAX_PANELS]
    panels = {names[k]: data["recovered"].isel(site=k) for k in best}
    panels[_CONTROL] = data["control_recovered"].isel(site=best[0])
    plot = _maps(panels, x_title=_PATCHED, y_title=y_title)
    if len(names) == 1:
        return plot, _DATA
    return plot, (
        f"Shown: the {len(best)} of {len(names)} sites where a patch does most, and the control "
        f"of the first; the data has all of them. {_DATA}"
    )


def _lines(result: PatchingSweep, data: xr.Dataset) -> list[Series]:
    named = _named(result, data).items()
    return [Series.of(name, of, control=k % 2 == 1) for k, (name, of) in enumerate(named)]


def _maps(
    panels: Mapping[Any, xr.DataArray], *, x_title: str | None = None, y_title: str | None = None
) -> go.Figure:
    """Heat maps from 0 to the most that is in them: one position of many carries only a part."""
    top = max(float(values.max()) for values in panels.values())
    return heatmap_panels(
        panels,
        x_title=x_title,
        y_title=y_title,
        value_title="share",
        value_range=(0, min(top, 1) if top > 0 else 1),
        scale="mass",
        y_down=True,
    )


def _figure(result: PatchingSweep, plot: go.Figure, where: str, how: str) -> Figure:
    one_by_one = ", position by position" if result.data.sizes["pos"] > 1 else ""
    return Figure(
        title=f"Patching {result.words}, {where}{one_by_one}",
        plot=plot,
        caption=(
            f"The run of one input goes on with {result.words} of another input's run "
            f"at one place. Answers recovered: the share of the {result.n_scored} answers that "
            f"differ between the two which become the other input's. {how}"
        ),
        control=_CONTROL_TEXT,
        data=result.to_dataframe(),
    )


def _scale_text(result: PatchingSweep) -> str:
    return (
        f"The {result.metric} is scaled to be 0 without a patch and 1 in the other input's own run."
    )


def _sites(result: PatchingSweep) -> list[str]:
    """Each layer, or each head of it, in words."""
    if not result.by_layer:
        return [result.words]
    layers, heads = result.data["layer"].values, result.data["head"].values
    if result.by_head:
        return [f"head {layer}.{head}" for layer in layers for head in heads]
    return [f"layer {layer}" for layer in layers]
