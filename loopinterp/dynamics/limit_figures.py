"""Findings and figures of basin maps and local stability."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from loopinterp.core.intervals import ESTIMATE
from loopinterp.core.results import Figure, Finding, figures_of, findings_of, tidy
from loopinterp.core.text import percent
from loopinterp.dynamics.basins import BasinMapResult
from loopinterp.dynamics.convergence import RITZ_TOLERANCE
from loopinterp.dynamics.convergence_figures import (
    NO_ANSWER,
    span_of,
    stability_of,
    value_of,
    with_rounding,
)
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
    import plotly.graph_objects as go
    import xarray as xr


_OTHERS = ("red", "ochre", "magenta")
"""Colours of the largest basins other than the clean limit's."""


@findings_of.register
@with_rounding
def _(result: BasinMapResult) -> list[Finding]:
    limits, n_starts = result.limits(), result.data["reached"].size
    others = limits.drop(index=0, errors="ignore")
    if 0 not in limits.index:
        text = f"The clean run of input {result.example} reaches no limit."
        if len(others):
            share = percent(others["share"].sum())
            text += f" {share} of {n_starts} initial states in a plane reach a limit."
        return [Finding(text, value="no limit found", good=False)]
    value, low, high = (float(x) for x in result.shares().sel(limit=0))
    radius, nearest = result.radius(), float(result.data["x"].diff("x")[0])
    control = float(value_of(result.next_reaches_own()))
    text = (
        f"{percent(value)} ({100 * low:.0f}–{100 * high:.0f}) of {n_starts} initial states in a "
        f"plane converge to the limit of input {result.example}"
    )
    text += (
        f", including all at a distance of up to {radius:.2g}× the limit's norm."
        if radius
        else f", but not all of the nearest (at {nearest:.2g}× the limit's norm)."
    )
    if len(others):
        right = percent(np.average(others["exact"], weights=others["share"]))
        text += (
            f" Some of the rest converge to {len(others)} other limit{'s' * (len(others) > 1)}, "
            f"where {right} of the answers are right."
        )
    text += f" Under the next input {percent(control)} of the initial states reach this limit"
    text += "." if control < 0.5 else ", so it is a limit of that input too."
    # Several basins are a property of the model, no failure.
    good = True if value >= 0.99 and control < 0.5 else None
    return [Finding(text, value=f"{percent(value)} come back", good=good)]


@figures_of.register
def _(result: BasinMapResult) -> list[Figure]:
    data = result.data
    arrays = tidy({name: data[name] for name in ("reached", "loops", "exact", "next_reached")})
    corners = [str(name) for name in data["corner"].values]
    places = zip(data["corner_x"].values.tolist(), data["corner_y"].values.tolist())
    frame: dict[str, Any] = {
        "x_title": f"towards {corners[0]}",
        "y_title": "at right angles",
        "square": True,
        "marks": {"clean limit": (0.0, 0.0)} | dict(zip(corners, places)),
    }
    plane = _spell_plane(corners)
    loops = data["loops"].where(data["reached"] != NO_LIMIT)
    time = Figure(
        title="How many loops does it take to reach the limit?",
        plot=heatmap_panels({"": loops}, value_title="loops", **frame),
        caption=(
            f"Each cell is an initial state of input {result.example}, in {plane}; 1 is the norm "
            "of the limit. Colour: loops until it converges or is known to cycle (empty: no limit)."
        ),
        data=arrays,
    )
    names, maps, colours = _categories(result)
    if all(int(cells.min()) == int(cells.max()) for cells in maps.values()):
        return [time] if loops.notnull().any() else []  # one colour: the finding says it
    shares, control = result.by_distance(), result.next_by_distance()
    lines = [
        Series.of(name, shares.sel(limit=k), colour=colour)
        for (k, name), colour in zip(names.items(), ("blue", *_OTHERS))
    ]
    lines.append(Series.of("clean limit, under the next input (control)", control, control=True))
    panel = LinePanel(lines, "share of initial states", y_range=(0, 1.03))
    basins = Figure(
        title="Basins of attraction",
        plot=category_maps(maps, colours, **frame),
        caption=(
            f"Each cell is an initial state of input {result.example}, in {plane}. Colour: the "
            "limit that it converges to. Limits are numbered outwards from the clean run's, by the "
            "nearest initial state that converges to them."
        ),
        control=(
            "Right: the same initial states under the next input; "
            f"{percent(value_of(result.next_reaches_own()))} converge to the limit of this input."
        ),
        data=arrays,
    )
    rings = Figure(
        title="Basins by distance from the limit",
        plot=line_panels([panel], x_title="distance from the clean limit, relative to its norm"),
        caption=(
            "Share of initial states of the plane that converge to each limit, in rings around the "
            "clean run's (95% intervals, as if the states were drawn at random). Other directions "
            "may differ."
        ),
        control="Dashed: the same initial states under the next input.",
        data=tidy({"share": shares}),
    )
    return [basins, time, rings]


