"""The tables behind a page, of one run or several: kept in the page, and read back from it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from loopinterp.errors import CheckpointError
from loopinterp.plotting.inert import script_json
from loopinterp.report.compared_curves import COLUMNS, curve_rows
from loopinterp.report.how_it_was_made import setting_groups
from loopinterp.storage import parse_json_object, read_bytes, spell_json

if TYPE_CHECKING:
    import pandas as pd

    from loopinterp.report.run_record import RunRecord

Tables = dict[str, "pd.DataFrame"]

_ELEMENT = re.compile(rb'<script type="application/json" id="report-data">(.*?)</script>', re.S)
_SETTINGS = ("run", "part", "setting", "value")
_FINDINGS = ("run", "result", "number", "kind", "label", "value", "good", "text")


def tables_of(records: Mapping[str, RunRecord]) -> Tables:
    """Settings, findings and curves of runs, each a tidy table with the run in its first column.

    Args:
        records: Runs by the names that they go by.
    """
    import pandas as pd

    settings, findings, curves = [], [], []
    for run, record in records.items():
        for part, values in setting_groups(record.config).items():
            settings += [(run, part, name, value) for name, value in values.items()]
        findings += _findings(run, record)
        curves += curve_rows(run, record)
    # As objects: pandas' own strings refuse lone surrogates, which a damaged file may hold.
    return {
        "settings": pd.DataFrame(settings, columns=list(_SETTINGS), dtype=object),
        "findings": pd.DataFrame(findings, columns=list(_FINDINGS), dtype=object),
        "curves": pd.DataFrame(curves, columns=list(COLUMNS)),
    }


def _findings(run: str, record: RunRecord) -> list[tuple[Any, ...]]:
    rows = []
    for name, result in record.results.items():
        try:
            said = result.findings()
        except Exception:  # a damaged value; the page has a sentence about it
            continue
        rows += [
            (run, name, k, f.kind, f.label, f.value, f.good, f.text) for k, f in enumerate(said)
        ]
    return rows


def embedded(tables: Tables) -> Markup:
    """Tables as JSON that cannot end its own script tag."""
    kept = {
        name: {
            "columns": table.columns.tolist(),
            "rows": table.astype(object).values.tolist(),
        }
        for name, table in tables.items()
    }
    return script_json(spell_json(kept))


def read_report(page: str | Path) -> Tables:
    """The tables of a page that :func:`write_report` or :func:`write_comparison` wrote.

    Args:
        page: The HTML file.

    Returns:
        ``settings``, ``findings`` and ``curves``, each with the run in its first column.

    Raises:
        CheckpointError: The file is missing, or has no such tables in it.
    """
    import pandas as pd

    found = _ELEMENT.search(read_bytes(Path(page)))
    kept = parse_json_object(found[1]) if found else None
    try:
        if kept is None:
            raise ValueError("none")
        tables = {
            name: pd.DataFrame(kept[name]["rows"], columns=kept[name]["columns"])
            for name in ("settings", "findings", "curves")
        }
        numbers = dict.fromkeys(("value", "low", "high"), float)  # JSON has no NaN
        return tables | {"curves": tables["curves"].astype(numbers)}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"page {page}",
            expected="a report with its tables inside",
            given="a page without any" if kept is None else f"others ({error})",
            fix="Write the report again with this version.",
        ) from error
