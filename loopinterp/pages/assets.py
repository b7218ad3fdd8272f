"""What a page holds inline: figures as JSON, tables as downloads, styles and scripts."""

from __future__ import annotations

import base64
import gzip
import json
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from loopinterp.figures.circuit_graph import figure_markup, script_json
from loopinterp.figures.circuit_parts import asset as graph_asset

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pandas as pd


FLAT = frozenset({"bar", "box", "contour", "heatmap", "histogram", "scatter", "violin"})
"""Trace kinds that the part of Plotly in ``vendor/`` draws."""

_LARGEST = 2_000_000
"""Largest table in a page, in bytes."""


@dataclass(frozen=True)
class Download:
    """A table as a ``data:`` link; ``href`` is empty if the table is too large."""

    href: str
    filename: str
    rows: int


def figure_json(figure: Any) -> Markup:
    """A Plotly figure as JSON, safe inside a script tag."""
    # Without orjson Plotly spells "<" as \u003c, where no tag would be found.
    plain = json.dumps(json.loads(str(figure.to_json())), separators=(",", ":"))
    return script_json(figure_markup(plain))


def plotly_scripts(flat: Iterable[bool]) -> dict[str, Markup]:
    """The Plotly scripts that figures need, by name."""
    needed = set(flat)
    names = {"plotly-flat": True, "plotly-whole": False}
    return {name: Markup(_plotly(name)) for name, kind in names.items() if kind in needed}


@cache
def _plotly(name: str) -> str:
    if name == "plotly-whole":
        from plotly.offline import get_plotlyjs

        return get_plotlyjs()
    return read_asset("vendor/plotly-cartesian/plotly-cartesian.min.js")


def page_scripts(plotly: Iterable[str]) -> list[str]:
    """Every script that a page may run; ``plotly`` names those of :func:`plotly_scripts`."""
    ours = map(asset, ("layout.js", "report.js", "circuit.js", "explorer.js"))
    return [*map(str, ours), *map(_plotly, plotly)]


def asset(name: str) -> Markup:
    """A style or script of ours; ``explorer.js`` is all modules of the explorer."""
    if name == "explorer.js":
        return Markup(page_script())
    if name in ("circuit.css", "circuit.js"):
        return Markup(graph_asset(name))
    folder = "explorer" if name == "explorer.css" else "templates"
    return Markup(read_asset(f"{folder}/{name}"))


def read_asset(path: str) -> str:
    return (files("loopinterp.pages") / path).read_text(encoding="utf-8")


@cache
def script() -> str:
    """The explorer's modules as one script that defines ``mount`` and imports nothing."""
    # Each after those that it imports.
    names = ("explorer_data", "explorer_state", "explorer_drawing", "explorer_files", "explorer")
    texts = [read_asset(f"explorer/{name}.js") for name in names]
    return re.sub(r"^import [^;]*;\n|^export ", "", "\n".join(texts), flags=re.M)


def page_script() -> str:
    """The script that shows the explorations of a page; nothing of it is a global of the page."""
    return f'(() => {{\n"use strict";\n{script()}\n{read_asset("explorer/explorer_page.js")}}})();'


def table_download(table: pd.DataFrame, name: str) -> Download:
    """A table as CSV in a ``data:`` URI, compressed if long."""

    def escape(cell: Any) -> Any:
        # An apostrophe before what a spreadsheet would run as a formula.
        runs = isinstance(cell, str) and cell.startswith(("=", "+", "-", "@", "\t", "\r", "\n"))
        return f"'{cell}" if runs else cell

    table = table.copy()
    for column in table.select_dtypes(exclude="number"):
        table[column] = table[column].map(escape)
    table = table.rename(columns=escape)
    text = table.to_csv(index=False, lineterminator="\n", float_format="%.6g").encode()
    kind, suffix = "text/csv;charset=utf-8", "csv"
    if len(text) > 400_000:
        # Without a time, the same table gives the same bytes.
        text, kind, suffix = gzip.compress(text, mtime=0), "application/gzip", "csv.gz"
    fits = len(text) <= _LARGEST
    href = f"data:{kind};base64,{base64.b64encode(text).decode()}" if fits else ""
    return Download(href, f"{slug(name)}.{suffix}", len(table))


def slug(text: str) -> str:
    """Lower-case words joined by hyphens.

    Example:
        >>> slug("Exact match, by length (12×)")
        'exact-match-by-length-12'
    """
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
