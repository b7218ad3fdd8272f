"""What a page holds inline: figures as JSON, tables as downloads, styles and scripts."""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from markupsafe import Markup

from loopinterp.core.errors import CheckpointError
from loopinterp.core.intervals import ENDS
from loopinterp.core.results import Figure, Result
from loopinterp.core.settings import flatten_settings
from loopinterp.core.storage import parse_json_object, read_bytes, spell_json
from loopinterp.figures import LinePanel, Series, bars_with_intervals, colour, line_panels
from loopinterp.figures.circuit_graph import figure_markup, script_json
from loopinterp.figures.circuit_layout import asset as graph_asset

if TYPE_CHECKING:
    from collections.abc import Iterable

    from loopinterp.pages.run_record import RunRecord


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


Tables = dict[str, "pd.DataFrame"]


def tables_of(records: Mapping[str, RunRecord]) -> Tables:
    """Settings, findings and curves of named runs; the run is in the first column."""
    settings, findings, curves = [], [], []
    readers = {"evaluation": _exact, "program-comparison": _programs, "convergence": _settling}
    for run, record in records.items():
        for part, values in setting_groups(record.config).items():
            settings += [(run, part, name, value) for name, value in values.items()]
        for result_name, result in record.results.items():
            with suppress(Exception):  # a damaged value; the page has a sentence about it
                for k, one in enumerate(result.findings()):
                    about = (one.section, one.label, one.value, one.good, one.text)
                    findings.append((run, result_name, k, *about))
            if result.kind in readers:
                with suppress(Exception):  # a damaged value, as above
                    curves += [(run, *row) for row in readers[result.kind](result)]
        step = max(len(record.metrics) // 300, 1)  # a curve of some hundred points looks the same
        curves += [
            (run, _TRAINING.title, "loss", row["step"], row["loss"], np.nan, np.nan)
            for row in record.metrics[::step]
            if "step" in row and row.get("loss", 0) > 0
        ]
    of_curves = ["run", "figure", "panel", "x", "value", "low", "high"]
    names = ["run", "result", "number", "section", "label", "value", "good", "text"]
    # As objects: pandas' own strings refuse lone surrogates, which a damaged file may hold.
    return {
        "settings": pd.DataFrame(
            settings, columns=["run", "part", "setting", "value"], dtype=object
        ),
        "findings": pd.DataFrame(findings, columns=names, dtype=object),
        "curves": pd.DataFrame(curves, columns=of_curves),
    }


def embedded(tables: Tables) -> Markup:
    """Tables as JSON that is safe inside a script tag."""
    documents = {
        name: {"columns": table.columns.tolist(), "rows": table.astype(object).values.tolist()}
        for name, table in tables.items()
    }
    return script_json(spell_json(documents))


def read_report(page: str | Path) -> Tables:
    """The tables of a page that :func:`write_report` or :func:`write_comparison` wrote.

    They are ``settings``, ``findings`` and ``curves``.

    Raises:
        CheckpointError: If the file is missing or has no such tables.
    """
    element = rb'<script type="application/json" id="report-data">(.*?)</script>'
    match = re.search(element, read_bytes(Path(page)), re.S)
    document = parse_json_object(match[1]) if match else None
    try:
        if document is None:
            raise ValueError("none")
        tables = {
            name: pd.DataFrame(document[name]["rows"], columns=document[name]["columns"])
            for name in ("settings", "findings", "curves")
        }
        numbers = dict.fromkeys(("value", "low", "high"), float)  # JSON has no NaN
        return tables | {"curves": tables["curves"].astype(numbers)}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"page {page}",
            expected="a report with its tables inside",
            given="a page without any" if document is None else f"others ({error})",
            fix="Write the report again with this version.",
        ) from error


@dataclass(frozen=True)
class _Shared:
    title: str
    x_title: str
    caption: str
    control: str = ""
    logarithmic: tuple[str, ...] = ()
    bars: bool = False


_EXACT = _Shared(
    "Exact match by length",
    "length",
    "Whole answers that are right, a line for each run, at the loops that the task asks for. "
    "Bands: 95% intervals. Runs may have been measured at other lengths.",
    "Each run's own report has what a constant answer would get.",
)

_CONVERGENCE = _Shared(
    "Convergence, loop by loop",
    "loop",
    "Above: share of examples with a right answer after each loop. Below: relative residual at the "
    "position that moved most, median over examples. A line ends where the state stops moving.",
    "A state can converge to a wrong answer, so both are shown.",
    logarithmic=("relative residual",),
)

_PROGRAMS = _Shared(
    "Each program against each run",
    "whole-run accuracy",
    "Share of effective interventions after which the program predicts the answer at every delay.",
    "Each run's report has its controls, such as a random change of equal norm.",
    bars=True,
)

