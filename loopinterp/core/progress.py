"""Progress bars after two seconds, and the timed stages of a longer job.

``LOOPINTERP_PROGRESS=0``, ``--no-progress`` and :func:`showing` switch bars off. Of nested loops
only the outermost has a bar.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from loopinterp.core.run_files import Owner


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
