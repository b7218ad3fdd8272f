"""What is inlined in a page: figures as JSON, tables as downloads, style and script."""

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

from loopinterp.figures.circuit_graph import assets, figure_markup, script_json
from loopinterp.pages.exploration import page_json, read_asset, script

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pandas as pd

    from loopinterp.pages import Exploration


FLAT = frozenset({"bar", "box", "contour", "heatmap", "histogram", "scatter", "violin"})
"""Kinds of traces that the part of Plotly in ``vendor/`` draws."""

# Shows every exploration of the page in the element before its data.
_EXPLORE = """(() => {
"use strict";
%s
const shown = [...document.querySelectorAll(".exploration-json")];
window.explored = Promise.allSettled(
  shown.map((data) => mount(data.previousElementSibling, JSON.parse(data.textContent)))
).then((made) => together(made.filter((one) => one.value).map((one) => one.value)));
})();"""

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
    """A Plotly figure as JSON: it ends no script, and no string of it is a tag but for ``<b>``."""
    # Without orjson Plotly spells "<" as \u003c, where no tag would be found.
    plain = json.dumps(json.loads(str(figure.to_json())), separators=(",", ":"))
    return script_json(figure_markup(plain))


def plotly_scripts(flat: Iterable[bool]) -> dict[str, Markup]:
    """The scripts that draw figures, by their names in the page: of flat ones, and of others.

    Example:
        >>> list(plotly_scripts([True, False, True])), plotly_scripts([])
        (['plotly-flat', 'plotly-whole'], {})
    """
    needed = set(flat)
    names = {"plotly-flat": True, "plotly-whole": False}
    return {name: Markup(_plotly(name)) for name, kind in names.items() if kind in needed}


@cache
def _plotly(name: str) -> str:
    """A script of Plotly's, unchanged: the vendored part for flat figures, or the whole."""
    if name == "plotly-whole":
        from plotly.offline import get_plotlyjs

        return get_plotlyjs()
    folder = files("loopinterp.pages") / "vendor" / "plotly-cartesian"
    return (folder / "plotly-cartesian.min.js").read_text(encoding="utf-8")


def page_scripts(plotly: Iterable[str]) -> list[str]:
    """Every script that a page may run: its own, the graphs', the explorer's, and Plotly's.

    Args:
        plotly: Names that :func:`plotly_scripts` gave.
    """
    own = [str(asset("layout.js")), str(asset("report.js")), assets()[1]]
    return [*own, str(explorer_asset("script")), *map(_plotly, plotly)]


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
    """The explorer's ``style``, or the ``script`` that shows the explorations of a page."""
    return Markup(_EXPLORE % script() if name == "script" else read_asset("explorer.css"))


def asset(name: str) -> Markup:
    """The text of a file in ``templates/``, inlined as it is."""
    folder = files("loopinterp.pages") / "templates"
    return Markup((folder / name).read_text(encoding="utf-8"))  # escaped above, or our own file
