"""Bounds on work that are counted; seconds would say who else is busy on the machine."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any


@contextlib.contextmanager
def at_most(calls: int) -> Iterator[None]:
    """Fail as soon as more functions have been called, Python's own or built in."""
    made = 0

    def count(_frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal made
        made += event in ("call", "c_call")
        if made > calls:
            raise AssertionError(f"expected at most {calls:,} calls")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(before)
