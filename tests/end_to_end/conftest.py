"""What whole analyses share."""

from __future__ import annotations

from typing import Any

import pytest

from loopinterp import ground_truth


@pytest.fixture
def one_known_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tools are scored on one compiled model, as they are on many in tests/ground_truth."""

    def fewer(programs: Any, **options: Any) -> Any:
        return known_models(programs[:1], **options | {"disguises": options["disguises"][:1]})

    known_models = ground_truth.known_models
    monkeypatch.setattr(ground_truth, "known_models", fewer)
