"""Short texts: objects in a line and in a notebook, shares."""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Iterable, Mapping
from html import escape
from typing import Any, SupportsFloat

MOST = 300  # characters of a repr


class ShortRepr:
    """Base of classes with a one-line repr (dataclasses need ``repr=False``).

    Example:
        >>> @dataclasses.dataclass(repr=False)
        ... class Found(ShortRepr):
        ...     state: object
        ...     names: dict
        >>> import torch
        >>> Found(torch.zeros(3, 4), {"a": torch.ones(2), "b": 1})
        Found(state=float32[3, 4], names={a, b})
    """

    def _shown(self) -> Iterable[tuple[str, Any]]:
        is_data = dataclasses.is_dataclass(self)
        names = [f.name for f in dataclasses.fields(self)] if is_data else vars(self)
        return [(name, getattr(self, name)) for name in names if not name.startswith("_")]

    def __repr__(self) -> str:
        return say(type(self).__name__, self._shown())

    def _repr_html_(self) -> str:
        return as_table(repr(self), self._shown())


def say(name: str, values: Iterable[tuple[str, Any]]) -> str:
    """``name(field=value, …)`` in at most :data:`MOST` characters."""
    parts = [f"{field}={brief(value)}" for field, value in values]
    shown = parts
    while len(name) + 4 + len(", ".join(shown)) > MOST:
        shown = shown[:-1]
    return f"{name}({', '.join([*shown, *(['…'] if len(shown) < len(parts) else [])])})"


def brief(value: Any) -> str:
    """A short form: type and shape of an array, keys of a mapping."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, Mapping):
        return f"{{{_cut(', '.join(map(str, value)))}}}"
    if callable(value) and not dataclasses.is_dataclass(value) and hasattr(value, "__name__"):
        return value.__name__
    if type(value).__repr__ is object.__repr__:
        return type(value).__name__
    plain = isinstance(value, (str, bytes, list, tuple, set, frozenset))
    return _cut(reprlib.repr(value) if plain else " ".join(repr(value).split()))


def printable(text: str) -> str:
    r"""Text with undecodable bytes escaped, for pages and tables."""
    return text.encode(errors="backslashreplace").decode()


def as_table(title: str, values: Iterable[tuple[str, Any]], *, fold: str = "") -> str:
    """A notebook's view: the title, and a row for each field, under a fold if named."""
    rows = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(brief(v))}</td></tr>" for name, v in values
    )
    table = f"<table>{rows}</table>"
    if fold:
        table = f"<details><summary>{escape(fold)}</summary>{table}</details>"
    return f"<p><code>{escape(title)}</code></p>{table}"


def _cut(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:59]}…"


def percent(share: SupportsFloat) -> str:
    """A whole percentage, never rounded up to 100 or down to 0.

    Example:
        >>> percent(1.0), percent(0.997), percent(0.5), percent(0.001)
        ('100%', '99.7%', '50%', '0.1%')
    """
    value = 100 * float(share)
    if 0 < value < 1 or 99 < value < 100:
        return f"{min(max(value, 0.1), 99.9):.1f}%"
    return f"{value:.0f}%"
