"""Every study takes (model, data, *, options), draws from a task, and says what it cannot take."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from loopinterp import (
    benchmark,
    comparison,
    decompiler,
    dynamics,
    edges,
    features,
    interventions,
    lenses,
    pages,
    probing,
    training,
)
from loopinterp.core.errors import InputError
from loopinterp.core.results import Result, registered_kinds
from loopinterp.models import LoopedTransformer, LoopedTransformerConfig, LoopRule
from loopinterp.tasks import Addition, Batch, as_batch
from loopinterp.tasks.sampling import as_batches
from tests.prose import clauses

ROOMS = (
    dynamics,
    pages,
    lenses,
    probing,
    interventions,
    comparison,
    decompiler,
    edges,
    features,
    benchmark,
    training,
)
PROGRAMS = ["ripple", "lookahead"]

STUDIES: dict[str, Callable[[Any, Any], Any]] = {
    "convergence_study": lambda m, d: dynamics.convergence_study(
        m, d, limit_steps=40, n_spectral=0
    ),
    "extrapolation_study": lambda m, d: dynamics.extrapolation_study(m, d, n_loops=20),
    "geometry_study": lambda m, d: dynamics.geometry_study(m, d, limit_steps=10),
    "reachability_study": lambda m, d: dynamics.reachability_study(
        m, d, n_loops=20, kicks=(0.01, 1.0), n_noise=1, n_others=1, n_draws=1
    ),
    "basin_map": lambda m, d: dynamics.basin_map(m, d, n_loops=20, points=3),
    "input_dependence_study": lambda m, d: dynamics.input_dependence_study(
        m, d, n_loops=20, n_sensitivity=1, n_probes=1
    ),
    "local_stability_study": lambda m, d: dynamics.local_stability_study(
        m, d, k=1, growth_loops=2, lyapunov_loops=8
    ),
    "attention_stabilisation_study": dynamics.attention_stabilisation_study,
    "attention_study": lenses.attention_study,
    "explore": pages.explore,
    "lens_study": lenses.lens_study,
    "exit_study": lenses.exit_study,
    "probe_study": lambda m, d: probing.probe_study(m, d, {"carry": Addition().carries}),
    "head_study": lambda m, d: comparison.head_study(m, d, PROGRAMS),
    "injected_carry_study": lambda m, d: comparison.injected_carry_study(m, d),
    "compare_programs": lambda m, d: comparison.compare_programs(m, PROGRAMS, d),
    "search_subspaces": lambda m, d: comparison.search_subspaces(
        m, d, "ripple", ranks=(1,), steps=1, pairs=comparison.SpreadPairs(pairs=64, same_value=0)
    ),
    "reduction_study": lambda m, d: comparison.reduction_study(m, d, ranks=(1, 2), pairs=16),
    "decodability": lambda m, d: comparison.decodability(m, d, PROGRAMS),
    "interchange_study": lambda m, d: comparison.interchange_study(
        m, d, "ripple", pairs_per_loop=4
    ),
    "decompilation_study": lambda m, d: decompiler.decompilation_study(
        m, d, n=3, lengths=[3], n_exchanges=100
    ),
    "ablation_study": lambda m, d: interventions.ablation_study(
        m, d, kinds=("zero",), when=("all",)
    ),
    "patching_sweep": lambda m, d: interventions.patching_sweep(m, d, d, component="z"),
    "steering_sweep": lambda m, d: interventions.steering_sweep(
        m, d, torch.ones(_width_of(m)), strengths=(1.0,), n_draws=2
    ),
    "edge_study": lambda m, d: edges.edge_study(m, d, d),
    "feature_study": lambda m, d: features.feature_study(m, d, _dictionary(m)),
    "carry_study": lambda m, d: probing.carry_study(m, d, n=16, n_short=8),
    "evaluate": lambda m, d: training.evaluate(m, d, [3]),
}


def _width_of(model: Any) -> int:
    return getattr(getattr(model, "config", None), "d_model", 16)


def _dictionary(model: Any) -> features.SparseAutoencoder:
    config = features.AutoencoderConfig(d_in=_width_of(model), n_features=8)
    device = getattr(model, "device", None)
    device = device if isinstance(device, torch.device) else "cpu"
    return features.SparseAutoencoder(config).to(device)


NOT_OF_A_MODEL = {"ground_truth_study", "false_names_study"}
NOT_OF_A_MODEL |= {"summarise_seeds", "run_sweep"}
OF_OTHER_TASKS = {"operand_grid"}  # which draw operands of given lengths
OF_GIVEN_PAIRS = {"edge_study", "patching_sweep"}
OF_A_TASK = {"carry_study", "decompilation_study", "evaluate"}
OF_ONE_LOOP = {"attention_study", "evaluate", "probe_study", "explore"} | OF_GIVEN_PAIRS
OF_ONE_LOOP |= {"ablation_study", "steering_sweep", "feature_study"}
OF_INPUTS_ALONE = {"attention_study", "exit_study", "explore", "lens_study", "probe_study"}
OF_INPUTS_ALONE |= {"steering_sweep", "feature_study"}
OF_INPUTS_ALONE |= OF_GIVEN_PAIRS


@cache
def _model() -> LoopedTransformer:
    config = LoopedTransformerConfig(d_model=16, n_heads=2, d_vocab=6, d_vocab_out=2)
    return LoopedTransformer(config).eval()


def _batch() -> Batch:
    return as_batch(Addition(), n=4, batch_size=8)


def _wrong_models() -> dict[str, Any]:
    run = training.Run(Path("runs/a"), training.RECIPES["addition"])
    return {
        "run": (run, r"Pass its \.model\(\)"),
        "path": ("runs/a", r"loopinterp\.load\('runs/a'\)"),
        "class": (LoopedTransformer, "the class LoopedTransformer itself"),
        "batch": (_batch(), "Batch"),
        "none": (None, "NoneType"),
    }


WRONG_DATA: dict[str, Any] = {
    "string": "addition",
    "class": Addition,
    "none": None,
    "model": "the model",
    "task": Addition(),
    "tensor": torch.zeros(2, 3, dtype=torch.int64),
}


def test_every_study_of_a_model_is_tried_here() -> None:
    results = {c.__name__ for c in _results()}
    doors = {
        name
        for room in ROOMS
        for name in room.__all__
        if inspect.isfunction(study := getattr(room, name))
        if _name(inspect.signature(study).return_annotation) in results
        if name != "match_heads"  # of patterns, not of a model
    }
    assert doors == STUDIES.keys() | NOT_OF_A_MODEL | OF_OTHER_TASKS


def _name(annotation: Any) -> str:
    """Of a class, or as it is written: a type check has looked up what it reads."""
    return getattr(annotation, "__name__", str(annotation))


def _results() -> list[type[Result]]:
    exported = (getattr(room, name) for room in ROOMS for name in room.__all__)
    return [x for x in exported if inspect.isclass(x) and issubclass(x, Result)]


def test_every_result_is_read_back_by_its_kind() -> None:
    modules = {cls.kind: cls.__module__ for cls in _results() if cls.kind}
    registered = {kind: entry.module for kind, entry in registered_kinds().items()}
    assert modules and modules.items() <= registered.items()


def _signature(name: str) -> inspect.Signature:
    return inspect.signature(next(getattr(room, name) for room in ROOMS if name in room.__all__))


@pytest.mark.parametrize("name", sorted(STUDIES.keys() - {"compare_programs"} - OF_GIVEN_PAIRS))
def test_the_model_comes_first_then_the_data_then_options_by_name(name: str) -> None:
    parameters = list(_signature(name).parameters.values())
    assert parameters[0].name in ("model", "models")
    assert parameters[1].name == ("task" if name in OF_A_TASK else "data")
    named = [p.kind is inspect.Parameter.KEYWORD_ONLY for p in parameters]
    assert sum(not by_name for by_name in named) <= 3 and named == sorted(named)
    if name not in OF_A_TASK:
        assert {"n", "batch_size", "seed"} <= {p.name for p in parameters}


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize("kind", sorted(_wrong_models()))
@pytest.mark.parametrize("name", sorted(STUDIES))
def test_what_is_no_model_is_refused_with_the_fix(name: str, kind: str) -> None:
    wrong, message = _wrong_models()[kind]
    data = Addition() if name in OF_A_TASK else _batch()
    with pytest.raises(InputError, match=message) as error:
        STUDIES[name](wrong, data)
    assert error.value.what == "model"


@pytest.mark.parametrize("name", sorted(STUDIES))
def test_a_model_of_other_tokens_is_refused(name: str) -> None:
    config = LoopedTransformerConfig(d_model=16, n_heads=2, d_vocab=16, d_vocab_out=16)
    data = Addition() if name in OF_A_TASK else _batch()
    with pytest.raises(InputError) as caught:
        STUDIES[name](LoopedTransformer(config), data)
    assert caught.value.what == "model" and "'addition'" in caught.value.expected
    assert "d_vocab=16" in caught.value.given


@pytest.mark.parametrize("name", sorted(STUDIES))
def test_a_model_of_one_loop_is_asked_nothing_of_others(name: str) -> None:
    config = LoopedTransformerConfig(d_model=16, n_heads=2, d_vocab=6, d_vocab_out=2)
    model = LoopedTransformer(config)
    model.loop_rule = LoopRule(1)
    data = Addition() if name in OF_A_TASK else _batch()
    if name not in OF_ONE_LOOP and name != "extrapolation_study":  # which is told the loops above
        with pytest.raises(InputError) as caught:
            STUDIES[name](model, data)
        assert (caught.value.what, caught.value.expected) == ("model", "one that loops")
        return
    if name == "patching_sweep":
        assert isinstance(data, Batch)
        other = as_batch(Addition(), n=4, batch_size=8, seed=1)
        assert interventions.patching_sweep(model, data, other).data.sizes["loop"] == 1
    elif name == "ablation_study":
        assert STUDIES[name](model, data).spans == [[0, 0]]
    elif name == "edge_study":
        assert isinstance(data, Batch)
        other = as_batch(Addition(), n=4, batch_size=8, seed=1)
        result = edges.edge_study(model, data, other, methods=["eap"], curve_points=1)
        assert result.n_loops == 1
    elif name == "evaluate":
        assert STUDIES[name](model, data).depth == 1
    elif name == "extrapolation_study":
        with pytest.raises(InputError) as caught:
            dynamics.extrapolation_study(model, data)
        assert (caught.value.what, caught.value.expected) == ("model", "one that loops")
        assert STUDIES[name](model, data).data["answer_loops"].values.tolist() == [1] * 8
    else:
        n_rows = STUDIES[name](model, data).data.sizes["loop"]
        assert n_rows == (2 if name == "explore" else 1)  # which begins with loop 0


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (name, kind)
        for name in sorted(STUDIES)
        for kind in sorted(WRONG_DATA)
        if not (kind == "tensor" and name in OF_INPUTS_ALONE)
        if not (kind == "task" and name not in OF_GIVEN_PAIRS)
    ],
)
def test_what_is_no_data_is_refused(name: str, kind: str) -> None:
    wrong = _model() if kind == "model" else WRONG_DATA[kind]
    with pytest.raises(InputError, match=r"(data|task|source): expected"):
        STUDIES[name](_model(), wrong)


@pytest.mark.parametrize("name", sorted(STUDIES.keys() - OF_A_TASK - OF_GIVEN_PAIRS))
def test_a_task_is_drawn_from_as_the_options_say(name: str) -> None:
    study = next(getattr(room, name) for room in ROOMS if name in room.__all__)
    sizes = {"injected_carry_study": (18, 32), "search_subspaces": (4, 64)}
    n, size = sizes.get(name, (4, 8))
    third: dict[str, Any] = {
        "probe_study": {"targets": {"carry": Addition().carries}},
        "head_study": {"programs": PROGRAMS},
        "compare_programs": {
            "programs": PROGRAMS,
            "pairs": comparison.SpreadPairs(pairs=32, same_value=0),
        },
        "search_subspaces": {
            "program": "ripple",
            "steps": 1,
            "ranks": [1],
            "pairs": comparison.SpreadPairs(pairs=32, same_value=0),
        },
        "decodability": {"programs": PROGRAMS},
        "interchange_study": {"program": "ripple", "pairs_per_loop": 2},
        "steering_sweep": {"direction": torch.ones(16), "strengths": [1.0], "n_draws": 2},
        "feature_study": {"shared": _dictionary(_model())},
        "convergence_study": {"n_spectral": 0, "limit_steps": 40},
        "geometry_study": {"n_loops": 12, "limit_steps": 5},
        "reachability_study": {"n_loops": 16, "n_noise": 1, "n_others": 1, "n_draws": 1},
        "basin_map": {"n_loops": 16, "points": 3},
        "input_dependence_study": {"n_loops": 16, "n_sensitivity": 1, "n_probes": 1},
        "reduction_study": {"ranks": [1], "pairs": 16},
        "ablation_study": {"kinds": ("zero",), "when": ("all",)},
        "local_stability_study": {"k": 1, "n_loops": 12, "growth_loops": 1, "lyapunov_loops": 8},
    }.get(name, {})
    models = {_first(name): _model()}
    drawn = study(**models, data=Addition(), **third, n=n, batch_size=size, seed=3)
    batch = as_batch(Addition(), n=n, batch_size=size, seed=3)
    from_batch = study(**models, data=batch, **third, seed=3)
    assert drawn.data.equals(from_batch.data)
    assert clauses(from_batch) == []  # results hold values and codes, and renderers make sentences


def _first(name: str) -> str:
    return next(iter(_signature(name).parameters))


def test_a_batch_is_taken_as_it_is_and_takes_no_length() -> None:
    batch = _batch()
    assert as_batch(batch) is batch
    with pytest.raises(InputError) as caught:
        as_batch(batch, n=4)
    assert (caught.value.what, caught.value.given) == ("n", "4")
    with pytest.raises(InputError) as caught:
        as_batches([batch], batch_size=4)
    assert (caught.value.what, caught.value.given) == ("batch_size", "4")


def test_several_lengths_are_drawn_one_batch_each() -> None:
    assert [int(b.n[0]) for b in as_batches(Addition(), n=[3, 5], batch_size=2)] == [3, 5]
    for data, n in (([], None), (Addition(), [])):
        with pytest.raises(InputError) as caught:
            as_batches(data, n=n)
        assert (caught.value.what, caught.value.given) == ("data", "an empty list")


def test_tasks_in_a_list_are_drawn_with_the_seed() -> None:
    single, (listed,) = as_batch(Addition(), seed=3), as_batches([Addition()], seed=3)
    assert torch.equal(single.inputs, listed.inputs)
