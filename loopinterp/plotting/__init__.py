"""The look of every figure: one Plotly template, one colour-blind-safe palette, shared pieces.

Figures are drawn without text or background colours (both are transparent or inherited), so
that the same figure reads well on a light and on a dark page. Colours of data were chosen to
keep a contrast of about 3 on white and on near-black, and to stay apart under simulated
protanopia, deuteranopia and tritanopia. Controls are grey and dashed everywhere.

    >>> from loopinterp.plotting import Series, line_figure
    >>> figure = line_figure(
    ...     [Series("model", [8, 16], [1.0, 0.9], low=[0.99, 0.8], high=[1.0, 0.95])],
    ...     x_title="length (bits)", y_title="exact match", y_range=(0, 1.02))
    >>> [trace.name for trace in figure.data]
    ['model', 'model']
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from loopinterp._lazy import lazy_exports

if TYPE_CHECKING:
    from loopinterp.plotting.axes import Reference as Reference
    from loopinterp.plotting.axes import Series as Series
    from loopinterp.plotting.heatmaps import HeatPanel as HeatPanel
    from loopinterp.plotting.heatmaps import heatmap_panels as heatmap_panels
    from loopinterp.plotting.heatmaps import loop_slider_figure as loop_slider_figure
    from loopinterp.plotting.lines import LinePanel as LinePanel
    from loopinterp.plotting.lines import bars_with_intervals as bars_with_intervals
    from loopinterp.plotting.lines import line_figure as line_figure
    from loopinterp.plotting.lines import line_panels as line_panels
    from loopinterp.plotting.look import FONT as FONT
    from loopinterp.plotting.look import PALETTE as PALETTE
    from loopinterp.plotting.look import SCALES as SCALES
    from loopinterp.plotting.look import colour as colour
    from loopinterp.plotting.look import ramp as ramp
    from loopinterp.plotting.look import template as template

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "FONT": ".look",
        "HeatPanel": ".heatmaps",
        "LinePanel": ".lines",
        "PALETTE": ".look",
        "Reference": ".axes",
        "SCALES": ".look",
        "Series": ".axes",
        "bars_with_intervals": ".lines",
        "colour": ".look",
        "heatmap_panels": ".heatmaps",
        "line_figure": ".lines",
        "line_panels": ".lines",
        "loop_slider_figure": ".heatmaps",
        "ramp": ".look",
        "template": ".look",
    },
)
