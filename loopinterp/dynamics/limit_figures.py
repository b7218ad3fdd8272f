"""What a basin map and a study of local stability say and show."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from loopinterp.core.intervals import ESTIMATE
from loopinterp.core.results import Figure, Finding, figures_of, findings_of, tidy
from loopinterp.core.text import percent
from loopinterp.dynamics.basins import BasinMapResult
from loopinterp.dynamics.convergence import RITZ_TOLERANCE
from loopinterp.dynamics.convergence_figures import dies_out, value_of, with_rounding
from loopinterp.dynamics.limits import NO_LIMIT
from loopinterp.dynamics.local_stability import WHERE, LocalStabilityResult
from loopinterp.dynamics.regimes import Regime
from loopinterp.figures import (
    PALETTE,
    LinePanel,
    Series,
    category_maps,
    heatmap_panels,
    line_panels,
)
from loopinterp.figures.axes import axes, panel_figure, suffix

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go
    import xarray as xr


_OTHERS = ("red", "ochre", "magenta")
"""Colours of the largest basins besides the own one."""


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
    control = float(value_of(result.next_reaches_own()))
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
    data, names = result.data, _names(result)
    arrays = tidy({name: data[name] for name in ("reached", "loops", "exact", "next_reached")})
    corners = [str(name) for name in data["corner"].values]
    places = zip(data["corner_x"].values.tolist(), data["corner_y"].values.tolist())
    frame: dict[str, Any] = {
        "x_title": f"towards {corners[0]}",
        "y_title": "at right angles",
        "square": True,
        "marks": {"own limit": (0.0, 0.0)} | dict(zip(corners, places)),
    }
    maps, colours = _categories(result, names)
    loops = data["loops"].where(data["reached"] != NO_LIMIT)
    shares, control = result.by_distance(), result.next_by_distance()
    lines = [
        Series.of(name, shares.sel(limit=k), colour=colour)
        for (k, name), colour in zip(names.items(), ("blue", *_OTHERS))
    ]
    lines.append(Series.of("own limit, under the next input (control)", control, control=True))
    panel = LinePanel(lines, "share of starts", y_range=(0, 1.03))
    return [
        Figure(
            title="Which limit does each start lead to?",
            plot=category_maps(maps, colours, **frame),
            caption=(
                f"Each cell is a start: a state of input {result.example} in the plane of its own "
                f"limit, {' and '.join(corners)} (crosses); 1 is the norm of the own limit. Limits "
                "are numbered by how near to it they are first reached."
            ),
            control=(
                "On the right the same starts are run under the next input. "
                f"{percent(value_of(result.next_reaches_own()))} of them lead to the limit of this "
                "input: where many do, the limit is not the input's own."
            ),
            data=arrays,
        ),
        Figure(
            title="How many loops does it take to the limit?",
            plot=heatmap_panels({"": loops}, value_title="loops", **frame),
            caption=(
                "The same plane: loops until a start is at rest, or known to go round a cycle "
                "(empty: no limit). Starts near the edge of a basin take longest."
            ),
            data=arrays,
        ),
        Figure(
            title="How far from its limit does an input still come back?",
            plot=line_panels([panel], x_title="distance from the own limit, over its size"),
            caption=(
                "Starts of the plane in rings around the own limit, with 95% intervals of as many "
                "starts drawn at random. Other directions may lead elsewhere."
            ),
            control="The dashed line are the same starts under the next input.",
            data=tidy({"share": shares}),
        ),
    ]


def _categories(
    result: BasinMapResult, names: dict[int, str]
) -> tuple[dict[str, xr.DataArray], dict[str, str]]:
    """Which limit each start leads to, under this input and the next; colours of the names."""
    here, there = result.data["reached"], result.data["next_reached"]
    rest, none = "smaller basins", "no limit"
    of_next, other_of_next = "the next input's own limit", "another limit of the next input"
    colours = dict(zip(names.values(), ("blue", *_OTHERS)))
    colours |= {rest: "#e6a8a2", of_next: "green", other_of_next: "#a6dcc4", none: "grey"}
    kinds = np.select([here == k for k in (NO_LIMIT, *names)], [none, *names.values()], rest)
    to_this_limit = result.data["next_distance"] <= result.same
    is_next = [there == NO_LIMIT, to_this_limit, there == 0]
    under_next = np.select(is_next, [none, names[0], of_next], other_of_next)
    shown = {name: c for name, c in colours.items() if name in {*kinds.flat, *under_next.flat}}
    code = np.vectorize({name: k for k, name in enumerate(shown)}.get)
    maps = {"this input": kinds, "the next input (control)": under_next}
    return {title: here.copy(data=code(cells)) for title, cells in maps.items()}, shown


def _names(result: BasinMapResult) -> dict[int, str]:
    """Limit -> its name: of the own one and the largest others."""
    limits = result.limits()
    largest = limits.drop(index=0, errors="ignore").nlargest(len(_OTHERS), "share")
    right = {0.0: " (wrong)", 1.0: " (right)"}
    exactness = {k: right.get(exact, " (right in part)") for k, exact in limits["exact"].items()}
    return {
        0: "own limit" + exactness.get(0, ""),
        **{k: f"limit {k}{exactness[k]}" for k in largest.index},
    }


@findings_of.register
@with_rounding
def _(result: LocalStabilityResult) -> list[Finding]:
    """What the spectra say where there is a limit or a cycle; and the exponents of the runs."""
    n, n_found = result.found.size, int(result.found.sum())
    if not n_found:
        text = (
            f"Neither a limit nor a cycle was found for any of the {n} examples, so there is no "
            "state at which the Jacobian would say what becomes of the loop."
        )
        return [Finding(text, value="none found", good=False), _exponents(result)]
    every = [_spectrum(result, result.data["turn"] == 1, "limit")]
    every += [_spectrum(result, result.data["turn"] > 1, "cycle")]
    return [*filter(None, every), _non_normality(result), _exponents(result)]


def _spectrum(result: LocalStabilityResult, rows: xr.DataArray, what: str) -> Finding | None:
    """The radius at limits, or on cycles, beside that at random states."""
    n, n_found = rows.size, int(rows.sum())
    if not n_found:
        return None
    text = f"A {what} was found for {n_found} of {n} examples"
    radius = result.radius().where(rows)
    here, random = (radius.sel(where=name).dropna("batch") for name in ("limit", "random"))
    if not here.size:
        text += "; its spectral radius is known at none of them, so this says nothing of them."
        return Finding(text, value=f"{n_found} of {n}: a {what}")
    high = float(here.max())
    name = "spectral radius" if what == "limit" else "largest multiplier of a turn"
    text += (
        f"; at the {here.size} where it is known, the {name} is {_span(here)}: {dies_out(high)}."
    )
    if random.size:
        disjoint = float(random.min()) > high or float(random.max()) < float(here.min())
        meaning = f"it tells the {what} from other states" if disjoint else "the ranges overlap"
        text += f" At random states of the same norms it is {_span(random)} ({meaning})."
    good = high < 1 and here.size == n
    return Finding(text, value=f"{high:.2f}", good=good)


def _non_normality(result: LocalStabilityResult) -> Finding:
    at = {"where": "limit"}
    ratio = result.non_normality().sel(at).where(result.found).dropna("batch")
    growth = result.data["growth"].sel(at).where(result.found).dropna("batch")
    text = f"Before it dies out or grows for good, a disturbance may grow {_span(growth)} fold"
    if not result.data["growth_closed"].sel(at).where(result.found, other=True).all():
        text += " (or more, after the loops looked at)"
    if ratio.size:
        text += f"; the largest singular value is {_span(ratio)} times the spectral radius"
    return Finding(f"{text}.", value=f"{float(growth.max()):.2g} fold")


def _exponents(result: LocalStabilityResult) -> Finding:
    """Of every run, whatever its regime."""
    exponent = result.data["lyapunov"]
    value, low = (exponent.sel({ESTIMATE: end}).dropna("batch") for end in ("value", "low"))
    if not value.size:
        return Finding("No run stays finite, so none has a Lyapunov exponent.", good=False)
    positive = int((low > 0).sum())
    text = (
        f"The largest Lyapunov exponent from the end of the run on is {_span(value)} nats a loop; "
        f"in {positive} of {value.size} examples its whole interval is above 0 (there runs from "
        "nearly the same state part)."
    )
    return Finding(text, value=f"{float(value.max()):.2g} nats", good=positive == 0)


def _span(values: xr.DataArray) -> str:
    low, high = (f"{float(end):.2f}" for end in (values.min(), values.max()))
    return low if low == high else f"{low} to {high}"


@figures_of.register
def _(result: LocalStabilityResult) -> list[Figure]:
    """The leading eigenvalues in the complex plane."""
    if not result.found.any():
        return []
    right = result.data["right"][result.found].values
    answers = f"{int((right > 0).sum())} of these {right.size} examples end with the right answer."
    if (right < 0).all():
        answers = "The readout gives one number, so no answer is right or wrong."
    return [
        Figure(
            title="Leading eigenvalues of the loop's Jacobian",
            plot=_complex_plane(result),
            caption=(
                "The eigenvalues of largest modulus of every example with a limit or a cycle (of "
                "one turn of it). Inside the unit circle disturbances shrink in the long run, off "
                f"the real axis they turn. Hollow marks have not converged. {answers}"
            ),
            control=(
                "The same at the initial state and at random states of the norms of the limit: "
                "where these look alike, the spectrum is the map's, not the limit's."
            ),
            data=_table(result),
        )
    ]


def _complex_plane(result: LocalStabilityResult) -> go.Figure:
    values = result.eigenvalues()
    radius = np.abs(values.isel(eigenvalue=0))
    known = result.data["eigenvalue_residual"] * np.abs(values) <= RITZ_TOLERANCE
    reach = 1.1 * max(1.0, float(radius.max()))
    titles = {
        "limit": "at the limit or cycle",
        "start": "at the start",
        "random": "at random states",
    }
    figure = panel_figure([titles[name] for name in WHERE], 3, panel_height=360, square=True)
    angle = np.linspace(0, 2 * np.pi, 181)
    circle = {"color": "rgba(128,134,144,0.9)", "width": 1.2, "dash": "dot"}
    for panel, place in enumerate(WHERE):
        in_panel, sure = (a.sel(where=place).values.ravel() for a in (values, known))
        there = np.isfinite(in_panel)
        style: dict[str, Any] = {"showlegend": False, **axes(panel)}
        x, y = np.cos(angle), np.sin(angle)
        figure.add_scatter(x=x, y=y, mode="lines", line=circle, hoverinfo="skip", **style)
        colour = PALETTE["blue" if place == "limit" else "grey"]
        symbols = np.where(sure[there], "circle", "circle-open").tolist()
        figure.add_scatter(
            x=in_panel.real[there],
            y=in_panel.imag[there],
            mode="markers",
            marker={"size": 7, "color": colour, "symbol": symbols},
            hovertemplate="%{x:.4f} %{y:+.4f}i<extra></extra>",
            **style,
        )
        name = suffix(panel)
        figure.layout[f"xaxis{name}"].update(range=[-reach, reach], title="real part")
        figure.layout[f"yaxis{name}"].update(range=[-reach, reach], scaleanchor=f"x{name}")
    figure.layout["yaxis"].title = "imaginary part"
    return figure


def _table(result: LocalStabilityResult) -> pd.DataFrame:
    """A row for each example and state: all its numbers but the smaller eigenvalues."""
    data = result.data
    columns = data[["solve_smallest", "solve_known", "growth", "growth_at", "growth_closed"]]
    names = {"lyapunov": "value", "lyapunov_low": "low", "lyapunov_high": "high"}
    columns = columns.assign(
        radius=result.radius(),
        singular_value=data["singular_value"].isel(singular=0, drop=True),
        non_normality=result.non_normality(),
        condition=result.condition(),
        turn=data["turn"],
        right=data["right"],
        **{name: data["lyapunov"].sel({ESTIMATE: end}, drop=True) for name, end in names.items()},
    )
    table = columns.drop_vars(["eigenvalue", "singular"], errors="ignore").to_dataframe()
    regimes = [Regime(code).label for code in data["regime"].values.tolist()]
    table = table.reset_index().rename(columns={"batch": "example"})
    return table.assign(regime=[regimes[k] for k in table["example"]])