_TRAINING = _Shared(
    "Training loss",
    "step",
    "Recorded in training, on its own batches. Runs that were not trained have none.",
    logarithmic=("loss",),
)


_Rows = Iterator[tuple[str, str, Any, float, float, float]]
"""Figure, panel, x, value, and the ends of its interval."""


def _exact(result: Result) -> _Rows:
    # After T(n) loops, or as near to them as was measured.
    extra = result.data["extra_loop"].values
    data = result.data["exact_match"].sel(extra_loop=extra[np.abs(extra).argmin()])
    for distribution in data["distribution"].values.tolist():
        for n in data["length"].values.tolist():
            at = data.sel(distribution=distribution, length=n)
            yield _EXACT.title, f"{distribution} inputs", n, *_ends(at)


def _programs(result: Result) -> _Rows:
    data = result.data["whole_run"].isel(model=0).sel(stratum="all")
    for program in data["program"].values.tolist():
        yield _PROGRAMS.title, "", program, *_ends(data.sel(program=program))


def _settling(result: Result) -> _Rows:
    right = result.data["right"].transpose("loop", "batch", "pos").values
    share_right = ((right != 0).all(-1)).mean(-1)  # [loop] share of examples
    residual = np.nanmedian(result.data["residual_max"].values[1:], axis=1)
    loops = result.data["loop"].values.tolist()
    for panel, values in (("whole answers right", share_right), ("relative residual", residual)):
        for loop, value in zip(loops[-len(values) :], values):
            yield _CONVERGENCE.title, panel, loop, float(value), np.nan, np.nan


def _ends(values: Any) -> tuple[float, float, float]:
    value, low, high = (float(values.sel(estimate=end)) for end in ENDS)
    return value, low, high


def compared_figures(curves: pd.DataFrame, runs: list[str]) -> list[Figure]:
    """Figures of a table of curves; a run has one colour."""
    figures = []
    shades = {run: colour(k) for k, run in enumerate(runs)}
    for shared in (_EXACT, _PROGRAMS, _CONVERGENCE, _TRAINING):  # in reading order
        table: Any = curves[curves["figure"] == shared.title]
        if len(table):
            plot = (_bars if shared.bars else _lines)(shared, table, shades)
            words = {"title": shared.title, "caption": shared.caption, "control": shared.control}
            figures.append(Figure(plot=plot, data=table, section="curves", **words))
    return figures


def _lines(shared: _Shared, table: Any, shades: Mapping[str, str]) -> Any:
    panels = []
    for panel, rows in table.groupby("panel", sort=False):
        log = panel in shared.logarithmic
        rows = rows[rows["value"] > 0] if log else rows
        lines = [_series(run, rows[rows["run"] == run], shades) for run in shades]
        lines = [line for line in lines if len(line.x)]
        unit = None if log else (0, 1.03)
        panels.append(LinePanel(lines, str(panel), y_range=unit, y_log=log))
    return line_panels(panels, x_title=shared.x_title)


def _bars(shared: _Shared, table: Any, shades: Mapping[str, str]) -> Any:
    best: Any = table.groupby("x")["value"].max()
    order = best.sort_values(ascending=False, kind="stable").index[:6].tolist()
    groups = []
    for run in shades:
        rows = table[table["run"] == run].set_index("x").reindex(order).reset_index()
        if rows["value"].notna().any():
            rows["x"] = [name.replace("_", " ") for name in rows["x"]]
            groups.append(_series(run, rows, shades))
    return bars_with_intervals(groups, value_title=shared.x_title, value_range=(0, 1.02))


def _series(run: str, rows: Any, shades: Mapping[str, str]) -> Series:
    known = rows["low"].notna().any()
    low, high = (rows["low"], rows["high"]) if known else (None, None)
    return Series(run, rows["x"].tolist(), rows["value"], low, high, colour=shades[run])


def setting_groups(config: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """A table for each part of a nested configuration, by title.

    Example:
        >>> setting_groups({"seed": 0, "model": {"d_model": 64, "norm": None}})
        {'run': {'seed': '0'}, 'model': {'d_model': '64', 'norm': 'none'}}
    """
    parts = {title: part for title, part in config.items() if isinstance(part, Mapping)}
    top_level = {name: value for name, value in config.items() if name not in parts}
    tables = {title: flatten_settings(part) for title, part in {"run": top_level, **parts}.items()}
    return {t: {k: _spell(v) for k, v in table.items()} for t, table in tables.items() if table}


def _spell(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(_spell(v) for v in value)
    return str(value)
