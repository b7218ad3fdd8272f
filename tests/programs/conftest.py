"""Shared by the tests of the language."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def quick() -> Iterator[None]:
    """No run-time type checks in this module: they draw random numbers, which hypothesis forbids
    where strategies build expressions, and they cost most of the time."""
    from jaxtyping import config

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "jaxtyping_disable", True)
        yield
