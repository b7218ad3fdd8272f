"""What whole analyses share."""

from __future__ import annotations

import pytest

from tests.small_studies import make_studies_small


@pytest.fixture
def small_studies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dearest studies in small, as their sizes are tried in the tests of their rooms."""
    make_studies_small(monkeypatch)
