"""What a study of reachability says and shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loopinterp.dynamics.reachability import ReachabilityResult
from loopinterp.dynamics.rounding import with_rounding
from loopinterp.dynamics.starts import OWN
from loopinterp.intervals import ESTIMATE, band_of, share_of
from loopinterp.plotting import LinePanel, Series, bars_with_intervals, line_panels
from loopinterp.results import Figure, Finding, figures_of, findings_of, percent, tidy

if TYPE_CHECKING:
    import xarray as xr

SECTION = "limits"


@findings_of.register
@with_rounding
def _(result: ReachabilityResult) -> list[Finding]:
    """Whether an input has one limit, and whether it is come back to."""
    found = result.found()
    n_found, n_examples = int(found.sum()), found.size
    if not n_found:
        text = (
            f"From its own start the model reaches no limit in any of the {n_examples} examples, "
            "so it cannot be said what else is reached from elsewhere."
        )
        return [Finding(text, value="no limit found", good=False)]
    return [_starts(result, n_found), _kicks(result)]


def _starts(result: ReachabilityResult, n_found: int) -> Finding:
    n_examples = result.data.sizes["batch"]
    one, reached = _value(result.one_limit()), _value(result.reached())
    apart = _value(share_of(result.own_limit_differs(), "batch"))
    rest = reached.drop_sel(start=OWN)
    least = rest["start"].values[rest.values == float(rest.min())].tolist()
    where = "from every other start alike"
    if len(least) < rest.size:
        where = f"least often from {', '.join(map(repr, least))}"
    text = (
        f"{percent(one)} of {n_examples} inputs lead to one and the same limit from all "
        f"{reached.size} starts; the own limit is reached {where} "
        f"({percent(rest.min())} of the {n_found} inputs that have one)."
    )
    if float(apart) < 0.5:
        text += (
            f" But only {percent(apart)} of the inputs have another limit than the next input: "
            "what is reached from everywhere does not know the input."
        )
    return Finding(
        text, value=f"one limit in {percent(one)}", good=min(float(one), float(apart)) >= 0.99
    )


def _kicks(result: ReachabilityResult) -> Finding:
    back = _value(result.recovered())
    undone = back.where((back >= 0.95).cumprod("kick") == 1).dropna("kick")
    if not undone.size:
        smallest = back["kick"][0].item()
        text = (
            f"Kicked by {smallest:g} of its size, a limit is come back to in "
            f"{percent(back[0])} of the cases only."
        )
        return Finding(text, value=f"{percent(back[0])} come back", good=False)
    most = undone["kick"][-1].item()
    text = (
        f"Kicks of up to {most:g} times the size of the state are undone: {percent(undone.min())} "
        f"of the limits or more are come back to."
    )
    if undone.size < back.size:
        beyond = back[undone.size]
        text += f" Of kicks of {beyond['kick'].item():g}, {percent(beyond)} are."
    return Finding(text, value=f"kicks to {most:g}")


@figures_of.register
def _(result: ReachabilityResult) -> list[Figure]:
    """Who reaches the own limit from where, and what a kick does; nothing where there is none."""
    return [start_figure(result), kick_figure(result)] if result.found().any() else []


def start_figure(result: ReachabilityResult) -> Figure:
    """Share of the inputs that reach their own limit from each start, and the control."""
    reached = result.reached()
    chance = share_of(~result.own_limit_differs(), "batch").expand_dims(start=["the next input's"])
    bars = [
        Series.of("own limit reached from", reached),
        Series.of("is its own limit too (control)", chance, control=True),
    ]
    alignment = band_of(result.data["alignment"], "batch")
    table = tidy({"reached": reached, "alignment": alignment})
    other = _value(band_of(result.data["other_alignment"], "batch"))
    return Figure(
        title="Is the same limit reached from every start?",
        plot=bars_with_intervals(bars, value_title="share of inputs", value_range=(0, 1)),
        caption=(
            f"The share of the inputs that reach their own limit, to {result.same:g} of its norm, "
            "with 95% intervals. 'other' starts at the limit of another input."
        ),
        control=(
            "Hatched: inputs that share their limit with the next input, where reaching it says "
            f"nothing. The cosine of the limits of two inputs is {float(other):.2f} in the median."
        ),
        data=table,
    )


def kick_figure(result: ReachabilityResult) -> Figure:
    """Share of kicked limits that are come back to, and of right answers there."""
    exact = share_of(result.data["kick_exact"].isel(batch=result.found().values), "draw", "batch")
    back = result.recovered()
    lines = [Series.of("limit come back to", back), Series.of("answer right there", exact)]
    unkicked = _value(share_of(result.data["exact"].sel(start=OWN, drop=True), "batch"))
    return Figure(
        title="How large a kick is undone?",
        plot=line_panels(
            [LinePanel(lines, "share of kicks", y_range=(0, 1.03))],
            x_title="size of the kick, over the size of the state",
            x_log=True,
        ),
        caption=(
            "Noise is added to every position of a limit, and the loop goes on until it rests "
            "again. The lines are the share of the kicks after which it is back, and after which "
            "the answer is right, with 95% intervals."
        ),
        control=f"Without a kick {percent(unkicked)} of the answers are right.",
        data=tidy({"back": back, "exact_match": exact}),
    )


def _value(estimate: xr.DataArray) -> xr.DataArray:
    return estimate.sel({ESTIMATE: "value"}, drop=True)
