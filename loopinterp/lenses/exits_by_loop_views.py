"""What a study of exits says and shows."""

from __future__ import annotations

import numpy as np
import xarray as xr

from loopinterp.intervals import ESTIMATE, mean_estimate, share_of
from loopinterp.lenses.exits_by_loop import ExitResult
from loopinterp.plotting import LinePanel, Reference, Series, line_figure, line_panels
from loopinterp.results import Figure, Finding, figures_of, findings_of, percent, tidy

SECTION = "convergence"

_FOR_ALL = "one loop for all"


@findings_of.register
def _(result: ExitResult) -> list[Finding]:
    """What an oracle could save, and which rule saves how much of it."""
    if result.best_loop()[0] == 0:
        text = f"No example is right after any one number of loops up to {result.n_loops}."
        return [Finding(f"{text} There is nothing to be saved by reading it early.")]
    return [_oracle(result), _rules(result)]


def _oracle(result: ExitResult) -> Finding:
    best, at = result.best_loop()
    share, mean = result.oracle()
    another = result.data["another"]
    right = "right" if result.targets else "as the last loop does"
    text = (
        f"One number of loops for all reads at best {percent(best)} of the examples {right} ({at} "
        f"of {result.n_loops} loops); reading each at its first such loop, {percent(share)} after "
        f"{mean:.1f} on average"
    )
    if another.notnull().any():
        chance = float(another.mean())
        text += f". Another example's answer turns up at some loop in {percent(chance)}"
        if chance > 0.5:
            return Finding(f"{text}, so that this oracle says little.")
    return Finding(f"{text}.")


def _rules(result: ExitResult) -> Finding:
    _, at = result.best_loop()
    costs = {str(rule): result.cheapest(rule) for rule in result.data["rule"].values}
    found = {rule: cost for rule, cost in costs.items() if cost is not None and cost < at}
    if not found:
        text = (
            f"No rule is as often right with fewer loops on average than {at}, the best number "
            "for all, at any tolerance tried."
        )
        return Finding(text)
    rule = min(found, key=found.__getitem__)
    exact, dealt, loops = result.gain(rule)
    text = (
        f"The rule {rule!r} is as often right with {found[rule]:.1f} loops on average, at the best "
        f"tolerance in hindsight. Stopping after {loops:.1f}, it has {percent(exact)} right, and "
        f"{percent(dealt)} with its stops dealt to the examples at random."
    )
    others = [name for name in costs if name not in found]
    if others:
        text += f" Never so: {', '.join(others)}."
    return Finding(text, value=f"{found[rule]:.1f} loops")


@figures_of.register
def _(result: ExitResult) -> list[Figure]:
    """Right answers against loops spent, and what is read and moves at each loop."""
    return [_spent(result), _by_loop(result)]


def _spent(result: ExitResult) -> Figure:
    exact = share_of(result.data["exact"].isel(loop=slice(1, None)), "batch")
    lines = [Series.of(_FOR_ALL, exact)]
    for rule in result.data["rule"].values:
        at = result.data.sel(rule=rule).isel(step=slice(1, None))
        order = np.argsort(at["swept_loops"].values, kind="stable")
        x, y = (at[name].values[order] for name in ("swept_loops", "swept_exact"))
        lines.append(Series(str(rule), x, y, markers=False))
    share, mean = result.oracle()
    lines.append(Series("oracle", [mean], [share], markers=True))
    gains = {str(r): result.gain(r) for r in result.data["rule"].values}
    rule = max(gains, key=lambda name: gains[name][0] - gains[name][1])
    at = result.data.sel(rule=rule)
    order = np.argsort(at["swept_loops"].values, kind="stable")
    dealt = Series(
        f"stops of {rule!r}, dealt at random",
        at["swept_loops"].values[order],
        at["swept_dealt"].values[order],
        control=True,
        markers=False,
    )
    plot = line_figure(
        [*lines, dealt],
        x_title="loops, mean over examples",
        y_title="exact match" if result.targets else "as after the last loop",
        y_range=(0, 1.03),
    )
    return Figure(
        title="Early exits",
        plot=plot,
        caption=(
            "Each line is a rule with all tolerances, from one at which every example stops at "
            f"once to one at which none does before loop {result.n_loops}; the line with a band is "
            "one number of loops for all, with 95% intervals. The oracle stops each example at its "
            f"first right loop. {result.data.sizes['batch']} examples."
        ),
        control=(
            "Grey: the same numbers of loops as the rule with the greatest gain chose, dealt to "
            "the examples at random. What lies above it is what the rule knows of an example."
        ),
        data=tidy(
            {name: result.data[name] for name in ("swept_loops", "swept_exact", "swept_dealt")}
        ).round(4),
    )


def _by_loop(result: ExitResult) -> Figure:
    def mean(name: str) -> xr.DataArray:
        values = result.data[name].astype(float).isel(loop=slice(1, None))
        found = xr.apply_ufunc(
            mean_estimate, values, input_core_dims=[["batch"]], output_core_dims=[[ESTIMATE]]
        )
        return found.assign_coords({ESTIMATE: ["value", "low", "high"]})

    ends = np.unique(result.data["answer_loops"]).tolist()
    marks = [Reference(ends[0], "T(n)", "x")] if result.targets and len(ends) == 1 else []
    answers = {"exact": "exact match", "agreement": "positions as after the last loop"}
    sure = {"confidence": "probability of the class on top"}
    panels = [
        LinePanel(
            [Series.of(words, mean(name)) for name, words in (answers | sure).items()],
            "share",
            y_range=(0, 1.03),
            references=marks,
        ),
        LinePanel(
            [
                Series.of("entropy", mean("entropy")),
                Series.of("KL to the loop before", mean("readout_kl")),
            ],
            "nats",
        ),
        LinePanel(
            [
                Series.of("relative residual", mean("residual")),
                Series.of("cosine of updates", _cosine(result)),
            ],
            "of the state",
        ),
    ]
    names = ("exact", "agreement", "confidence", "entropy", "readout_kl", "norm", "residual")
    return Figure(
        title="Readings and updates",
        plot=line_panels(panels, x_title="loop"),
        caption=(
            "Means over examples with 95% intervals. Entropy and probability say how sure the "
            "readout is; the other lines, how much it and the state still change."
        ),
        control="Exact match: a rule is worth what its signal does where that one rises.",
        data=tidy({name: mean(name) for name in names}).round(4),
    )


def _cosine(result: ExitResult) -> xr.DataArray:
    """Mean over the examples whose updates are above rounding."""
    return result.data["cosine"].isel(loop=slice(1, None)).mean("batch")
