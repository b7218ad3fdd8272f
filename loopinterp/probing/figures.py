"""Findings and figures of the carry study and of probe studies."""

from __future__ import annotations

import numpy as np
import pandas as pd
import xarray as xr

from loopinterp.core.intervals import wilson_of
from loopinterp.core.results import Figure, Finding, figures_of, findings_of, tidy
from loopinterp.figures import (
    LinePanel,
    Reference,
    Series,
    heatmap_panels,
    line_figure,
    line_panels,
)
from loopinterp.probing.carry_wavefront import CarryStudyResult
from loopinterp.probing.probe_grid import ProbeResult

_ACCURACY = (0.4, 1.02)


@findings_of.register
def _(result: CarryStudyResult) -> list[Finding]:
    n_chains = result.data.sizes["chain_length"]
    n_known = int(result.first_loop.notnull().sum())
    if not np.isfinite(result.speed):
        why = "long chains no later than short ones"
        if np.isnan(result.speed):
            why = "too few to measure a speed"
        text = (
            f"No wavefront: a linear probe decodes the carry at {n_known} of {n_chains} distances, "
            f"{why} (best accuracy {float(result.data['accuracy'].max()):.2f})."
        )
        return [Finding(text, value="no wavefront", good=False)]
    # Decoded in every cell that the carry can have reached.
    good = result.resolved >= 0.98
    text = (
        f"The carry moves {result.speed:.2f} positions per loop (linear probe, {n_known} of "
        f"{n_chains} distances)."
    )
    if result.reach is None:
        good = good and result.unresolved <= 0.60  # and not in the others
        text += (
            f" Accuracy is at least {result.resolved:.2f} behind a front of one position per loop, "
            f"and at most {result.unresolved:.2f} three or more positions ahead of it."
        )
    else:
        cone = f"{result.reach} position{'s' if result.reach != 1 else ''} per loop"
        when = "From the first loop inside" if good else "Inside"
        text += (
            f" {when} the light cone ({cone}), accuracy is at least {result.resolved:.2f}; outside "
            "it nothing can be decoded."
        )
    return [Finding(text, value=f"{result.speed:.2f} positions / loop", good=good)]


@figures_of.register
def _(result: CarryStudyResult) -> list[Figure]:
    data = result.data
    loops, chains = data["loop"].values, data["chain_length"].values
    at = result.speed_limit * loops + result.reach_before  # edge of the front after each loop
    inside = (at >= chains[0]) & (at <= chains[-1])
    name = "one position per loop" if result.reach is None else "edge of the light cone"
    front = Series(name, loops[inside], at[inside], colour="red", markers=False)
    panels = {"trained model": data["accuracy"].T, "random weights": data["random_model"].T}
    plot = heatmap_panels(
        panels,
        x_title="loops run",
        value_title="accuracy",
        value_range=(0.5, 1.0),
        columns=2,
        overlay=dict.fromkeys(panels, front),
    )
    line = "Red line: one position per loop."
    if result.reach is not None:
        line = "Left of the red line (the edge of the light cone) nothing can be decoded."
    wavefront = Figure(
        title="The carry travels through the model",
        plot=plot,
        caption=(
            "Each cell: accuracy of a linear probe for the carry into a position, by loops run and "
            f"by distance that the carry travels (bright: always right, dark: chance). {line}"
        ),
        control=(
            "Random weights: the same probes on shuffled weights. The majority class scores "
            f"{float(data['majority'].mean()):.2f}; probes for random labels score "
            f"{float(data['control_task'].mean()):.2f} on average."
        ),
        data=result.to_dataframe(
            "accuracy", "in_reach", "random_model", "control_task", "shared_probe",
            "last_loop_probe", "short_to_long",
        ),
    )  # fmt: skip
    others = (_front_profile, _variables, _code_lengths) if np.isfinite(result.speed) else ()
    return [wavefront, *(figure(result) for figure in others)]


def _front_profile(result: CarryStudyResult) -> Figure:
    lines = {
        "trained model": ("accuracy", False),
        "shared probe": ("shared_probe", False),
        "last loop's probe": ("last_loop_probe", False),
        f"trained on {result.n_short} bits": ("short_to_long", False),
        "random weights": ("random_model", True),
        "random labels": ("control_task", True),
        "embedding alone": ("embedding", True),
        "majority class": ("majority", True),
    }
    series, tables = [], []
    for name, (variable, control) in lines.items():
        # Mean, least and greatest over the cells at each distance from the front.
        ahead, values = xr.broadcast(result.ahead, result.data[variable])
        cells = tidy({"ahead": ahead, "value": values})
        near = cells[cells["ahead"].abs() <= 8].groupby("ahead")["value"]
        table = near.agg(mean="mean", least="min", greatest="max").reset_index()
        low, high = (None, None) if control else (table["least"], table["greatest"])
        mean = table["mean"]
        series.append(Series(name, table["ahead"], mean, low=low, high=high, control=control))
        tables.append(table.assign(line=name))
    beyond = "the deciding bit is further away than one position per loop."
    if result.reach is not None:
        beyond = "no probe can read the deciding bit (outside the light cone)."
    return Figure(
        title="Behind and ahead of the front",
        plot=line_figure(
            series,
            x_title="positions still to go",
            y_title="accuracy",
            y_range=_ACCURACY,
            references=[Reference(0.5, "chance for carries")],
        ),
        caption=(
            f"Mean accuracy (band: worst to best cell) by distance from the front; right of 0 "
            f"{beyond} Shared probe: one for all distances. Last loop's probe: the shared one of "
            "the last loop, applied to all loops."
        ),
        control=(
            "Random labels depend on the last four inputs alone, so a probe can memorise them; "
            "selectivity is the accuracy on carries minus that on random labels."
        ),
        data=pd.concat(tables, ignore_index=True),
    )


