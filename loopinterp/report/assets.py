"""What is inlined in the page: figures as JSON, tables as downloads, style and script."""

from __future__ import annotations

import base64
import gzip
import re
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from loopinterp.explorer.page_data import page_json, read_asset, script
from loopinterp.plotting.circuit_html import assets, fragment

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pandas as pd

    from loopinterp.explorer import Exploration
    from loopinterp.plotting.circuit_graph import CircuitGraph

FLAT = frozenset({"bar", "box", "contour", "heatmap", "histogram", "scatter", "violin"})
"""Kinds of traces that the part of Plotly in ``vendor/`` draws."""

_COMPRESS_ABOVE = 400_000
_LARGEST = 2_000_000
_STARTS_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")


@dataclass(frozen=True)
class Download:
    """A table as a ``data:`` link; ``href`` is empty where it is too large to be embedded."""

    href: str
    filename: str
    rows: int


def figure_json(figure: Any) -> Markup:
    """A Plotly figure as JSON that cannot end its own script tag."""
    text = str(figure.to_json())
    return Markup(text.replace("<", "\\u003c"))  # escaped above, or our own file


def plotly_scripts(flat: Iterable[bool]) -> dict[str, Markup]:
    """The scripts that draw figures, by their names in the page: of flat ones, and of others.

    Example:
        >>> list(plotly_scripts([True, False, True])), plotly_scripts([])
        (['plotly-flat', 'plotly-whole'], {})
    """
    from plotly.offline import get_plotlyjs

    needed, found = set(flat), {}
    if True in needed:
        file = (
            files("loopinterp.report") / "vendor" / "plotly-cartesian" / "plotly-cartesian.min.js"
        )
        found["plotly-flat"] = Markup(file.read_text(encoding="utf-8"))  # their own file, unchanged
    if False in needed:
        found["plotly-whole"] = Markup(get_plotlyjs())  # as Python's plotly ships it
    return found


def graph_html(graph: CircuitGraph) -> Markup:
    """The graph of a circuit as a piece of the page."""
    return Markup(fragment(graph))  # escaped by its own module


def graph_assets() -> dict[str, Markup]:
    """Style and script of all graphs of circuits, for a page that has any."""
    style, script = assets()
    return {"style": Markup(style), "script": Markup(script)}


def table_download(table: pd.DataFrame, name: str) -> Download:
    """A table as CSV in a ``data:`` URI, compressed where it is long.

    Example:
        >>> import pandas as pd
        >>> table_download(pd.DataFrame({"a": [1]}), "Exact match").href
        'data:text/csv;charset=utf-8;base64,YQoxCg=='
    """
    table = _without_formulas(table)
    text = table.to_csv(index=False, lineterminator="\n", float_format="%.6g").encode()
    kind, suffix = "text/csv;charset=utf-8", "csv"
    if len(text) > _COMPRESS_ABOVE:
        text, kind, suffix = gzip.compress(text, mtime=0), "application/gzip", "csv.gz"
    filename = f"{slug(name)}.{suffix}"
    if len(text) > _LARGEST:
        return Download("", filename, len(table))
    return Download(f"data:{kind};base64,{base64.b64encode(text).decode()}", filename, len(table))


def _without_formulas(table: pd.DataFrame) -> pd.DataFrame:
    """A table whose texts a spreadsheet takes for texts: an apostrophe before what may be run."""

    def escape(cell: Any) -> Any:
        return f"'{cell}" if isinstance(cell, str) and cell.startswith(_STARTS_FORMULA) else cell

    table = table.copy()
    for column in table.select_dtypes(exclude="number"):
        table[column] = table[column].map(escape)
    return table.rename(columns=escape)


def slug(text: str) -> str:
    """Lower-case words joined by hyphens, for anchors and file names.

    Example:
        >>> slug("Exact match, by length (12×)")
        'exact-match-by-length-12'
    """
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def exploration_json(result: Exploration) -> Markup:
    """An exploration as JSON that cannot end its own script tag."""
    return Markup(page_json(result))  # ASCII without "<"


def explorer_asset(name: str) -> Markup:
    """The explorer's ``style``, or its ``script``."""
    return Markup(script() if name == "script" else read_asset("explorer.css"))  # our own files


def asset(name: str) -> Markup:
    """The text of a file in ``templates/``, inlined as it is."""
    folder = files("loopinterp.report") / "templates"
    return Markup((folder / name).read_text(encoding="utf-8"))  # escaped above, or our own file
