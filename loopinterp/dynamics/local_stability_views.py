"""What a study of local stability says and shows; the Jacobian elsewhere stands beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from loopinterp.dynamics.convergence import RITZ_TOLERANCE
from loopinterp.dynamics.local_stability import WHERE, LocalStabilityResult
from loopinterp.dynamics.regimes import Regime
from loopinterp.dynamics.rounding import with_rounding
from loopinterp.intervals import ESTIMATE
from loopinterp.plotting import PALETTE
from loopinterp.plotting.axes import axes, panel_figure, suffix
from loopinterp.results import Figure, Finding, figures_of, findings_of

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go
    import xarray as xr

SECTION = "limits"
_PANELS = {"limit": "at the limit or cycle", "start": "at the start", "random": "at random states"}


@findings_of.register
@with_rounding
def _(result: LocalStabilityResult) -> list[Finding]:
    """What the spectra say where there is a limit or a cycle; and the exponents of the runs."""
    n, found = result.found.size, int(result.found.sum())
    if not found:
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
    n, found = rows.size, int(rows.sum())
    if not found:
        return None
    text = f"A {what} was found for {found} of {n} examples"
    radius = result.radius().where(rows)
    here, random = (radius.sel(where=name).dropna("batch") for name in ("limit", "random"))
    if not here.size:
        text += "; its spectral radius is known at none of them, so this says nothing of them."
        return Finding(text, value=f"{found} of {n}: a {what}")
    high = float(here.max())
    name = "spectral radius" if what == "limit" else "largest multiplier of a turn"
    verdict = (
        "below 1, so a small disturbance dies out there"
        if high < 1
        else "at 1 or more in some, so not every small disturbance dies out there"
    )
    text += f"; at the {here.size} where it is known, the {name} is {_span(here)}: {verdict}."
    if random.size:
        apart = float(random.min()) > high or float(random.max()) < float(here.min())
        meaning = f"it tells the {what} from other states" if apart else "the ranges overlap"
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


def _right_at_the_end(right: np.ndarray) -> str:
    if (right < 0).all():
        return "The readout gives one number, so no answer is right or wrong."
    return f"{int((right > 0).sum())} of these {right.size} examples end with the right answer."


@figures_of.register
def _(result: LocalStabilityResult) -> list[Figure]:
    """The leading eigenvalues in the complex plane."""
    if not result.found.any():
        return []
    right = result.data["right"][result.found]
    return [
        Figure(
            title="Leading eigenvalues of the loop's Jacobian",
            plot=_complex_plane(result),
            caption=(
                "The eigenvalues of largest modulus, of every example with a limit or a cycle (of "
                "one turn of it), in the complex plane with the unit circle. Those inside belong "
                "to disturbances that shrink in the long run, those off the real axis to ones "
                "that turn. Hollow marks have not converged. " + _right_at_the_end(right.values)
            ),
            control=(
                "The same at the initial state and at random states whose tokens have the norms "
                "they have at the limit: where these look alike, the spectrum is the map's, not "
                "the limit's."
            ),
            data=_table(result),
        )
    ]


def _complex_plane(result: LocalStabilityResult) -> go.Figure:
    values = result.eigenvalues()
    radius = np.abs(values.isel(eigenvalue=0))
    known = result.data["eigenvalue_residual"] * np.abs(values) <= RITZ_TOLERANCE
    reach = 1.1 * max(1.0, float(radius.max()))
    figure = panel_figure([_PANELS[name] for name in WHERE], 3, panel_height=360, square=True)
    angle = np.linspace(0, 2 * np.pi, 181)
    circle = {"color": "rgba(128,134,144,0.9)", "width": 1.2, "dash": "dot"}
    for panel, place in enumerate(WHERE):
        own, sure = (a.sel(where=place).values.ravel() for a in (values, known))
        there = np.isfinite(own)
        figure.add_scatter(
            x=np.cos(angle),
            y=np.sin(angle),
            mode="lines",
            line=circle,
            hoverinfo="skip",
            showlegend=False,
            **axes(panel),
        )
        figure.add_scatter(
            x=own.real[there],
            y=own.imag[there],
            mode="markers",
            marker={
                "size": 7,
                "color": PALETTE["blue" if place == "limit" else "grey"],
                "symbol": np.where(sure[there], "circle", "circle-open").tolist(),
            },
            hovertemplate="%{x:.4f} %{y:+.4f}i<extra></extra>",
            showlegend=False,
            **axes(panel),
        )
        name = suffix(panel)
        figure.layout[f"xaxis{name}"].update(range=[-reach, reach], title="real part")
        figure.layout[f"yaxis{name}"].update(range=[-reach, reach], scaleanchor=f"x{name}")
    figure.layout["yaxis"].title = "imaginary part"
    return figure


def _table(result: LocalStabilityResult) -> pd.DataFrame:
    """A row for each example and state: all its numbers but the smaller eigenvalues."""
    data = result.data
    exponent = data["lyapunov"]
    columns = data[["solve_smallest", "solve_known", "growth", "growth_at", "growth_closed"]]
    columns = columns.assign(
        radius=result.radius(),
        singular_value=data["singular_value"].isel(singular=0, drop=True),
        non_normality=result.non_normality(),
        condition=result.condition(),
        turn=data["turn"],
        right=data["right"],
        **{
            "lyapunov" if end == "value" else f"lyapunov_{end}": exponent.sel(
                {ESTIMATE: end}, drop=True
            )
            for end in ("value", "low", "high")
        },
    )
    table = columns.drop_vars(["eigenvalue", "singular"], errors="ignore").to_dataframe()
    regimes = [Regime(code).label for code in data["regime"].values.tolist()]
    table = table.reset_index().rename(columns={"batch": "example"})
    return table.assign(regime=[regimes[k] for k in table["example"]])
