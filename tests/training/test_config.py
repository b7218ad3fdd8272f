"""Training configurations: round trips, and an error for every kind of wrong value."""

from __future__ import annotations

import json
from typing import Any

import pytest

from loopinterp.core.errors import ConfigError
from loopinterp.training import (
    RECIPES,
    CurriculumConfig,
    ObjectiveConfig,
    OptimiserConfig,
    TrainingConfig,
)

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
    ("changes", "message"),
    [
        ({"step": 5}, r"setting of TrainingConfig: .*Did you mean 'steps'\?"),
        ({"optimiser": {"learning_rate": 1e-3}}, "setting of optimiser: .*'learning_rate'"),
        ({"steps": 0}, "steps: expected an integer >= 1, got 0"),
        ({"steps": "many"}, "steps: expected an integer >= 1, got 'many'"),
        ({"steps": True}, "steps: expected an integer >= 1, got True"),
        ({"steps": 2.5}, "steps: expected an integer >= 1, got 2.5"),
        ({"ema": 1.0}, r"ema: expected a number >= 0 and < 1, got 1.0"),
        ({"task": "additon"}, "Did you mean 'addition'"),
        ({"task": 3}, "task: expected text, got 3"),
        ({"task_settings": {"fromat": "pairs"}}, "Did you mean 'format'"),
        ({"distribution": "unifrom"}, "Did you mean 'uniform'"),
        ({"device": "gpu"}, "device: expected one of auto, cpu, cuda"),
        ({"precision": "fp16"}, "precision: expected one of bf16, fp32"),
        ({"offset_per_example": True}, "offset_per_example: expected false with model.positions"),
        ({"compile": "yes"}, "compile: expected true or false"),
        ({"threads": 0}, "threads: expected an integer in 1..256"),
        ({"state_noise": -0.1}, "state_noise: expected a number >= 0, got -0.1"),
        ({"optimiser": 3}, "optimiser: expected an object with named settings"),
        ({"optimiser": {"betas": [0.9]}}, "optimiser.betas: expected a list of 2"),
        ({"optimiser": {"lr": 0.0}}, "optimiser.lr: expected a number > 0"),
        ({"optimiser": {"lr": float("nan")}}, "optimiser.lr: expected a number > 0, got nan"),
        ({"optimiser": {"clip": 0.0}}, "optimiser.clip: expected a number > 0 or none"),
        ({"optimiser": {"schedule": "cosin"}}, "Did you mean 'cosine'"),
        ({"optimiser": {"schedule": "cosine", "decay": 0.5}}, "optimiser.decay"),
        ({"curriculum": {"max_n": 3, "start_n": 4}}, "min_n <= start_n <= max_n"),
        ({"curriculum": {"max_n": 3, "interval": 4}}, "no interval with kind=accuracy"),
        (
            {"curriculum": {"kind": "none", "max_n": 3, "min_n": 4}},
            "min_n: expected at most max_n=3",
        ),
        ({"curriculum": {"threshold": 1.0}}, "curriculum.threshold"),
        ({"objective": {"kind": "first"}}, "objective.kind"),
        ({"objective": {"kind": "last", "alpha": 0.2}}, "no alpha with kind=last"),
        ({"objective": {"kind": "step_dependent", "n_loops": 9}}, "objective.n_loops"),
        ({"objective": {"kind": "last", "hold_loops": 2}}, "no hold_loops with kind=last"),
        ({"objective": {"hold_share": 0.5}}, "no hold_share with hold_loops=0"),
        ({"objective": {"kind": "last", "n_loops": 4, "extra_loops": 1}}, "no extra_loops with"),
        ({"objective": {"kind": "last", "n_loops": 4, "loop_scale": 2.0}}, "no loop_scale with"),
        ({"objective": {"extra_loops": 11}}, r"extra_loops: expected an integer in -10..10"),
        ({"objective": {"loop_scale": 0.0}}, "objective.loop_scale"),
        ({"objective": {"least_loops": 2}}, "no least_loops with kind=step_dependent"),
        ({"objective": {"kind": "drawn"}}, "n_loops: expected at least least_loops=1"),
        ({"objective": {"kind": "drawn", "n_loops": 3, "least_loops": 4}}, "least_loops=4"),
        ({"objective": {"kind": "every", "weights": [1.0]}}, "give one weight for each loop"),
        ({"objective": {"kind": "every", "n_loops": 2, "weights": [0.0, 0.0]}}, "not all 0"),
    ],
)
def test_wrong_values_are_named(
    tiny: TrainingConfig, changes: dict[str, Any], message: str
) -> None:
    with (
        pytest.raises(ConfigError, match=message)
        if "task" not in changes
        else pytest.raises(ValueError, match=message)
    ):
        changed(tiny, **changes)


def test_model_has_to_fit_the_task(tiny: TrainingConfig) -> None:
    with pytest.raises(ConfigError, match=r"model\.d_vocab_out: expected 2, as task 'addition'"):
        changed(tiny, model={**tiny.model.to_dict(), "d_vocab_out": 3})
    with pytest.raises(ConfigError, match=r"model\.d_vocab: expected None"):
        changed(tiny, task_settings={"format": "features"})


def test_wrong_model_settings_are_named_from_the_root(tiny: TrainingConfig) -> None:
    with pytest.raises(ConfigError, match=r"model\.n_heads: expected a divisor of d_model=8"):
        changed(tiny, model={**tiny.model.to_dict(), "n_heads": 3})


def test_missing_settings_are_named() -> None:
    message = "model: expected an object with named settings, got nothing"
    with pytest.raises(ConfigError, match=message):
        TrainingConfig.from_dict({"task": "addition"})


def test_a_list_is_no_configuration() -> None:
    with pytest.raises(ConfigError, match="expected an object with named settings"):
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
    with pytest.raises(ConfigError, match="compile: expected false"):
        changed(tiny, model=abacus, compile=True)
