"""What whole analyses share."""

from __future__ import annotations

from typing import Any

import pytest

from loopinterp import benchmark


@pytest.fixture
def one_known_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tools are scored on one compiled model, as they are on many in tests/benchmark."""

    def fewer(programs: Any, **options: Any) -> Any:
        return known_models(programs[:1], **options | {"disguises": options["disguises"][:1]})

    known_models = benchmark.known_models
    monkeypatch.setattr(benchmark, "known_models", fewer)