def _categories(
    result: BasinMapResult,
) -> tuple[dict[int, str], dict[str, xr.DataArray], dict[str, str]]:
    """Names of the largest limits; category of each cell, by input; colours."""
    limits = result.limits()
    largest = limits.drop(index=0, errors="ignore").nlargest(len(_OTHERS), "share")
    right = {0.0: " (wrong)", 1.0: " (right)"}
    exactness = {k: right.get(exact, " (right in part)") for k, exact in limits["exact"].items()}
    names = {0: "clean limit" + exactness.get(0, "")}
    names |= {k: f"limit {k}{exactness[k]}" for k in largest.index}
    here, there = result.data["reached"], result.data["next_reached"]
    rest, none = "smaller basins", "no limit"
    of_next, other_of_next = "the next input's clean limit", "another limit of the next input"
    colours = dict(zip(names.values(), ("blue", *_OTHERS)))
    colours |= {rest: "#e6a8a2", of_next: "green", other_of_next: "#a6dcc4", none: "grey"}
    kinds = np.select([here == k for k in (NO_LIMIT, *names)], [none, *names.values()], rest)
    to_this_limit = result.data["next_distance"] <= result.same
    is_next = [there == NO_LIMIT, to_this_limit, there == 0]
    under_next = np.select(is_next, [none, names[0], of_next], other_of_next)
    shown = {name: c for name, c in colours.items() if name in {*kinds.flat, *under_next.flat}}
    code = np.vectorize({name: k for k, name in enumerate(shown)}.get)
    maps = {"this input": kinds, "the next input (control)": under_next}
    return names, {title: here.copy(data=code(cells)) for title, cells in maps.items()}, shown


def _spell_plane(corners: list[str]) -> str:
    """The plane of a map; says what a corner that is another input's limit is called."""
    other = any(name.startswith("other ") for name in corners)
    note = "; “other” is another input's limit" if other else ""
    return f"the plane of its limit, {' and '.join(corners)} (crosses{note})"


@findings_of.register
@with_rounding
def _(result: LocalStabilityResult) -> list[Finding]:
    n, n_found = result.has_limit.size, int(result.has_limit.sum())
    if not n_found:
        text = f"None of {n} examples reaches a fixed point or a limit cycle to linearise at."
        return [Finding(text, value="none found", good=False), _exponents(result)]
    turn = result.data["turn"]
    findings = [
        _spectrum(result, rows, what)
        for what, rows in {"fixed point": turn == 1, "limit cycle": turn > 1}.items()
        if rows.any()
    ]
    at = {"where": "limit"}
    ratio = result.non_normality().sel(at).where(result.has_limit).dropna("batch")
    growth = result.data["growth"].sel(at).where(result.has_limit).dropna("batch")
    text = f"The largest transient growth of a perturbation is {span_of(growth)} fold"
    if not result.data["growth_closed"].sel(at).where(result.has_limit, other=True).all():
        text += " (or more, beyond the loops measured)"
    if ratio.size:
        text += (
            f". The largest singular value of the Jacobian is {span_of(ratio)} times its spectral "
            "radius"
        )
    findings.append(Finding(f"{text}.", value=f"{float(growth.max()):.2g} fold"))
    return [*findings, _exponents(result)]


