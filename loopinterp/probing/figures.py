"""What the carry study and a probe study say and show."""

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
from loopinterp.probing.carry_wavefront import CarryStudyResult, first_decodable
from loopinterp.probing.probe_grid import ProbeResult

_PROGRAM = "program"
_ACCURACY = (0.4, 1.02)


@findings_of.register
def _(result: CarryStudyResult) -> list[Finding]:
    """How the carry travels, as far as it could have been otherwise."""
    n_chains = result.data.sizes["chain_length"]
    n_known = int(result.first_loop.notnull().sum())
    if not np.isfinite(result.speed):
        why = "long ones no later than short ones"
        if np.isnan(result.speed):
            why = "too few to say how fast a carry travels"
        text = (
            f"No wavefront of the carry: a linear probe reads {n_known} of {n_chains} chain "
            f"lengths (best accuracy {float(result.data['accuracy'].max()):.2f}), {why}."
        )
        return [Finding(text, value="no wavefront", good=False)]
    # Read in every cell that the carry can have reached.
    good = result.resolved >= 0.98
    travels = f"The carry travels {result.speed:.2f} positions in a loop"
    reads = f"a linear probe reads it with an accuracy of {result.resolved:.2f} at worst"
    if result.reach is None:
        good = good and result.unresolved <= 0.60  # and unread in the others
        text = (
            f"{travels}: {reads} once as many loops have run as it has positions to travel, and of "
            f"{result.unresolved:.2f} at best (chance is 0.50) where it has three positions or "
            "more still to go."
        )
    else:
        per_loop = f"{result.reach} position{'s' if result.reach != 1 else ''} a loop"
        text = (
            f"{'The carry can be read as soon as it can arrive' if good else travels}: {reads} "
            f"from the loop on at which the bit that decides it comes within reach ({per_loop}), "
            f"for {n_known} of {n_chains} chain lengths. Before, nothing could be read, whatever "
            "the model has learned (the window is a light cone)."
        )
    return [Finding(text, value=f"{result.speed:.2f} positions / loop", good=good)]


@figures_of.register
def _(result: CarryStudyResult) -> list[Figure]:
    """The wavefront, and where there is one, the cut through it and what was read besides."""
    others = (_front_profile, _first_loops, _variables, _code_lengths)
    shown = others if np.isfinite(result.speed) else ()
    return [_wavefront(result), *(figure(result) for figure in shown)]


def _wavefront(result: CarryStudyResult) -> Figure:
    data = result.data
    loops, chains = data["loop"].values, data["chain_length"].values
    at = result.speed_limit * loops + result.reach_before  # edge of the front after each loop
    inside = (at >= chains[0]) & (at <= chains[-1])
    name = "chain length = loops" if result.reach is None else "edge of the light cone"
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
    line = (
        "On the red line and right of it, what moves one position a loop has arrived."
        if result.reach is None
        else "The red line is the edge of the light cone: left of it nothing can be read, whatever "
        "the model has learned; what is found is how soon cells right of it are bright."
    )
    far = data["random_model"].sel(chain_length=data["chain_length"] >= 4)
    beyond = f" (at most {float(far.max()):.2f} from chain length 4 on)" if far.size else ""
    return Figure(
        title="The carry travels through the model",
        plot=plot,
        caption=(
            "Each cell: how often a linear probe of its own reads the carry into a position from "
            "the state there, by loops run and by positions that the carry has to travel. Bright "
            f"is always right, dark a coin toss. {line}"
        ),
        control=(
            f"Random weights: the same probes on shuffled weights{beyond}. The majority "
            f"class scores {float(data['majority'].mean()):.2f} in every row; asked for random "
            f"labels, the probes reach {float(data['control_task'].mean()):.2f} on average."
        ),
        data=result.to_dataframe(
            "accuracy", "in_reach", "random_model", "control_task", "shared_probe",
            "last_loop_probe", "short_to_long",
        ),
    )  # fmt: skip


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
    beyond = (
        "right of it the deciding bit has further to go than one position a loop."
        if result.reach is None
        else "right of it the deciding bit is out of the window's reach, so that no probe could "
        "read it: that half cannot fail, and shows nothing."
    )
    return Figure(
        title="Behind and ahead of the front",
        plot=line_figure(
            series,
            x_title="positions still to go",
            y_title="accuracy",
            y_range=_ACCURACY,
            references=[Reference(0.5, "chance")],
        ),
        caption=(
            "The same accuracies by distance from the front (the red line above): at 0 and left of "
            f"it the carry can have arrived, {beyond} Lines are means over all loops, bands run "
            "from the worst to the best cell. Trained model: a probe for each cell. Shared probe: "
            "one for all chain lengths. Last loop's probe: a shared one of the settled model; it "
            "shows whether a fresh carry is written in the direction in which it is kept."
        ),
        control=(
            "Grey lines: the same probe on the model with shuffled weights, on random labels, on "
            "the embedding alone, and the majority class."
        ),
        data=pd.concat(tables, ignore_index=True),
    )


