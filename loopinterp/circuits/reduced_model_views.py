"""What a reduction of the state says and shows: accuracy against the numbers kept per position."""

from __future__ import annotations

import numpy as np
import xarray as xr

from loopinterp.circuits.reduced_model import ENOUGH, KINDS, Reduction
from loopinterp.plotting import LinePanel, Reference, Series, line_panels
from loopinterp.results import Figure, Finding, figures_of, findings_of, percent

SECTION = "program"
_LABEL = "Numbers per position that predict interchanges"


@findings_of.register
def _(result: Reduction) -> list[Finding]:
    rank = result.enough or int(result.data["rank"].values[-1])
    worst = result.worst(rank)
    if np.isnan(worst["accuracy"][0]):
        text = "No interchange of a state changes an answer, so that nothing need be kept."
        return [Finding(text)]
    value, low, high = map(percent, worst["accuracy"].values)
    rest = result.data["others"].sel(rank=rank, estimate="value")
    at_worst = (
        f"at the worst delay ({worst['kind'].item()}, length {int(worst['n'])}, "
        f"{int(worst['delay'])} loops later) it gives {value} of the model's whole answers "
        f"(95% interval {low} to {high})"
    )
    held = (
        f"; the model that keeps all other directions is right after {percent(rest.max())} of the "
        "interchanges at most"
    )
    if result.enough:
        text = (
            f"{rank} of {result.width} numbers per position are what the state keeps: reduced to "
            f"them after every loop, {at_worst}{held}."
        )
        return [Finding(text, value=f"{rank} of {result.width}", good=True, label=_LABEL)]
    text = f"Reduced to {rank} numbers per position, the most that were tried, {at_worst}."
    shown = f"more than {rank} of {result.width}"
    return [Finding(text, value=shown, good=None, label=_LABEL)]


@figures_of.register
def _(result: Reduction) -> list[Figure]:
    ranks = result.data["rank"].values.tolist()
    worst = xr.concat([result.worst(rank)["accuracy"] for rank in ranks], "rank", coords="minimal",
                      compat="override").assign_coords(rank=ranks)  # fmt: skip
    needed = [Reference(ENOUGH, "needed at the worst delay")]
    panels = [
        LinePanel(
            [Series.of("at the worst delay", worst)],
            title="at the delay at which it is right least often",
            y_title="answers as the model's",
            y_range=(0, 1.03),
            references=needed,
        )
    ]
    for n in result.data["n"].values:
        at = result.data.sel(n=n)
        panels.append(
            LinePanel(
                [
                    *Series.each(at["whole_run"], "kind"),
                    *Series.each(
                        at["others"].sel(kind=[KINDS[0]]),
                        "kind",
                        lambda _: "all other directions",
                        control=True,
                    ),
                ],
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
                "the worst delay of all kinds and lengths, then at every delay of a run. Only "
                f"pairs count in which an answer changes (at most {pairs} at one delay). "
                f"Directions were fitted at length {result.fitted_at}, on other inputs."
            ),
            control="Dashed: the model that keeps all directions but these, at the same loop.",
            data=result.to_dataframe("whole_run"),
        )
    ]
