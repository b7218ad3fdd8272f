"""Findings and figures of patching sweeps, ablation studies and steering sweeps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

import numpy as np
import plotly.graph_objects as go
import xarray as xr

from loopinterp.core.intervals import ESTIMATE
from loopinterp.core.results import Figure, Finding, figures_of, findings_of, tidy
from loopinterp.core.text import percent
from loopinterp.figures import (
    LinePanel,
    Series,
    bars_with_intervals,
    heatmap_panels,
    line_figure,
    line_panels,
)
from loopinterp.interventions.ablation import CONTROL, NEEDED_SHARE, AblationStudy, Role
from loopinterp.interventions.ablation import MEASURES as ABLATION_MEASURES
from loopinterp.interventions.base_and_source import STATE
from loopinterp.interventions.patching import BLOCK, MEASURES, PatchingSweep
from loopinterp.interventions.steering import SteeringSweep

_RECOVERED, _CONTROL = "answers recovered", "unrelated input"
_UNPATCHED = "0: unpatched, 1: source"


@findings_of.register
def _(result: PatchingSweep) -> list[Finding]:
    table = result.to_dataframe()
    gain = (table["recovered"] - table["control_recovered"]).to_numpy()
    if not np.nanmax(gain) > 0:
        text = (
            f"No patch of {_component(result)} recovers more answers than the same patch from an "
            f"unrelated input ({len(table)} patches)."
        )
        return [Finding(text, value="none")]
    best = table.to_dict("records")[int(np.nanargmax(gain))]
    if result.component == STATE:
        where = f"after {best['loop']} loop" + ("s" if best["loop"] != 1 else "")
    elif best["section"] == BLOCK:
        where = f"in loop {best['loop']}" + (f", layer {best['layer']}" if result.by_layer else "")
    else:
        where = f"in layer {best['layer']} of the {best['section']}"
    where += f", head {best['head']}" if result.by_head else ""
    at = {"all": "at all positions", "chosen": "at one position"}
    where += " " + at.get(best["pos"], f"at position {best['pos']}")
    value = percent(best["recovered"])
    text = (
        f"Patching {_component(result)} {where} recovers {value} of the source's "
        f"answers. A patch from an unrelated input gives {percent(best['control_recovered'])}."
    )
    alike = int((gain == np.nanmax(gain)).sum())
    if alike > 1:
        text += f" {alike} of {len(table)} patches do as much."
    return [Finding(text, value=value)]


def _component(result: PatchingSweep) -> str:
    words = {
        "resid_pre": "the residual stream",
        "attn_out": "the attention output",
        "mlp_out": "the MLP output",
        "z": "a head's output",
        "pattern": "a head's pattern",
        STATE: "the state",
    }
    return words.get(result.component, f"`{result.component}`")


@figures_of.register
def _(result: PatchingSweep) -> list[Figure]:
    loop = "loops done" if result.component == STATE else "loop"
    block = result.data[list(MEASURES)].rename(loop="row")
    sections = {"loop by loop": (block, loop)}
    if around := result.around():
        names = [f"{section} {k}" for section, x in around.items() for k in x["layer"].values]
        rows = xr.concat(list(around.values()), dim="layer").rename(layer="row")
        sections["around the loop"] = rows.assign_coords(row=names).expand_dims("layer"), "layer"
    one_by_one = ", position by position" if result.data.sizes["pos"] > 1 else ""
    figures = []
    for where, (data, row) in sections.items():
        plot, how = _plot(result, data, row)
        figures.append(
            Figure(
                title=f"Patching {_component(result)}, {where}{one_by_one}",
                plot=plot,
                caption=(
                    f"The base's run with {_component(result)} of the source's run at one place. "
                    f"Answers recovered: the share of the {result.n_scored} answers that differ "
                    f"between the two runs and become the source's. {how}"
                ),
                control=(
                    "The same patch from an unrelated input: the effect of any disturbance there."
                ),
                data=result.to_dataframe(),
            )
        )
    return figures


def _plot(result: PatchingSweep, data: xr.Dataset, row: str) -> tuple[go.Figure, str]:
    layers, heads = data["layer"].values, data["head"].values
    sites = [f"head {k}.{h}" if len(layers) > 1 else f"head {h}" for k in layers for h in heads]
    if not result.by_head:
        sites = [f"layer {k}" for k in layers] if len(layers) > 1 else [_component(result)]
    # Layers and heads are one axis: [row, pos, site].
    data = data.stack(site=("layer", "head"), create_index=False).assign_coords(site=sites)
    data = data.transpose("row", "pos", "site")
    scale = f"The {result.metric} is scaled to 0 in the base's run and 1 in the source's."
    if data.sizes["pos"] > 1:
        gain = (data["recovered"] - data["control_recovered"]).max(["row", "pos"])
        best = np.argsort(-gain.values, kind="stable")[:3]
        panels = {sites[k]: data["recovered"].isel(site=k) for k in best}
        panels[_CONTROL] = data["control_recovered"].isel(site=best[0])
        shown = (
            f"Shown: the {len(best)} of {len(sites)} sites with the largest effects, and the "
            "control of the first. "
        )
        rest = "The colour scale ends at the largest share. The data has the metric as well."
        how = (shown if len(sites) > 1 else "") + rest
        return _maps(panels, x_title="position patched", y_title=row), how
    data = data.isel(pos=0)
    # A caller's metric may have the name of another line.
    taken = result.metric in (_RECOVERED, _CONTROL)
    effect = f"metric {result.metric!r}" if taken else result.metric
    named = {
        _RECOVERED: data["recovered"],
        _CONTROL: data["control_recovered"],
        effect: data["effect"],
        f"{_CONTROL}, {effect}": data["control_effect"],
    }
    if data.sizes["site"] > 1:
        return _maps(named, x_title="", y_title=row), scale
    lines = [
        Series.of(name, x.isel(site=0), control=k % 2 == 1)
        for k, (name, x) in enumerate(named.items())
    ]
    if row == "layer":
        return bars_with_intervals(lines, value_title=_UNPATCHED), scale
    return line_figure(lines, x_title=row, y_title=_UNPATCHED), scale


def _maps(panels: Mapping[Any, xr.DataArray], **titles: Any) -> go.Figure:
    top = max(float(values.max()) for values in panels.values())
    return heatmap_panels(
        panels,
        **titles,
        value_title="share",
        value_range=(0, min(top, 1) if top > 0 else 1),
        scale="mass",
        y_down=True,
    )


_NOISE = "noise of equal norm"


@findings_of.register
def _(result: AblationStudy) -> list[Finding]:
    roles, n = result.roles(), len(result.data["part"])
    named = {role: [part for part, x in roles.items() if x == role] for role in get_args(Role)}
    needed = named["information"] + named["needed"]
    where = f"at {result.widest}" if result.widest == "all loops" else f"in {result.widest}"
    at = f"{where} and some position" if result.data.sizes["pos"] > 1 else where
    # The kind of ablation that decides, as in AblationStudy.roles.
    done = result.data["ablation"].values
    kind = next(kind for kind in ("resample", "mean", "zero") if kind in done)
    if needed:
        verb = "is" if len(needed) == 1 else "are"
        text = f"{len(needed)} of {n} parts {verb} needed ({_spell(needed)}): {kind} ablation {at} "
        text += "changes"
    else:
        text = f"None of {n} parts is needed: no {kind} ablation {at} changes"
    text += (
        f" the answers of at least {percent(NEEDED_SHARE)} of examples (low end of the interval)."
    )
    for role, words in (
        ("constant", "Needed as a constant only"),
        ("unclear", "Unclear"),
        ("idle", "Without effect"),
    ):
        if named[role]:
            text += f" {words}: {_spell(named[role])}."
    return [Finding(text, value=f"{len(needed)} of {n}")]


def _spell(parts: list[str]) -> str:
    more = f" and {len(parts) - 5} more" if len(parts) > 5 else ""
    return f"{', '.join(parts[:5])}{more}"


@figures_of.register
def _(result: AblationStudy) -> list[Figure]:
    # Of the kinds of ablation the one that changes most, [part, when, pos].
    worst = result.data.min("ablation").sel(estimate="value", drop=True)
    some_when, some_pos = (result.data.sizes[axis] > 1 for axis in ("when", "pos"))
    if some_when or some_pos:
        rest = worst.min("pos") if some_when else worst.isel(when=0)
        panels = {
            "answers changed": 1 - rest["agreement"],
            f"answers changed, {_NOISE}": 1 - rest[f"{CONTROL}agreement"],
        }
        plot = heatmap_panels(
            panels,
            x_title="ablated at" if some_when else "position ablated",
            y_title="part",
            value_title="share",
            scale="mass",
            y_down=True,
        )
        most = ["kind"] * (result.data.sizes["ablation"] > 1)
        most += ["position"] * (some_when and some_pos)
        how = f" Shown: the {' and '.join(most)} with the most changes, of ablations and of noise."
        how *= bool(most)
    else:
        data, bars, how = result.data.isel(when=0, pos=0), [], ""
        for kind in map(str, data["ablation"].values):
            cells: xr.Dataset = data.sel(ablation=kind)
            bars.append(Series.of(kind, _changed(cells["agreement"])))
            noise = _changed(cells[f"{CONTROL}agreement"])
            bars.append(Series.of(f"{_NOISE}, {kind}", noise, control=True))
        plot = bars_with_intervals(bars, value_title="answers changed", value_range=(0, 1))
    means = {"position": "at its position", "token": "of its token", "all": "of all positions"}
    kinds = {
        "zero": "zero",
        "mean": f"the loop's mean {means[result.mean_over]}",
        "resample": "another example's value",
    }
    clean = percent(result.reference().sel({ESTIMATE: "value"}))
    names = [prefix + name for prefix in ("", CONTROL) for name in ABLATION_MEASURES]
    return [
        Figure(
            title="Answers changed by ablation",
            plot=plot,
            caption=(
                "The output of one head, MLP or other part is set to "
                f"{' or '.join(kinds[kind] for kind in result.data['ablation'].values)}. Answers "
                f"changed: the share of {result.n_examples} examples answered differently from "
                f"the clean run, which is right in {clean} of them.{how}"
            ),
            control=(
                "Noise of equal norm in a random direction. If it changes as many answers, zero "
                "and mean ablation say nothing about the content of the part. Another example's "
                "activation occurs in some run, so its effect is due to the content."
            ),
            data=result.to_dataframe(*names),
        )
    ]


def _changed(agreement: xr.DataArray) -> xr.DataArray:
    """The complement of an estimate, with its interval ends reversed."""
    ends = agreement.sel({ESTIMATE: ["value", "high", "low"]})
    return 1 - ends.assign_coords({ESTIMATE: ["value", "low", "high"]})


_STEERED = {"add": "Adding the direction to", "project": "Projecting the direction out of"}
_STEERED |= {"clamp": "Clamping the direction in"}


@findings_of.register
def _(result: SteeringSweep) -> list[Finding]:
    changed, control = (
        x.sel({ESTIMATE: "value"}) for x in (result.data["changed"], result.control())
    )
    beyond = result.beyond_control()
    n_beyond, n_cells = int(beyond.sum()), changed.size
    text = f"{_STEERED[result.mode]} `{result.component}` at one loop "
    if not n_beyond:
        text += (
            "never changes more answers (low end of the interval) than every random direction of "
            f"the same norm ({n_cells} pairs of loop and strength)."
        )
        return [Finding(text, value="no more than random")]
    # The largest gain over the control, among those that no random direction reaches.
    most = (changed - control).where(beyond, -np.inf).argmax(["loop", "strength"])
    best = {axis: int(index) for axis, index in most.items()}
    cell = result.data["changed"].isel(best)
    loop, strength = int(cell["loop"]), float(cell["strength"])
    value, low, high = (float(x) for x in cell.values)
    text += (
        f"changes the answers of {percent(value)} ({100 * low:.0f}–{100 * high:.0f}) of examples "
        f"in loop {loop} at strength {strength:g}, where it exceeds random directions of the same "
        f"norm most ({percent(control.isel(best))}). It changes more answers (low end of the "
        f"interval) than every random direction at {n_beyond} of {n_cells} pairs of loop and "
        "strength."
    )
    return [Finding(text, value=f"{percent(value)} in loop {loop}")]


@figures_of.register
def _(result: SteeringSweep) -> list[Figure]:
    loops = result.data["loop"].values
    # At most five loops, from the first to the last.
    shown = loops[np.unique(np.linspace(0, len(loops) - 1, min(5, len(loops))).round().astype(int))]
    panels = []
    for measure, title in (("changed", "answers changed"), ("effect", "effect")):
        lines = [Series.of(f"loop {loop}", result.data[measure].sel(loop=loop)) for loop in shown]
        control = result.control(measure).sel(loop=shown).mean("loop")
        lines.append(Series.of("random directions", control, control=True))
        panels.append(LinePanel(lines, title))
    names = ("changed", "effect")
    controls = {f"control_{name}": result.control(name) for name in names}
    return [
        Figure(
            title=f"Steering `{result.component}`, by strength and loop",
            plot=line_panels(panels, x_title="strength"),
            caption=(
                f"{_STEERED[result.mode]} `{result.component}` at one loop: the share of "
                f"{result.n_examples} examples with another answer than in the clean run. Below, "
                f"effect: the change of the {result.metric} (95% intervals over examples)."
            ),
            control=(
                f"Grey: {result.data.sizes['draw']} random directions of the same norm, mean over "
                "the loops shown, with the 95% interval over draws."
            ),
            data=tidy({**{name: result.data[name] for name in names}, **controls}),
        )
    ]
