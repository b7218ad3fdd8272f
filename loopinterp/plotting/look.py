"""The palette, the colour scales and the template that every figure shares."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go
from plotly.colors import hex_to_rgb

PALETTE = {
    "blue": "#3d68ea",
    "red": "#c93a2e",
    "green": "#2ca878",
    "ochre": "#bf9000",
    "magenta": "#b1389b",
    "grey": "#868c96",
}
"""Named colours, in the order in which series take them; grey is kept for controls."""

FONT = "Inter, system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
_COLOURS = [colour for name, colour in PALETTE.items() if name != "grey"]
SYMBOLS = ["circle", "square", "diamond", "triangle-up", "cross"]
_FAINT = "rgba(128,134,144,0.22)"
_CLEAR = "rgba(0,0,0,0)"

SCALES: dict[str, str | list[tuple[float, str]]] = {
    "sequential": "Viridis",
    "mass": [(0.0, "rgba(61,104,234,0.04)"), (1.0, "rgba(61,104,234,1)")],
    "faint": [(0.0, "rgba(61,104,234,0.04)"), (1.0, "rgba(61,104,234,0.55)")],
    "diverging": [
        (0.0, "rgba(201,58,46,1)"),
        (0.5, "rgba(134,140,150,0.08)"),
        (1.0, "rgba(61,104,234,1)"),
    ],
}
"""Colour scales of heat maps: ``sequential``, ``mass`` (0 is the page), ``faint`` (the same, to be
written on), ``diverging``."""


def colour(index: int) -> str:
    """The colour of the series number ``index``; the palette starts anew after its end."""
    return _COLOURS[index % len(_COLOURS)]


def ramp(n: int) -> list[str]:
    """``n`` colours in an order the eye can follow (for chain lengths, loops), blue to ochre."""
    stops = np.array([hex_to_rgb(PALETTE[k]) for k in ("blue", "magenta", "red", "ochre")], float)
    at = np.linspace(0, len(stops) - 1, n) if n > 1 else np.zeros(n)
    mixed = [np.array([np.interp(a, range(len(stops)), stops[:, k]) for k in range(3)]) for a in at]
    return ["#" + "".join(f"{round(v):02x}" for v in c) for c in mixed]


def template() -> go.layout.Template:
    """The Plotly template of all figures."""
    axis = {
        "showgrid": True,
        "gridcolor": _FAINT,
        "linecolor": "rgba(128,134,144,0.55)",
        "showline": True,
        "zeroline": False,
        "ticks": "outside",
        "ticklen": 4,
        "tickcolor": "rgba(128,134,144,0.55)",
        "automargin": True,
        "title": {"standoff": 10},
    }
    return go.layout.Template(
        layout={
            "font": {"family": FONT, "size": 14},
            "paper_bgcolor": _CLEAR,
            "plot_bgcolor": _CLEAR,
            "colorway": _COLOURS,
            "margin": {"l": 64, "r": 20, "t": 44, "b": 56},
            "xaxis": axis,
            "yaxis": axis,
            "hovermode": "closest",
            "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "bgcolor": _CLEAR},
            "coloraxis": {"colorbar": {"outlinewidth": 0, "thickness": 14, "ticklen": 4}},
            "dragmode": False,
            "bargap": 0.3,
        }
    )


def alpha(shade: str, opacity: float) -> str:
    return f"rgba({','.join(map(str, hex_to_rgb(shade)))},{opacity})" if shade[0] == "#" else shade
