"""Clauses in a result: its fields are values and codes, which renderers put into words."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

from loopinterp.core.results import Result

NAMES_IN_WORDS = ("stratum", "untested", "what", "method", "subspace", "symbols", "graph")
NAMES_IN_WORDS += ("code", "details")
"""Fields and axes whose names have several words, programs, and what a page shows as it is."""


def clauses(result: Result) -> list[tuple[str, str]]:
    """Texts of four words or more in the fields and coordinates of a result, with their places."""
    fields = {
        field.name: getattr(result, field.name)
        for field in dataclasses.fields(result)
        if field.name not in ("data", "provenance")
    }
    axes = {str(name): c.values.tolist() for name, c in result.data.coords.items()}
    return [
        (place, text)
        for place, text in _texts(fields | axes, "")
        if len(re.findall(r"[A-Za-z]{2,}", text)) >= 4
        if not any(name in place for name in NAMES_IN_WORDS)
    ]


def _texts(value: Any, place: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield place, value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from _texts(
            {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}, place
        )
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _texts(part, f"{place}.{key}")
    elif isinstance(value, (list, tuple, set, frozenset)):
        for part in value:
            yield from _texts(part, place)
