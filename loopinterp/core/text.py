"""What is printed: objects in a line and in a notebook, shares, progress bars, timed stages.

``LOOPINTERP_PROGRESS=0``, ``--no-progress`` and :func:`showing` switch bars off. Of nested loops
only the outermost has a bar.
"""

from __future__ import annotations

import dataclasses
import os
import reprlib
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsFloat, TypeVar

if TYPE_CHECKING:
    from loopinterp.core.run_files import Owner


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


T = TypeVar("T")

_DELAY = 2.0  # seconds for which nothing is shown

_shown: ContextVar[bool] = ContextVar("shown", default=True)
_open: ContextVar[bool] = ContextVar("open", default=False)


@contextmanager
def showing(visible: bool) -> Iterator[None]:
    token = _shown.set(visible)
    try:
        yield
    finally:
        _shown.reset(token)


def track(items: Iterable[T], about: str, *, total: int | None = None) -> Iterator[T]:
    """The items, with a bar on stderr after two seconds.

    ``about`` names the work in a word or two; items without a length need ``total``.
    """
    if _open.get() or _switched_off():
        yield from items
        return
    _open.set(True)
    try:
        with bar(about, total=total, items=items, delay=_DELAY, leave=False) as shown:
            yield from shown
    finally:
        _open.set(False)


def _switched_off() -> bool:
    return not _shown.get() or os.environ.get("LOOPINTERP_PROGRESS") == "0"


def bar(
    about: str, *, items: Iterable[Any] | None = None, disable: bool = False, **options: Any
) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # in a notebook without widgets it is one of text
        from tqdm.auto import tqdm
    # A log file wants a line now and then, not ten a second.
    live = sys.stderr.isatty() or "ipykernel" in sys.modules
    off = disable or _switched_off()
    if not live:
        # Looked at in every step: otherwise tqdm's monitor writes a second line each time.
        options |= {"mininterval": 20.0, "miniters": 1, "file": _Lines(), "leave": True}
    return tqdm(items, desc=about, disable=off, **options)


class _Lines:
    def write(self, text: str) -> None:
        if line := text.strip():
            sys.stderr.write(f"{line}\n")

    def flush(self) -> None:
        sys.stderr.flush()


class Stages:
    """Prints each stage if ``show``; a run's ``made.json`` gets its seconds and skips."""

    def __init__(self, run: Path | None = None, *, show: bool, owner: Owner | None = None) -> None:
        if run is not None:
            from loopinterp.core.storage import need_writable

            need_writable(run)  # before the work, not after it
        self._run, self._show, self._owner = run, show, owner

    @contextmanager
    def stage(self, name: str, about: str) -> Iterator[None]:
        self._say(f"{name}: {about}\n")
        start = time.perf_counter()
        with showing(self._show):
            yield
        seconds = time.perf_counter() - start
        self._say(f"  {seconds:.1f} s\n")
        self._note(seconds={name: seconds})

    def skip(self, name: str, reason: str) -> None:
        """Note a skipped study; the reason is a clause that follows "because"."""
        self._say(f"{name}: skipped, because {reason}\n")
        self._note(skipped={name: reason}, owner=self._owner)

    def _note(self, **notes: Any) -> None:
        if self._run is not None:
            from loopinterp.core.run_files import record_how_it_was_made

            record_how_it_was_made(self._run, **notes)

    def _say(self, text: str) -> None:
        if self._show:
            sys.stderr.write(text)
            sys.stderr.flush()
