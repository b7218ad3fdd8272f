"""What whole analyses share."""

from __future__ import annotations

from typing import Any

import pytest

from loopinterp import benchmark, decompiler, dynamics


@pytest.fixture
def small_studies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dearest studies in small, as their sizes are tried in the tests of their rooms.

    Tools are scored on one compiled model, programs are read off few exchanges, and one eigenvalue
    and a short run say how stable a limit is.
    """

    def one_model(programs: Any, **options: Any) -> Any:
        return known_models(programs[:1], **options | {"disguises": options["disguises"][:1]})

    def few_exchanges(*args: Any, **options: Any) -> Any:
        return decompilation_study(*args, **options | {"n_exchanges": 400})

    def one_eigenvalue(*args: Any, **options: Any) -> Any:
        return stability(*args, **options | {"k": 1, "growth_loops": 4, "lyapunov_loops": 16})

    known_models, decompilation_study = benchmark.known_models, decompiler.decompilation_study
    stability = dynamics.local_stability_study
    monkeypatch.setattr(benchmark, "known_models", one_model)
    monkeypatch.setattr(decompiler, "decompilation_study", few_exchanges)
    monkeypatch.setattr(dynamics, "local_stability_study", one_eigenvalue)
