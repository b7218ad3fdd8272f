"""What an ablation study says and shows: which parts are needed, against noise of equal norm."""

from __future__ import annotations

import plotly.graph_objects as go
import xarray as xr

from loopinterp.circuits.ablation_result import CONTROL, MEASURES, AblationStudy
from loopinterp.plotting import Series, bars_with_intervals, heatmap_panels
from loopinterp.results import Figure, Finding, figures_of, findings_of, percent

SECTION = "program"

_NAMED = 4
_NOISE = "noise of equal norm"
_CONTROL_TEXT = (
    "Noise of equal norm: the activation is moved as far as the ablation moves it, in a random "
    "direction. What that does, any disturbance of the size does; a part is called needed only "
    "where each kind of ablation leaves fewer examples right, beyond both intervals."
)


@findings_of.register
def _(result: AblationStudy) -> list[Finding]:
    """The parts that are needed whichever way they are ablated, and those that do nothing."""
    when = _widest(result)
    surely = result.weakest().sel(when=when)
    most = surely.max("pos").sortby(surely.max("pos"), ascending=False)
    needed = [str(x) for x in most["part"].values[most.values > 0]]
    kept = result.data["agreement"].sel(when=when, estimate="value", drop=True)
    idle = [str(x) for x in kept["part"].values[(kept == 1).all(["ablation", "pos"]).values]]
    n, at_one = result.data.sizes["part"], result.data.sizes["pos"] > 1
    where = f"at {when}" if when.startswith("all") else f"in {when}"
    text = (
        f"Of {n} parts ablated {where}{' at some one position' if at_one else ''}, "
        f"{_spell(needed)} shown to be needed: that takes fewer right examples than with noise of "
        f"the same norm in the part, whether it is {_kinds(result)}. "
        f"Of the parts, {_spell(idle)} without effect on the answer of any of "
        f"{result.n_examples} examples. "
        f"Undisturbed, {percent(result.reference().sel(estimate='value'))} are right."
    )
    return [Finding(text, value=f"{len(needed)} of {n}")]


def _widest(result: AblationStudy) -> str:
    """The choice of most loops."""
    lengths = [last - first for first, last in result.spans]
    return str(result.data["when"].values[lengths.index(max(lengths))])


def _spell(parts: list[str]) -> str:
    if not parts:
        return "none is"
    more = f" and {len(parts) - _NAMED} more" if len(parts) > _NAMED else ""
    return f"{len(parts)} ({', '.join(parts[:_NAMED])}{more}) {'are' if len(parts) > 1 else 'is'}"


def _kinds(result: AblationStudy) -> str:
    means = {"position": "at its position", "token": "of its token", "all": "of all positions"}
    words = {
        "zero": "set to zero",
        "mean": f"set to the mean {means[result.mean_over]} in that loop",
        "resample": "taken from another example",
    }
    return " or ".join(words[kind] for kind in result.data["ablation"].values)


@figures_of.register
def _(result: AblationStudy) -> list[Figure]:
    """Parts against loops, against positions, or alone."""
    worst = result.data.min("ablation").sel(estimate="value", drop=True)
    if result.data.sizes["when"] > 1:
        rest, x_title = worst.min("pos"), "ablated at"
        how = "at any one position, " if result.data.sizes["pos"] > 1 else ""
    elif result.data.sizes["pos"] > 1:
        rest, x_title, how = worst.isel(when=0), "position ablated", ""
    else:
        return [_figure(result, _bars(result), "")]
    panels = {
        "answers kept": rest["agreement"],
        f"answers kept, {_NOISE}": rest[f"{CONTROL}agreement"],
    }
    plot = heatmap_panels(
        panels, x_title=x_title, y_title="part", value_title="share", scale="mass", y_down=True
    )
    how = f"Of the kinds of ablation, {how}that which changes most is shown, and so of their noise."
    return [_figure(result, plot, how)]


def _bars(result: AblationStudy) -> go.Figure:
    data = result.data.isel(when=0, pos=0)
    bars = []
    for kind in map(str, data["ablation"].values):
        own: xr.Dataset = data.sel(ablation=kind)
        bars.append(Series.of(kind, own["agreement"]))
        bars.append(Series.of(f"{_NOISE}, {kind}", own[f"{CONTROL}agreement"], control=True))
    return bars_with_intervals(bars, value_title="examples answered as before", value_range=(0, 1))


def _figure(result: AblationStudy, plot: go.Figure, how: str) -> Figure:
    names = [prefix + name for prefix in ("", CONTROL) for name in MEASURES]
    return Figure(
        title="Answers without one part",
        plot=plot,
        caption=(
            "The model is run without one head, MLP or other part, which is "
            f"{_kinds(result)}. Answers kept: the share of {result.n_examples} examples that are "
            f"answered as by the undisturbed run. {how}".strip()
        ),
        control=_CONTROL_TEXT,
        data=result.to_dataframe(*names),
    )
