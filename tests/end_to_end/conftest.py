"""What whole analyses share."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from loopinterp import benchmark, comparison, decompiler, dynamics, probing
from loopinterp.comparison import program_comparison


@pytest.fixture
def small_studies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dearest studies in small, as their sizes are tried in the tests of their rooms.

    Tools are scored on one short compiled model, programs are compared on few pairs of few inputs
    and read off few exchanges in few contexts, probes are fitted to few examples, limits are sought
    in few loops, one eigenvalue in a small space and a short run say how stable one is, states are
    reduced to two numbers at most, and one direction is learnt in few steps.
    """

    def by_default(function: Any, **small: int) -> None:
        for name, value in small.items():
            monkeypatch.setitem(inspect.unwrap(function).__kwdefaults__, name, value)

    def one_model(programs: Any, **options: Any) -> Any:
        small = {"disguises": options["disguises"][:1], "n": min(options["n"], 4), "examples": 32}
        return known_models(programs[:1], **options | small)

    def few_comparisons(model: Any, programs: Any, batches: Any, **options: Any) -> Any:
        options = {"pairs": comparison.SpreadPairs()} | options
        return compare_programs(model, programs, [batch[:32] for batch in batches], **options)

    def few_examples(model: Any, batch: Any, *args: Any, **options: Any) -> Any:
        return decodability(model, batch[:24], *args, **options)

    def few_exchanges(*args: Any, **options: Any) -> Any:
        return decompilation_study(
            *args, **options | {"n": 3, "lengths": [3, 4], "n_exchanges": 100}
        )

    def one_eigenvalue(*args: Any, **options: Any) -> Any:
        small = {"k": 1, "growth_loops": 2, "lyapunov_loops": 8}
        return stability(*args, **options | small | {"max_vectors": 6, "max_products": 20})

    def few_pairs(*args: Any, **options: Any) -> Any:
        return reduction_study(*args, **options | {"pairs": 16, "ranks": (1, 2)})

    def one_direction(*args: Any, **options: Any) -> Any:
        return search_subspaces(
            *args,
            **options | {"ranks": (1,), "steps": 2, "pairs": comparison.SpreadPairs(pairs=64)},
        )

    known_models, decompilation_study = benchmark.known_models, decompiler.decompilation_study
    decodability = comparison.decodability
    reduction_study, compare_programs = comparison.reduction_study, comparison.compare_programs
    stability, search_subspaces = dynamics.local_stability_study, comparison.search_subspaces
    by_default(comparison.SpreadPairs.__init__, pairs=96)
    by_default(decompiler.decompile, contexts=8, tries=2, examples=12)
    by_default(probing.carry_study, n_train=32, n_test=32)
    for study in (dynamics.reachability_study, dynamics.input_dependence_study):
        by_default(study, n_loops=50)
    to_identify = comparison.SpreadPairs(pairs=768, same_value=64, repeated=0.5)
    monkeypatch.setattr(program_comparison, "TO_IDENTIFY", to_identify)
    monkeypatch.setattr(benchmark, "known_models", one_model)
    monkeypatch.setattr(comparison, "decodability", few_examples)
    monkeypatch.setattr(comparison, "compare_programs", few_comparisons)
    monkeypatch.setattr(comparison, "reduction_study", few_pairs)
    monkeypatch.setattr(comparison, "search_subspaces", one_direction)
    monkeypatch.setattr(decompiler, "decompilation_study", few_exchanges)
    monkeypatch.setattr(dynamics, "local_stability_study", one_eigenvalue)
