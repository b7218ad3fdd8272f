"""Heat maps: one, several on one scale, and with a slider over loops."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go

from loopinterp.errors import InputError, check_choice
from loopinterp.plotting.axes import Series, add_line, axes, panel_figure, suffix
from loopinterp.plotting.look import SCALES


@dataclass(frozen=True)
class HeatPanel:
    """One heat map; ``values`` is [row, column], ``overlay`` is drawn over it as lines."""

    values: Sequence[Sequence[float]] | np.ndarray
    title: str = ""
    overlay: Sequence[Series] = ()


def heatmap_panels(
    panels: Sequence[HeatPanel],
    *,
    x: Collection[Any],
    y: Collection[Any],
    x_title: str,
    y_title: str,
    value_title: str,
    scale: str = "sequential",
    value_range: tuple[float, float] | None = None,
    columns: int | None = None,
    square: bool = False,
    y_down: bool = False,
) -> go.Figure:
    """Heat maps side by side on one colour scale.

    Args:
        panels: The heat maps, all with the same coordinates; NaN stays empty.
        x: Coordinates or names of the columns.
        y: Coordinates or names of the rows.
        value_title: What the colour means, as the colour bar says it.
        scale: ``sequential``, ``mass`` (from nothing to all) or ``diverging`` (give a symmetric
            ``value_range``).
        value_range: Values of the ends of the scale; those of the data by default.
        columns: Panels in a row (all, up to four, by default); the report uses fewer on a phone.
        square: Whether cells are square.
        y_down: Whether the first row is at the top, as in an attention pattern.
    """
    check_choice("scale", scale, SCALES)
    arrays = [np.asarray(p.values, dtype=float) for p in panels]
    for array in arrays:
        if array.shape != (len(y), len(x)):
            raise InputError(
                "heat map",
                expected=f"{len(y)} rows and {len(x)} columns, as y and x say",
                given=f"an array of shape {array.shape}",
                fix="Give values as [row, column], with one y for each row.",
            )
    columns = columns or min(len(panels), 4)
    figure = panel_figure([p.title for p in panels], columns, square=square)
    rows = -(-len(panels) // columns)
    hover = f"{x_title} %{{x}}<br>{y_title} %{{y}}<br>{value_title} %{{z:.3g}}<extra></extra>"
    gap = 1 if max(len(x), len(y)) <= 40 else 0
    for k, (panel, array) in enumerate(zip(panels, arrays)):
        figure.add_heatmap(
            z=array,
            x=list(x),
            y=list(y),
            coloraxis="coloraxis",
            hovertemplate=hover,
            xgap=gap,
            ygap=gap,
            **axes(k),
        )
        for n, line in enumerate(panel.overlay):
            add_line(figure, line, k, n + 1, legend=k == 0)
        row, column = divmod(k, columns)
        figure.layout[f"xaxis{suffix(k)}"].update(
            title_text=x_title if row == rows - 1 or k + columns >= len(panels) else None,
            showgrid=False,
            range=_cell_range(x),
        )
        figure.layout[f"yaxis{suffix(k)}"].update(
            title_text=y_title if column == 0 else None,
            showgrid=False,
            autorange="reversed" if y_down else None,
            range=None if y_down else _cell_range(y),
        )
    low, high = value_range or _limits(arrays)
    figure.update_layout(
        coloraxis={
            "colorscale": SCALES[scale],
            "cmin": low,
            "cmax": high,
            "colorbar": {"title": {"text": value_title}},
        }
    )
    return figure


def loop_slider_figure(
    values: np.ndarray,
    *,
    loops: Sequence[int],
    panel_titles: Sequence[str],
    x: Collection[Any],
    y: Collection[Any],
    x_title: str,
    y_title: str,
    value_title: str,
) -> go.Figure:
    """Square heat maps with a slider over loops, such as attention patterns of all heads.

    Args:
        values: Shares in 0..1, [loop, panel, row, column]; row 0 is at the top.
        loops: Number of each loop, as the slider shows it.
        panel_titles: One for each panel.
        x: Names or numbers of the columns.
        y: Names or numbers of the rows.
        value_title: What the colour means.
    """
    values = np.asarray(values, dtype=np.float32)
    if values.ndim != 4 or values.shape[:2] != (len(loops), len(panel_titles)):
        raise InputError(
            "values",
            expected=f"an array [loop, panel, row, column] with {len(loops)} loops and "
            f"{len(panel_titles)} panels",
            given=f"an array of shape {values.shape}",
            fix="Give one array for each loop and each panel title.",
        )
    figure = heatmap_panels(
        [HeatPanel(values[0, k], title) for k, title in enumerate(panel_titles)],
        x=x,
        y=y,
        x_title=x_title,
        y_title=y_title,
        value_title=value_title,
        scale="mass",
        value_range=(0.0, 1.0),
        square=True,
        y_down=True,
    )
    traces = list(range(len(panel_titles)))
    figure.frames = [
        go.Frame(name=str(loop), data=[go.Heatmap(z=z) for z in values[t]], traces=traces)
        for t, loop in enumerate(loops)
    ]
    jump = {"mode": "immediate", "frame": {"duration": 0}, "transition": {"duration": 0}}
    steps = [
        {"label": str(loop), "method": "animate", "args": [[str(loop)], jump]} for loop in loops
    ]
    figure.update_layout(
        sliders=[{"steps": steps, "currentvalue": {"prefix": "loop "}, "pad": {"t": 60}}]
    )
    return figure


def _cell_range(values: Collection[Any]) -> list[float] | None:
    """From edge to edge of the cells, where coordinates are evenly spaced numbers."""
    if len(values) < 2 or not all(isinstance(v, (int, float, np.number)) for v in values):
        return None
    numbers = np.asarray(list(values), dtype=float)
    steps = np.diff(numbers)
    if not np.allclose(steps, steps[0]):
        return None
    return [float(numbers[0] - steps[0] / 2), float(numbers[-1] + steps[0] / 2)]


def _limits(arrays: Sequence[np.ndarray]) -> tuple[float, float]:
    finite = np.concatenate([a[np.isfinite(a)].reshape(-1) for a in arrays])
    return (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
