"""What whole analyses share."""

from __future__ import annotations

from typing import Any

import pytest

from loopinterp import benchmark, comparison, decompiler, dynamics


@pytest.fixture
def small_studies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dearest studies in small, as their sizes are tried in the tests of their rooms.

    Tools are scored on one compiled model, programs are compared on few pairs and read off few
    exchanges, one eigenvalue in a small space and a short run say how stable a limit is, states are
    reduced to two numbers at most, and one direction is learnt in few steps.
    """

    def one_model(programs: Any, **options: Any) -> Any:
        return known_models(programs[:1], **options | {"disguises": options["disguises"][:1]})

    def few_comparisons(*args: Any, **options: Any) -> Any:
        return compare_programs(*args, **{"pairs": comparison.SpreadPairs(pairs=192)} | options)

    def few_exchanges(*args: Any, **options: Any) -> Any:
        return decompilation_study(*args, **options | {"n_exchanges": 400})

    def one_eigenvalue(*args: Any, **options: Any) -> Any:
        small = {"k": 1, "growth_loops": 2, "lyapunov_loops": 8}
        return stability(*args, **options | small | {"max_vectors": 6, "max_products": 20})

    def few_pairs(*args: Any, **options: Any) -> Any:
        return reduction_study(*args, **options | {"pairs": 32, "ranks": (1, 2)})

    def one_direction(*args: Any, **options: Any) -> Any:
        return search_subspaces(*args, **options | {"ranks": (1,), "steps": 5})

    known_models, decompilation_study = benchmark.known_models, decompiler.decompilation_study
    reduction_study, compare_programs = comparison.reduction_study, comparison.compare_programs
    stability, search_subspaces = dynamics.local_stability_study, comparison.search_subspaces
    monkeypatch.setattr(benchmark, "known_models", one_model)
    monkeypatch.setattr(comparison, "compare_programs", few_comparisons)
    monkeypatch.setattr(comparison, "reduction_study", few_pairs)
    monkeypatch.setattr(comparison, "search_subspaces", one_direction)
    monkeypatch.setattr(decompiler, "decompilation_study", few_exchanges)
    monkeypatch.setattr(dynamics, "local_stability_study", one_eigenvalue)