def _first_loops(result: CarryStudyResult) -> Figure:
    data = result.data
    lines = {
        "carry in": data["accuracy"],
        "sum bit": data["variable_accuracy"].sel(variable="sum", drop=True),
        "carry in, last probe": data["last_loop_probe"],
        "random weights": data["random_model"],
    }
    first = {name: first_decodable(values, result.threshold) for name, values in lines.items()}
    series = [Series.of(name, x, control=name == "random weights") for name, x in first.items()]
    soonest = np.ceil((data["chain_length"] - result.reach_before).clip(0) / result.speed_limit)
    bound = "soonest possible"
    dashed = "the soonest that the window allows, below which no line can lie"
    if result.reach is None:
        bound = "one position a loop"
        dashed = f"{bound}, the fastest that attention to one neighbour allows"
    series.append(Series.of(bound, soonest, control=True, markers=False))
    return Figure(
        title="First loop at which a carry can be read",
        plot=line_figure(series, x_title="chain length", y_title="loops until decodable"),
        caption=(
            "How many loops it takes until a probe reads each chain length with accuracy "
            f"{result.threshold:g} or more. A straight line means a constant speed; its slope is "
            f"{1 / result.speed:.2f} loops per position. A gap: never reached."
        ),
        control=(
            f"Dashed: {dashed}; and the model with shuffled weights, which passes on a few "
            "positions at most."
        ),
        data=tidy(first),
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
        title="What else can be read at each loop",
        plot=line_panels(panels, x_title="loops run"),
        caption=(
            "Balanced accuracy (chance is 0.5) for each variable of the addition, mean over chain "
            "lengths. Generate and propagate concern the position's own two bits; carry in, carry "
            "out and sum need the positions before."
        ),
        control=(
            "The two lower panels: what is in the inputs and the wiring alone. A variable that is "
            "read as well there was given, not computed."
        ),
        data=pd.concat(tables, ignore_index=True),
    )


def _code_lengths(result: CarryStudyResult) -> Figure:
    data = result.data
    front, moved = "light cone", "all that the window lets in"
    if result.reach is None:
        front = moved = "one position a loop"
    lines = {
        "trained model": data["code_length"],
        front: (result.ahead > 0).mean("chain_length"),
        "random weights": data["code_length_random_model"],
        "random labels": data["code_length_control"],
    }
    return Figure(
        title="How many bits the carries still cost",
        plot=line_figure(
            [
                Series.of(name, values, control=name != "trained model")
                for name, values in lines.items()
            ],
            x_title="loops run",
            y_title="bits per carry",
            y_range=(0.0, 1.05),
            references=[Reference(1.0, "nothing known")],
        ),
        caption=(
            "Online code length: bits needed to send each carry to someone who holds the states "
            "and learns a probe as the carries arrive. 1 bit: the states tell nothing. It counts "
            "how hard the probe is to learn, as accuracy does not."
        ),
        control=(
            f"Dashed: a front of {moved}, read without any cost of learning; the model with "
            "shuffled weights; and random labels."
        ),
        data=tidy(lines),
    )


@findings_of.register
def _(result: ProbeResult) -> list[Finding]:
    """The target that gains most over its controls."""
    gain = (result.data["accuracy"] - result.chance).max(["loop", "site", "group"])  # [target]
    best = gain.isel(target=int(gain.argmax("target")))
    name = str(best["target"].item())
    if float(best) <= 0:
        text = f"None of the {gain.size} probed variables is read better than by its best control."
        return [Finding(text, kind=_PROGRAM, value="none")]
    text = (
        f"Of {gain.size} probed variables, {name!r} gains most over the best control: "
        f"{float(best):.2f} in accuracy."
    )
    return [Finding(text, kind=_PROGRAM, value=name)]


@figures_of.register
def _(result: ProbeResult) -> list[Figure]:
    """For each site the targets by loop with their controls, and by group if there are several."""
    sites = result.data["site"].values.tolist()
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
        lines = Series.each(values, "target")
        panels.append(LinePanel(lines, "accuracy", title, y_range=(0.0, 1.02)))
    return Figure(
        title=f"Decodable variables at {site}",
        section=_PROGRAM,
        plot=line_panels(panels, x_title="loop"),
        caption=(
            "Accuracy of a linear probe for each variable at each loop (positions: "
            f"{cell['group'].item()}), on examples it was not trained on; bands are 95% intervals "
            "over places."
        ),
        control=(
            "Lower panels: the same probe on random labels fixed by the local input, on the model "
            "with shuffled weights, on the embedding alone, and the majority class."
        ),
        data=result.to_dataframe().query("site == @site"),
    )


def _probes_by_group(result: ProbeResult, site: str) -> Figure:
    gain = (result.data["accuracy"] - result.chance).sel(site=site)
    panels = {str(k.item()): gain.sel(target=k).transpose("group", "loop") for k in gain["target"]}
    return Figure(
        title=f"Decodable variables by position at {site}",
        section=_PROGRAM,
        plot=heatmap_panels(
            panels,
            y_title="positions",
            value_title="gain",
            value_range=(-1.0, 1.0),
            scale="diverging",
        ),
        caption="Accuracy of the probe less that of its best control, by loop and position group.",
        control=(
            "Subtracted in each cell: the best of the random-weights model, the embedding alone "
            "and the majority class."
        ),
        data=result.to_dataframe().query("site == @site"),
    )
