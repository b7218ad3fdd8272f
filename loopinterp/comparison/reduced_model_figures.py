"""Findings and figures of reduced models: accuracy against the numbers held per position."""

from __future__ import annotations

import numpy as np
import xarray as xr

from loopinterp.comparison.reduced_model import ENOUGH, Reduction
from loopinterp.comparison.rule import LEAST_INPUTS
from loopinterp.core.results import Figure, Finding, figures_of, findings_of
from loopinterp.core.text import percent
from loopinterp.figures import LinePanel, Reference, Series, line_panels


@findings_of.register
def _(result: Reduction) -> list[Finding]:
    rank = result.enough or int(result.data["rank"].values[-1])
    kind, n, share = result.weakest(rank)
    if np.isnan(share.value) or (share.inputs < LEAST_INPUTS and share.high >= ENOUGH):
        text = (
            "Too few interchanges of a state change an answer to say how few numbers per position "
            "predict what becomes of them."
        )
        return [Finding(text)]
    later = f"{share.first}" if share.first == share.last else f"{share.first} to {share.last}"
    where = (
        f"where it is right least often ({kind}, length {n}, {later} loops later), it gives "
        f"{percent(share.value)} of the model's whole answers (95% interval {percent(share.low)} "
        f"to {percent(share.high)})"
    )
    rest = float(result.data["others"].sel(rank=rank, estimate="value").max())
    value = f"{rank} of {result.width}"
    text = (
        f"{value} numbers per position are enough to say what becomes of "
        f"interchanges. Reduced to them after every loop, {where}. The model that keeps all other "
        f"directions is right after {percent(rest)} at most."
    )
    if not result.enough:
        value = f"more than {value}"
        text = f"Reduced to {rank} numbers per position, the most that were tried: {where}."
    return [Finding(text, value=value, label="Numbers per position that predict interchanges")]


@figures_of.register
def _(result: Reduction) -> list[Figure]:
    ranks = result.data["rank"].values.tolist()
    weakest = [result.weakest(rank).share for rank in ranks]
    worst = xr.DataArray(
        [(share.value, share.low, share.high) for share in weakest],
        dims=("rank", "estimate"),
        coords={"rank": ranks, "estimate": result.data["estimate"]},
    )
    panels = [
        LinePanel(
            [Series.of("right least often", worst)],
            title="where it is right least often",
            y_title="answers as the model's",
            y_range=(0, 1.03),
            references=[Reference(ENOUGH, "needed")],
        )
    ]
    for n in result.data["n"].values:
        at = result.data.sel(n=n)
        rest = Series.of("all other directions", at["others"].isel(kind=0), control=True)
        panels.append(
            LinePanel(
                [*Series.each(at["whole_run"], "kind"), rest],
                title=f"whole runs, length {n}",
                y_title="runs as the model's",
                y_range=(0, 1.03),
            )
        )
    pairs = int(np.nanmax(result.data["active"].values))
    return [
        Figure(
            title="How few numbers per position predict interchanges",
            plot=line_panels(panels, x_title="numbers kept per position"),
            caption=(
                "The model itself, but after every loop the state of a position is moved to the "
                "nearest point with the mean of its token and so many of that token's principal "
                "directions. How often its whole answers after an interchange are the model's: at "
                "the delays at which it is right least often (those with few pairs are taken "
                "together), then over whole runs. Only pairs count in which an answer changes (at "
                f"most {pairs} at one delay). "
                f"Directions were fitted at length {result.fitted_at}, on other inputs."
            ),
            control="Dashed: the model that keeps all directions but these, "
            f"{result.data['kind'].values[0]}.",
            data=result.to_dataframe("whole_run"),
        )
    ]