def _spectrum(result: LocalStabilityResult, rows: xr.DataArray, what: str) -> Finding:
    n, n_found = rows.size, int(rows.sum())
    text = f"{n_found} of {n} examples reach a {what}."
    radius = result.radius().where(rows)
    here, random = (radius.sel(where=name).dropna("batch") for name in ("limit", "random"))
    if not here.size:
        text += " No spectral radius is known there, so stability is not measured."
        return Finding(text, value=f"{n_found} of {n}: a {what}")
    high = float(here.max())
    name = "spectral radius" if what == "fixed point" else "largest multiplier"
    text += f" The {name} there is {span_of(here)} ({here.size} measured): {stability_of(high)}."
    if random.size:
        text += f" Control: {span_of(random)} at random states of the same norms."
    good = high < 1 and here.size == n
    return Finding(text, value=f"{high:.2f}", good=good)


def _exponents(result: LocalStabilityResult) -> Finding:
    exponent = result.data["lyapunov"]
    value, low = (exponent.sel({ESTIMATE: end}).dropna("batch") for end in ("value", "low"))
    if not value.size:
        return Finding("All runs diverge, so there is no Lyapunov exponent.", good=False)
    positive = int((low > 1e-5).sum())  # smaller ones are rounding
    above = "No 95% interval is above 0."
    if positive:
        above = f"In {positive} the 95% interval is above 0: runs from nearly the same state part."
    text = (
        f"The largest Lyapunov exponent is {span_of(value)} nats per loop ({value.size} examples). "
        f"{above}"
    )
    return Finding(text, value=f"{float(value.max()):.2g} nats", good=positive == 0)


@figures_of.register
def _(result: LocalStabilityResult) -> list[Figure]:
    if not result.has_limit.any():
        return []
    data = result.data
    names = {"lyapunov": "value", "lyapunov_low": "low", "lyapunov_high": "high"}
    columns = data[["solve_smallest", "solve_known", "growth", "growth_at", "growth_closed"]]
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
    table = table.reset_index().rename(columns={"batch": "example"})
    regimes = [Regime(code).label for code in data["regime"].values.tolist()]
    table["regime"] = [regimes[k] for k in table["example"]]
    right = data["right"][result.has_limit].values
    answers = f"{int((right > 0).sum())} of these {right.size} examples end with the right answer."
    return [
        Figure(
            title="Leading eigenvalues of the loop's Jacobian",
            plot=_complex_plane(result),
            caption=(
                "Largest eigenvalues by modulus at each fixed point or limit cycle (over a "
                "period). Inside the unit circle perturbations decay; off the real axis they "
                "rotate. Hollow marks have not converged. "
                f"{NO_ANSWER if (right < 0).all() else answers}"
            ),
            control=(
                "The same at the initial state and at random states of the limit's norms. If these "
                "look alike, the spectrum shows nothing special about the limit."
            ),
            data=table,
        )
    ]


def _complex_plane(result: LocalStabilityResult) -> go.Figure:
    values = result.eigenvalues()
    radius = np.abs(values.isel(eigenvalue=0))
    known = result.data["eigenvalue_residual"] * np.abs(values) <= RITZ_TOLERANCE
    reach = 1.1 * max(1.0, float(radius.max()))
    titles = dict(zip(WHERE, ("at the limit or cycle", "initial state", "random states")))
    figure = panel_figure([*titles.values()], 3, panel_height=360, square=True)
    angle = np.linspace(0, 2 * np.pi, 181)
    circle = {"color": "rgba(128,134,144,0.9)", "width": 1.2, "dash": "dot"}
    for panel, place in enumerate(titles):
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
