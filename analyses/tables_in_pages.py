"""Tables that scripts write into pages of the documentation, between two comments each.

    <!-- table NAME, written by analyses/SCRIPT.py -->
    | ... |
    <!-- end of NAME -->

What they are made of lies in files: the recipes, and ``analyses/results``, where what was measured
is kept as CSV. A test says whether a page is what its files say.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from loopinterp.core.errors import InputError

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "analyses" / "results"
PAGES = ROOT / "docs"


def replaced(file: Path, rows: pd.DataFrame, key: Sequence[str], **reading: Any) -> pd.DataFrame:
    """The rows of a file, with new ones put in place of those of the same key."""
    if not file.exists():
        return rows
    known = pd.read_csv(file, **reading)
    old, new = (pd.MultiIndex.from_frame(pd.DataFrame(x, columns=[*key])) for x in (known, rows))
    return pd.concat([known[~old.isin(new)], rows], ignore_index=True)


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def with_error(mean: float, error: float, digits: int) -> str:
    """Mean ± standard error; the mean alone of one seed, whose error is NaN."""
    return f"{mean:.{digits}f}" + ("" if math.isnan(error) else f" ± {error:.{digits}f}")


def put(text: str, tables: Mapping[str, str]) -> str:
    """A page with tables in their places.

    Raises:
        InputError: If a table has no place there, or more than one.
    """
    for name, content in tables.items():
        place = re.compile(rf"(<!-- table {name},[^>]*-->\n).*?(<!-- end of {name} -->)", re.S)
        parts = place.split(text)  # before, the comment that opens, the one that closes, after
        found = (len(parts) - 1) // 3
        if found != 1:
            raise InputError(
                f"table {name}",
                expected="one place for it in the page",
                given=str(found),
                fix=f"Write <!-- table {name}, written by … --> and <!-- end of {name} -->.",
            )
        before, opens, closes, after = parts
        text = f"{before}{opens}{content}\n{closes}{after}"
    return text


def rewrite(page: Path, tables: Mapping[str, str]) -> bool:
    """Put tables into a page's file; whether that changed it."""
    before = page.read_text()
    after = put(before, tables)
    page.write_text(after)
    return after != before
