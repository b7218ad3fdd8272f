"""Training configurations: round trips, and an error for every kind of wrong value."""

from __future__ import annotations

import json
from typing import Any

import pytest

from loopinterp.core.errors import ConfigError, InputError
from loopinterp.training import (
    RECIPES,
    CurriculumConfig,
    ObjectiveConfig,
    OptimiserConfig,
    TrainingConfig,
)
from tests.refusals import naming

pytestmark = pytest.mark.usefixtures("no_type_checks")


def changed(config: TrainingConfig, **changes: Any) -> TrainingConfig:
    return TrainingConfig.from_dict({**config.to_dict(), **changes})


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_recipes_go_through_json_and_back(name: str) -> None:
    config = RECIPES[name]
    assert TrainingConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_whole_numbers_stand_for_floats(tiny: TrainingConfig) -> None:
    config = changed(tiny, ema=0, optimiser={"lr": 1, "clip": 2})
    assert (config.ema, config.optimiser.lr, config.optimiser.clip) == (0.0, 1.0, 2.0)
    assert isinstance(config.optimiser.lr, float)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"step": 5}, "setting of TrainingConfig"),
        ({"optimiser": {"learning_rate": 1e-3}}, "setting of optimiser"),
        ({"steps": 0}, "steps"),
        ({"steps": "many"}, "steps"),
        ({"steps": True}, "steps"),
        ({"steps": 2.5}, "steps"),
        ({"ema": 1.0}, "ema"),
        ({"task": "additon"}, "task"),
        ({"task": 3}, "task"),
        ({"task_settings": {"fromat": "pairs"}}, "setting of task addition"),
        ({"distribution": "unifrom"}, "distribution"),
        ({"device": "gpu"}, "device"),
        ({"precision": "fp16"}, "precision"),
        ({"offset_per_example": True}, "offset_per_example"),
        ({"compile": "yes"}, "compile"),
        ({"threads": 0}, "threads"),
        ({"state_noise": -0.1}, "state_noise"),
        ({"optimiser": 3}, "optimiser"),
        ({"optimiser": {"betas": [0.9]}}, "optimiser.betas"),
        ({"optimiser": {"lr": 0.0}}, "optimiser.lr"),
        ({"optimiser": {"lr": float("nan")}}, "optimiser.lr"),
        ({"optimiser": {"clip": 0.0}}, "optimiser.clip"),
        ({"optimiser": {"schedule": "cosin"}}, "optimiser.schedule"),
        ({"optimiser": {"schedule": "cosine", "decay": 0.5}}, "optimiser.decay"),
        ({"curriculum": {"max_n": 3, "start_n": 4}}, "curriculum.start_n"),
        ({"curriculum": {"max_n": 3, "interval": 4}}, "curriculum.interval"),
        ({"curriculum": {"kind": "none", "max_n": 3, "min_n": 4}}, "curriculum.min_n"),
        ({"curriculum": {"threshold": 1.0}}, "curriculum.threshold"),
        ({"objective": {"kind": "first"}}, "objective.kind"),
        ({"objective": {"kind": "last", "alpha": 0.2}}, "objective.alpha"),
        ({"objective": {"kind": "step_dependent", "n_loops": 9}}, "objective.n_loops"),
        ({"objective": {"kind": "last", "hold_loops": 2}}, "objective.hold_loops"),
        ({"objective": {"hold_share": 0.5}}, "objective.hold_share"),
        ({"objective": {"kind": "last", "n_loops": 4, "extra_loops": 1}}, "objective.extra_loops"),
        ({"objective": {"kind": "last", "n_loops": 4, "loop_scale": 2.0}}, "objective.loop_scale"),
        ({"objective": {"extra_loops": 11}}, "objective.extra_loops"),
        ({"objective": {"loop_scale": 0.0}}, "objective.loop_scale"),
        ({"objective": {"least_loops": 2}}, "objective.least_loops"),
        ({"objective": {"kind": "drawn"}}, "objective.n_loops"),
        ({"objective": {"kind": "drawn", "n_loops": 3, "least_loops": 4}}, "objective.n_loops"),
        ({"objective": {"kind": "every", "weights": [1.0]}}, "objective.weights"),
        (
            {"objective": {"kind": "every", "n_loops": 2, "weights": [0.0, 0.0]}},
            "objective.weights",
        ),
    ],
)
def test_wrong_values_are_named(tiny: TrainingConfig, changes: dict[str, Any], what: str) -> None:
    with naming(what, InputError if "task" in changes else ConfigError):
        changed(tiny, **changes)


def test_model_has_to_fit_the_task(tiny: TrainingConfig) -> None:
    with naming("model.d_vocab_out", ConfigError):
        changed(tiny, model={**tiny.model.to_dict(), "d_vocab_out": 3})
    with naming("model.d_vocab", ConfigError):
        changed(tiny, task_settings={"format": "features"})


def test_wrong_model_settings_are_named_from_the_root(tiny: TrainingConfig) -> None:
    with naming("model.n_heads", ConfigError):
        changed(tiny, model={**tiny.model.to_dict(), "n_heads": 3})


def test_missing_settings_are_named() -> None:
    with naming("model", ConfigError):
        TrainingConfig.from_dict({"task": "addition"})


def test_a_list_is_no_configuration() -> None:
    with naming("TrainingConfig", ConfigError):
        TrainingConfig.from_dict([])  # type: ignore[arg-type]


def test_direct_construction_is_checked_as_well() -> None:
    with pytest.raises(ConfigError, match="kind"):
        ObjectiveConfig(kind="first")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="kind"):
        CurriculumConfig(kind="none at all")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="schedule"):
        OptimiserConfig(schedule="steps")  # type: ignore[arg-type]


def test_compile_refuses_positions_that_the_step_alone_cannot_see(tiny: TrainingConfig) -> None:
    abacus = {
        **tiny.model.to_dict(),
        "positions": "abacus",
        "relative_window": None,
        "abacus_target": "qk",
        "digit_tokens": [0, 1, 2, 3],
        "n_ctx": 120,
    }
    assert changed(tiny, model=abacus).model.positions == "abacus"
    with naming("compile", ConfigError):
        changed(tiny, model=abacus, compile=True)
    windowed = abacus | {"abacus_target": "input", "abacus_window": 3}
    with naming("compile", ConfigError):
        changed(tiny, model=windowed, compile=True)
