"""The dearest studies in small, for tests of what is made with them: pages, scripts, notebooks,
whole analyses. Their own sizes are tried in the tests of their rooms."""

from __future__ import annotations

import functools
import inspect
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BEFORE_SCRIPTS = f"""\
import sys
sys.path.insert(0, {str(Path(__file__).resolve().parent.parent)!r})
from tests.small_studies import make_studies_small
make_studies_small()
del sys.path[0]
"""
"""What comes before pages, scripts and notebooks that run with small studies."""


def decompile_little(patch: pytest.MonkeyPatch, *, draws: int = 300) -> None:
    """Few contexts, inputs and ``draws`` of interchanges decide on a program; lengths stay."""
    from loopinterp import decompiler
    from loopinterp.decompiler import decompilation

    little = {"contexts": 6, "tries": 2, "examples": 8, "tolerances": (0.0, 0.05)}
    _by_default(patch, decompiler.decompile, **little)
    held_out = decompilation.held_out
    patch.setattr(decompilation, "held_out", lambda r, p, _, seeds: held_out(r, p, draws, seeds))


def fit_little(patch: pytest.MonkeyPatch) -> None:
    """A tuned lens that a study fits itself is fitted in a tenth of the steps."""
    from loopinterp import lenses

    _by_default(patch, lenses.fit_tuned_lens, steps=20)


def name_on_few_pairs(
    patch: pytest.MonkeyPatch, module: ModuleType, pairs: int, *, same_value: int = 64
) -> None:
    """A program is named on some of the usual pairs."""
    from loopinterp.comparison import SpreadPairs

    fewer = SpreadPairs(pairs=pairs, same_value=same_value, repeated=0.5)
    patch.setattr(module, "TO_IDENTIFY", fewer)


def make_studies_small(patch: pytest.MonkeyPatch | None = None) -> None:
    """Sizes that a caller passes stay, but for those that are cut to a limit here."""
    from loopinterp import (
        benchmark,
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

    patch = patch or pytest.MonkeyPatch()

    def at_most(room: Any, name: str, **sizes: int) -> None:
        def smaller(study: Any, *arguments: Any, **options: Any) -> Any:
            small = {one: min(options.get(one, most), most) for one, most in sizes.items()}
            return study(*arguments, **options | small)

        assert sizes.keys() <= inspect.signature(getattr(room, name)).parameters.keys()
        _instead(patch, room, name, smaller)

    at_most(features, "train_autoencoder", steps=20)
    at_most(training, "evaluate", n_samples=20)
    at_most(probing, "carry_study", n=14, n_train=16, n_test=16)
    at_most(dynamics, "basin_map", points=5)
    at_most(dynamics, "reachability_study", n_loops=40, n_draws=1)
    at_most(dynamics, "input_dependence_study", n_loops=50)
    at_most(dynamics, "geometry_study", n_loops=24)
    at_most(programs, "equivalence", interventions=512, exhaustive_to=3)
    at_most(decompiler, "decompile", n_exchanges=200)

    def of_three_digits(study: Any, *arguments: Any, **options: Any) -> Any:
        small = {"n": 3, "lengths": [3, 4], "n_exchanges": 100}
        return study(*arguments, **options | small)

    def of_few_inputs(study: Any, model: Any, programs: Any, data: Any, **options: Any) -> Any:
        data = [batch[:64] for batch in data[:2]] if isinstance(data, list) else data
        programs = [*programs[3:7], programs[-1]] if len(programs) > 8 else programs  # of addition
        return study(model, programs, data, **options)

    def of_eight(study: Any, model: Any, base: Any, source: Any, **options: Any) -> Any:
        small: dict[str, Any] = {"n_steps": 2, "curve_points": 2}
        return study(model, base[:8], source[:8], **options | small)

    def of_few_pairs(study: Any, *arguments: Any, **options: Any) -> Any:
        return study(*arguments, **{"ranks": (1, 2)} | options | {"pairs": 32})

    def of_few(study: Any, model: Any, data: Any, *arguments: Any, **options: Any) -> Any:
        return study(model, data[:24], *arguments, **options)

    def of_few_models(study: Any, programs: Any, **options: Any) -> Any:
        small = {"disguises": options.get("disguises", ())[:1], "examples": 32}
        programs = programs[:1] if len(programs) > 2 else programs
        return study(programs, **options | small | {"n": min(options.get("n", 4), 4)})

    def of_one_direction(study: Any, *arguments: Any, **options: Any) -> Any:
        small = {"ranks": (1,), "steps": 2, "pairs": SpreadPairs(pairs=64)}
        return study(*arguments, **options | small)

    _instead(patch, decompiler, "decompilation_study", of_three_digits)
    _instead(patch, comparison, "compare_programs", of_few_inputs)
    _instead(patch, comparison, "decodability", of_few)
    _instead(patch, comparison, "reduction_study", of_few_pairs)
    _instead(patch, comparison, "search_subspaces", of_one_direction)
    _instead(patch, edges, "edge_study", of_eight)
    _instead(patch, benchmark, "known_models", of_few_models)
    _by_default(patch, SpreadPairs.__init__, pairs=128)
    name_on_few_pairs(patch, program_comparison, 512)
    decompile_little(patch, draws=1000)  # fewer name no program
    _by_default(patch, decompiler.decompile, n=4, lengths=(4, 5), n_exchanges=200)
    spaces = {"k": 2, "growth_loops": 2, "lyapunov_loops": 8, "max_vectors": 8, "max_products": 24}
    _by_default(patch, dynamics.local_stability_study, **spaces)


def _by_default(patch: pytest.MonkeyPatch, function: Any, **small: Any) -> None:
    # Those of the innermost function hold however it is called, and by whom.
    defaults = inspect.unwrap(function).__kwdefaults__
    assert small.keys() <= defaults.keys()
    for size, value in small.items():
        patch.setitem(defaults, size, value)


def _instead(patch: pytest.MonkeyPatch, room: Any, name: str, smaller: Any) -> None:
    study = getattr(room, name)
    patch.setattr(room, name, functools.wraps(study)(functools.partial(smaller, study)))
