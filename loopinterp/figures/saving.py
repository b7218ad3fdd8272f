"""Figures as files: pages, vector graphics and pictures."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated, Any

import plotly.graph_objects as go
from pydantic import Field

from loopinterp.core.boundary import checked
from loopinterp.core.errors import check_choice, need
from loopinterp.figures.circuit_graph import CircuitGraph, figure_markup

_TITLE = 34  # pixels of a title
_GAP = 12  # pixels between legend and panel titles


def titled(plot: go.Figure | CircuitGraph, title: str) -> go.Figure | CircuitGraph:
    """A copy of a figure with a title above its legend, on white; a graph has its own."""
    if isinstance(plot, CircuitGraph):
        return plot
    copy: Any = go.Figure(plot)
    copy.update_layout(paper_bgcolor="white", plot_bgcolor="white")
    if title:
        height = (copy.layout.height or 450) + _TITLE
        heading = {"text": f"<b>{figure_markup(title)}</b>", "font": {"size": 16}, "x": 0.01}
        heading |= {"y": 1, "yref": "container", "yanchor": "top", "pad": {"t": 12}}
        # Placed in the container, the legend takes its room below the title from the plot.
        legend = {"yref": "container", "y": 1 - (_TITLE - _GAP) / height, "yanchor": "top"}
        # A clear border is the only room that a legend of several rows leaves to panel titles.
        legend |= {"borderwidth": _GAP, "bordercolor": "rgba(0, 0, 0, 0)"}
        margin = (copy.layout.margin.t or 44) + _TITLE
        copy.update_layout(title=heading, legend=legend, height=height, margin_t=margin)
    return copy


@checked
def save_figure(
    plot: go.Figure | CircuitGraph,
    path: str | Path,
    *,
    title: str = "",
    width: Annotated[int, Field(ge=240)] = 800,
) -> Path:
    """Write a figure as html, svg, png or pdf, by the ending of its name.

    Args:
        plot: A Plotly figure, or the graph of a circuit (html or svg).
        width: Width of pictures in pixels.

    Raises:
        InputError: For another ending, or a picture without kaleido.

    Example:
        >>> from loopinterp.figures import Series, line_figure
        >>> plot = line_figure([Series("model", [1, 2], [0, 1])], x_title="loop", y_title="share")
        >>> save_figure(plot, getfixture("tmp_path") / "share.html", title="Share by loop").suffix
        '.html'
    """
    path = Path(path)
    kind, is_graph = path.suffix.lower(), isinstance(plot, CircuitGraph)
    check_choice("ending", kind, (".html", ".svg", *(() if is_graph else (".png", ".pdf"))))
    if isinstance(plot, CircuitGraph):
        text = plot.to_html() if kind == ".html" else plot.to_svg(width=float(width))
        path.write_text(text, encoding="utf-8")
        return path
    figure: Any = titled(plot, title)
    if kind == ".html":
        figure.write_html(path, include_plotlyjs=True)
        return path
    expected = "an .html file, as kaleido is not installed"
    fix = "Install it with: pip install kaleido."
    need(importlib.util.find_spec("kaleido"), "path", expected, str(path), fix)
    figure.write_image(path, width=width, scale=2 if kind == ".png" else 1)
    return path
