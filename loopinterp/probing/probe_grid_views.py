"""What a probe study says and shows."""

from __future__ import annotations

from loopinterp.intervals import wilson_of
from loopinterp.plotting import LinePanel, Series, heatmap_panels, line_panels
from loopinterp.probing.probe_grid import ProbeResult
from loopinterp.results import Figure, Finding, figures_of, findings_of

SECTION = "program"


@findings_of.register
def _(result: ProbeResult) -> list[Finding]:
    """The target that gains most over its controls."""
    gain = (result.data["accuracy"] - result.chance).max(["loop", "site", "group"])
    best = gain.isel(target=int(gain.argmax("target")))
    name = str(best["target"].item())
    if float(best) <= 0:
        text = f"None of the {gain.size} probed variables is read better than by its best control."
        return [Finding(text, value="none")]
    text = (
        f"Of {gain.size} probed variables, {name!r} gains most over the best control: "
        f"{float(best):.2f} in accuracy."
    )
    return [Finding(text, value=name)]


@figures_of.register
def _(result: ProbeResult) -> list[Figure]:
    """For each site the targets by loop with their controls, and by group if there are several."""
    sites = result.data["site"].values.tolist()
    figures = [_by_loop(result, site) for site in sites]
    if result.data.sizes["group"] > 1:
        figures += [_by_group(result, site) for site in sites]
    return figures


def _by_loop(result: ProbeResult, site: str) -> Figure:
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
        plot=line_panels(panels, x_title="loop"),
        caption=(
            "Accuracy of a linear probe for each variable at each loop (positions: "
            f"{cell['group'].item()}), on examples it was not trained on; bands are 95% intervals "
            "over places."
        ),
        control=(
            "Lower panels, on the same axes: the same probe on random labels fixed by the local "
            "input, on the model with shuffled weights, on the embedding alone, and the majority "
            "class."
        ),
        data=result.to_dataframe().query("site == @site"),
    )


def _by_group(result: ProbeResult, site: str) -> Figure:
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
        caption="Accuracy of the probe less that of its best control, by loop and position group.",
        control=(
            "Subtracted in each cell: the best of the random-weights model, the embedding alone "
            "and the majority class."
        ),
        data=result.to_dataframe().query("site == @site"),
    )
