"""The first lines of a page, script or notebook in the tests: the dearest studies in small, as
rooms test them.

Most sizes that a page passes itself are as they are printed; a few are cut to a limit.
"""

from __future__ import annotations

from typing import Any


def make_studies_small() -> None:
    """A notebook may take any name for its own: whatever is needed later is local here."""
    import functools
    import inspect

    from loopinterp import (
        comparison,
        decompiler,
        dynamics,
        edges,
        features,
        probing,
        programs,
        training,
    )
    from loopinterp.comparison import SpreadPairs, program_comparison

    def by_default(function: Any, **small: Any) -> None:
        # Those of the innermost function hold however it is called, and by whom.
        defaults = inspect.unwrap(function).__kwdefaults__
        assert small.keys() <= defaults.keys()
        defaults.update(small)

    def at_most(room: Any, name: str, **sizes: int) -> None:
        function = getattr(room, name)
        assert sizes.keys() <= inspect.signature(function).parameters.keys()

        @functools.wraps(function)
        def smaller(*arguments: Any, **options: Any) -> Any:
            small = {one: min(options.get(one, most), most) for one, most in sizes.items()}
            return function(*arguments, **options | small)

        setattr(room, name, smaller)

    at_most(features, "train_autoencoder", steps=20)
    at_most(training, "evaluate", n_samples=20)
    at_most(probing, "carry_study", n=14, n_train=16, n_test=16)
    at_most(dynamics, "basin_map", points=5)
    at_most(dynamics, "reachability_study", n_loops=40, n_draws=1)
    at_most(dynamics, "geometry_study", n_loops=24)
    at_most(programs, "equivalence", interventions=512, exhaustive_to=3)
    at_most(comparison, "reduction_study", pairs=64, batch_size=64)
    at_most(decompiler, "decompile", n_exchanges=200)

    study, compare = decompiler.decompilation_study, comparison.compare_programs
    score_edges = edges.edge_study

    @functools.wraps(study)
    def of_three_digits(*arguments: Any, **options: Any) -> Any:
        small = {"n": 3, "lengths": [3, 4], "n_exchanges": 100}
        return study(*arguments, **options | small)

    @functools.wraps(compare)
    def of_one_length(model: Any, programs: Any, data: Any, **options: Any) -> Any:
        data = [data[0][:128]] if isinstance(data, list) else data
        programs = [*programs[3:7], programs[-1]] if len(programs) > 8 else programs  # of addition
        return compare(model, programs, data, **options)

    @functools.wraps(score_edges)
    def of_eight(model: Any, base: Any, source: Any, **options: Any) -> Any:
        small: dict[str, Any] = {"n_steps": 2, "curve_points": 2}
        return score_edges(model, base[:8], source[:8], **options | small)

    decompiler.decompilation_study = of_three_digits
    edges.edge_study = of_eight
    comparison.compare_programs = of_one_length
    by_default(SpreadPairs.__init__, pairs=128)
    program_comparison.TO_IDENTIFY = SpreadPairs(pairs=512, same_value=64, repeated=0.5)
    little = {"n": 4, "lengths": (4, 5), "contexts": 6, "tries": 2, "examples": 8}
    by_default(decompiler.decompile, **little, n_exchanges=200)
    spaces = {"k": 2, "growth_loops": 2, "lyapunov_loops": 8, "max_vectors": 8, "max_products": 24}
    by_default(dynamics.local_stability_study, **spaces)


if __name__ == "__main__":  # as in a kernel, and not where pytest imports all there is
    make_studies_small()