def _variables(result: CarryStudyResult) -> Figure:
    data = result.data
    sources = {
        "trained model": data["variable_accuracy"],
        "random weights": data["variable_random_model"],
        "embedding alone": data["variable_embedding"].expand_dims(loop=data["loop"], axis=1),
    }
    panels, tables, chance = [], [], [Reference(0.5, "chance")]
    for title, values in sources.items():
        mean = values.mean("chain_length")
        lines = Series.each(mean, "variable")
        panels.append(LinePanel(lines, "accuracy", title, y_range=_ACCURACY, references=chance))
        tables.append(tidy({"balanced_accuracy": mean}).assign(source=title))
    return Figure(
        title="What else can be decoded at each loop",
        plot=line_panels(panels, x_title="loops run"),
        caption=(
            "Balanced accuracy for each variable of the addition, mean over distances. Generate "
            "and propagate concern the position's own bits; carry in, carry out and sum need the "
            "positions before."
        ),
        control=(
            "Lower panels: random weights and the embedding alone. A variable that they "
            "decode equally well is given by the input, not computed."
        ),
        data=pd.concat(tables, ignore_index=True),
    )


def _code_lengths(result: CarryStudyResult) -> Figure:
    data = result.data
    front = "one position per loop" if result.reach is None else "light cone"
    lines = {
        "trained model": data["code_length"],
        front: (result.ahead > 0).mean("chain_length"),
        "random weights": data["code_length_random_model"],
        "random labels": data["code_length_control"],
    }
    series = [Series.of(n, values, control=n != "trained model") for n, values in lines.items()]
    most = max(1.0, *(float(values.max()) for values in lines.values()))
    return Figure(
        title="Bits per carry, given the states",
        plot=line_figure(
            series,
            x_title="loops run",
            y_title="bits per carry",
            y_range=(0.0, 1.05 * most),
            references=[Reference(1.0, "no information")],
        ),
        caption=(
            "Online code length: bits to send each carry to a receiver who has the states and "
            "learns a probe as the carries arrive. Unlike accuracy it counts how hard the probe is "
            "to learn."
        ),
        control=(
            f"Dashed: random weights; random labels; and the {front}, as if all carries behind its "
            "front were known without learning."
        ),
        data=tidy(lines),
    )


@findings_of.register
def _(result: ProbeResult) -> list[Finding]:
    gain = (result.data["accuracy"] - result.chance).max(["loop", "site", "group"])  # [target]
    best = gain.isel(target=int(gain.argmax("target")))
    name = str(best["target"].item())
    if float(best) <= 0:
        text = f"No probe beats its best control, for any of {gain.size} variables."
        return [Finding(text, value="none")]
    text = (
        f"{name!r} gains most over the best control: {float(best):.2f} in accuracy "
        f"({gain.size} variables probed)."
    )
    return [Finding(text, value=name)]


@figures_of.register
def _(result: ProbeResult) -> list[Figure]:
    sites = result.data["site"].values
    figures = [_probes_by_loop(result, site) for site in sites]
    if result.data.sizes["group"] > 1:
        figures += [_probes_by_group(result, site) for site in sites]
    return figures


def _probes_by_loop(result: ProbeResult, site: str) -> Figure:
    cell = result.data.sel(site=site).isel(group=0)
    sources = {
        "trained model": ("accuracy", True),
        "random labels": ("control_task", False),
        "random weights": ("random_model", True),
        "embedding alone": ("embedding", True),
        "majority class": ("majority", False),
    }
    panels = []
    for title, (name, counted) in sources.items():
        values = wilson_of(cell[name] * cell["n_test"], cell["n_test"]) if counted else cell[name]
        # Colours of the palette would repeat for more targets.
        lines = Series.each(values, "target", in_order=cell.sizes["target"] > 5)
        panels.append(LinePanel(lines, "accuracy", title, y_range=(0.0, 1.02)))
    return Figure(
        title=f"Decodable variables at {site}",
        plot=line_panels(panels, x_title="loop"),
        caption=(
            "Held-out accuracy of a linear probe for each variable at each loop (positions: "
            f"{cell['group'].item()}; 95% intervals)."
        ),
        control=(
            "Lower panels: the same probe on random labels fixed by the local input, on shuffled "
            "weights, on the embedding alone, and the majority class."
        ),
        data=result.to_dataframe().query("site == @site"),
    )


def _probes_by_group(result: ProbeResult, site: str) -> Figure:
    gain = (result.data["accuracy"] - result.chance).sel(site=site)
    panels = {str(k.item()): gain.sel(target=k).transpose("group", "loop") for k in gain["target"]}
    return Figure(
        title=f"Decodable variables by position at {site}",
        plot=heatmap_panels(
            panels,
            y_title="positions",
            value_title="gain",
            value_range=(-1.0, 1.0),
            scale="diverging",
        ),
        caption="Accuracy of the probe minus that of its best control, by loop and position group.",
        control="Controls: random weights, the embedding alone, and the majority class.",
        data=result.to_dataframe().query("site == @site"),
    )
