"""What a basin map says and shows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from loopinterp.dynamics.basins import BasinMapResult
from loopinterp.dynamics.distinct_limits import NO_LIMIT
from loopinterp.dynamics.rounding import with_rounding
from loopinterp.intervals import ESTIMATE
from loopinterp.plotting import LinePanel, Series, category_maps, heatmap_panels, line_panels
from loopinterp.results import Figure, Finding, figures_of, findings_of, percent, tidy

if TYPE_CHECKING:
    import pandas as pd

SECTION = "limits"

OTHERS = ("red", "ochre", "magenta")
"""Colours of the largest basins besides the own one."""

REST, NONE = "smaller basins", "no limit"
OF_NEXT, OTHER_OF_NEXT = "the next input's own limit", "another limit of the next input"


@findings_of.register
@with_rounding
def _(result: BasinMapResult) -> list[Finding]:
    """How much of the plane comes back to the own limit, and what the rest is led to."""
    limits, n_starts = result.limits(), result.data["reached"].size
    others = limits.drop(index=0, errors="ignore")
    if 0 not in limits.index:
        some = f"{percent(others['share'].sum())} reach one of {len(others)} limits."
        text = (
            f"From its own start the model reaches no limit for input {result.example}, so nothing "
            f"can come back to it. Of {n_starts} starts in a plane there, "
            + (some if len(others) else "none reaches one.")
        )
        return [Finding(text, value="no limit found", good=False)]
    value, low, high = (float(x) for x in result.shares().sel(limit=0))
    radius, nearest = result.radius(), float(result.data["x"].diff("x")[0])
    control = float(result.next_reaches_own().sel({ESTIMATE: "value"}))
    text = (
        f"Of {n_starts} starts in a plane through the limit of input {result.example}, "
        f"{percent(value)} ({percent(low)} to {percent(high)}) lead back to it, "
        + (
            f"and all that are no further away than {radius:.2g} times its size."
            if radius
            else f"but not all of the nearest to it, {nearest:.2g} times its size away."
        )
    )
    if len(others):
        right = percent(np.average(others["exact"], weights=others["share"]))
        text += (
            f" {percent(others['share'].sum())} lead to {len(others)} other "
            f"limit{'s' * (len(others) > 1)}, the nearest {others['distance'].min():.2g} times its "
            f"size away, where {right} of the answers are right."
        )
    known = control < 0.5
    text += f" Under the next input {percent(control)} of the same starts come to this limit" + (
        "." if known else ": it is not this input's own."
    )
    return [Finding(text, value=f"{percent(value)} come back", good=value >= 0.99 and known)]


@figures_of.register
def _(result: BasinMapResult) -> list[Figure]:
    """The limits of the plane, the loops it takes to them, and their shares by distance."""
    return [limit_map(result), loop_map(result), share_figure(result)]


def limit_map(result: BasinMapResult) -> Figure:
    """Which limit each start leads to, under this input and the next."""
    here, there = result.data["reached"], result.data["next_reached"]
    names = _names(result)
    colours = dict(zip(names.values(), ("blue", *OTHERS)))
    colours |= {REST: "#e6a8a2", OF_NEXT: "green", OTHER_OF_NEXT: "#a6dcc4", NONE: "grey"}
    kinds = np.select([here == k for k in (NO_LIMIT, *names)], [NONE, *names.values()], REST)
    own = result.data["next_distance"] <= result.same
    under_next = np.select(
        [there == NO_LIMIT, own, there == 0], [NONE, names[0], OF_NEXT], OTHER_OF_NEXT
    )
    shown = {name: c for name, c in colours.items() if name in {*kinds.flat, *under_next.flat}}
    code = np.vectorize({name: k for k, name in enumerate(shown)}.get)
    panels = {
        "this input": here.copy(data=code(kinds)),
        "the next input (control)": here.copy(data=code(under_next)),
    }
    return Figure(
        title="Which limit does each start lead to?",
        plot=category_maps(panels, shown, **_frame(result)),
        caption=(
            f"Each cell is a start: a state of input {result.example} in the plane of its own "
            f"limit, {' and '.join(result.data['corner'].values)} (crosses). 1 on the axes is the "
            "size of the own limit. Limits are numbered by how near to it they are first reached; "
            "whether the answer read there is right is in brackets."
        ),
        control=(
            "On the right the same starts are run under the next input. "
            f"{percent(result.next_reaches_own().sel({ESTIMATE: 'value'}))} of them lead to the "
            "limit of this input: where many do, the limit is not the input's own."
        ),
        data=_cells(result),
    )


def loop_map(result: BasinMapResult) -> Figure:
    """How many loops each start takes to its limit."""
    loops = result.data["loops"].where(result.data["reached"] != NO_LIMIT)
    return Figure(
        title="How many loops does it take to the limit?",
        plot=heatmap_panels({"": loops}, value_title="loops", **_frame(result)),
        caption=(
            "The same plane: loops until a start is at rest, or known to go round a cycle. Cells "
            "are empty where it came to no limit. Starts near the edge of a basin take longest."
        ),
        data=_cells(result),
    )


def share_figure(result: BasinMapResult) -> Figure:
    """Share of the starts that lead to each limit, by distance from the own one."""
    shares, control = result.by_distance(), result.next_by_distance()
    colours = ("blue", *OTHERS)
    lines = [
        Series.of(name, shares.sel(limit=k), colour=colour)
        for (k, name), colour in zip(_names(result).items(), colours)
    ]
    lines.append(Series.of("own limit, under the next input (control)", control, control=True))
    return Figure(
        title="How far from its limit does an input still come back?",
        plot=line_panels(
            [LinePanel(lines, "share of starts", y_range=(0, 1.03))],
            x_title="distance from the own limit, over its size",
        ),
        caption=(
            "Starts of the plane in rings around the own limit, with 95% intervals of as many "
            "starts drawn at random (a grid is no worse). They speak of this plane: other "
            "directions may lead elsewhere."
        ),
        control="The dashed line are the same starts under the next input.",
        data=tidy({"share": shares}),
    )


def _names(result: BasinMapResult) -> dict[int, str]:
    """Limit -> its name: of the own one and the largest others."""
    limits = result.limits()
    largest = limits.drop(index=0, errors="ignore").nlargest(len(OTHERS), "share")
    right = {0.0: " (wrong)", 1.0: " (right)"}
    said = {k: right.get(exact, " (right in part)") for k, exact in limits["exact"].items()}
    return {0: "own limit" + said.get(0, ""), **{k: f"limit {k}{said[k]}" for k in largest.index}}


def _frame(result: BasinMapResult) -> dict[str, Any]:
    data = result.data
    names = data["corner"].values.tolist()
    places = zip(data["corner_x"].values.tolist(), data["corner_y"].values.tolist())
    return {
        "x_title": f"towards {names[0]}",
        "y_title": "at right angles",
        "square": True,
        "marks": {"own limit": (0.0, 0.0)} | dict(zip(names, places)),
    }


def _cells(result: BasinMapResult) -> pd.DataFrame:
    names = ("reached", "loops", "exact", "next_reached")
    return tidy({name: result.data[name] for name in names})
