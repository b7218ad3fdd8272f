"""The first cell of a notebook in the tests: the dearest studies in small, as rooms test them."""

from __future__ import annotations

from typing import Any


def make_studies_small() -> None:
    """A notebook may take any name for its own: whatever is needed later is local here."""
    from loopinterp import comparison, decompiler, dynamics

    decompilation, compare = decompiler.decompilation_study, comparison.compare_programs
    stability, pairs = dynamics.local_stability_study, comparison.SpreadPairs(pairs=128)
    spaces = {"k": 2, "growth_loops": 2, "lyapunov_loops": 8, "max_vectors": 8, "max_products": 24}

    def few_exchanges(*args: Any, **options: Any) -> Any:
        return decompilation(*args, **{"n_exchanges": 1000} | options)

    def few_pairs(*args: Any, **options: Any) -> Any:
        return compare(*args, **{"pairs": pairs} | options)

    def small_spaces(*args: Any, **options: Any) -> Any:
        return stability(*args, **spaces | options)

    decompiler.decompilation_study, comparison.compare_programs = few_exchanges, few_pairs
    dynamics.local_stability_study = small_spaces


if __name__ == "__main__":  # as in a kernel, and not where pytest imports all there is
    make_studies_small()
