"""Progress bars for whatever takes longer than two seconds: in terminals, notebooks and pipes.

There is one switch: the environment variable ``LOOPINTERP_PROGRESS=0``, or :func:`showing` for a
part of a program (``--no-progress`` of the command line). Of loops inside loops the outermost that
is tracked has the bar, so that there is never more than one.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")

SWITCH = "LOOPINTERP_PROGRESS"
"""Name of the environment variable; ``0`` switches all bars off."""

DELAY = 2.0
"""Seconds for which nothing is shown."""

_wanted: ContextVar[bool] = ContextVar("wanted", default=True)
_open: ContextVar[bool] = ContextVar("open", default=False)


@contextmanager
def showing(wanted: bool) -> Iterator[None]:
    """Show bars inside, or none.

    Example:
        >>> with showing(False):
        ...     sum(track([1, 2, 3], "adding"))
        6
    """
    token = _wanted.set(wanted)
    try:
        yield
    finally:
        _wanted.reset(token)


def track(items: Iterable[T], about: str, *, total: int | None = None) -> Iterator[T]:
    """The items, with a bar on stderr once they have taken two seconds.

    Args:
        items: What is gone through.
        about: What is done, in a word or two.
        total: Their number, where they cannot say it themselves.
    """
    if _open.get() or _switched_off():
        yield from items
        return
    _open.set(True)
    try:
        with bar(about, total=total, items=items, delay=DELAY, leave=False) as shown:
            yield from shown
    finally:
        _open.set(False)


def _switched_off() -> bool:
    return not _wanted.get() or os.environ.get(SWITCH) == "0"


def bar(
    about: str, *, items: Iterable[Any] | None = None, disable: bool = False, **options: Any
) -> Any:
    """tqdm's bar for a terminal, a notebook or a pipe; options are tqdm's own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # in a notebook without widgets it is one of text
        from tqdm.auto import tqdm
    # A log file wants a line now and then, not ten a second.
    live = sys.stderr.isatty() or "ipykernel" in sys.modules
    off = disable or _switched_off()
    return tqdm(items, desc=about, mininterval=0.1 if live else 20.0, disable=off, **options)
