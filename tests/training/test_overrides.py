"""``--set key=value``."""

from __future__ import annotations

from typing import Any

import pytest

from loopinterp.errors import ConfigError
from loopinterp.training import RECIPES, TrainingConfig, apply_settings
from loopinterp.training.overrides import parse_value


def test_nested_settings_are_set_and_typed(tiny: TrainingConfig) -> None:
    config = apply_settings(
        tiny,
        [
            "optimiser.lr=3e-4",
            "optimiser.betas=[0.9, 0.95]",
            "optimiser.clip=none",
            "compile=true",
            "model.d_model=16",
            "objective.kind=progressive",
            "objective.alpha=1",
            "task_settings.format=pairs",
            "distribution = uniform",
        ],
    )
    assert config.optimiser.lr == 3e-4
    assert config.optimiser.betas == (0.9, 0.95)
    assert config.optimiser.clip is None
    assert config.compile is True
    assert config.model.d_model == 16
    assert (config.objective.kind, config.objective.alpha) == ("progressive", 1.0)
    assert config.task_settings == {"format": "pairs"}
    assert config.distribution == "uniform"


def test_nothing_set_changes_nothing(tiny: TrainingConfig) -> None:
    assert apply_settings(tiny, []) == tiny


def test_none_is_a_value_where_it_is_a_choice(tiny: TrainingConfig) -> None:
    changes = ["model.positions=none", "model.relative_window=none", "curriculum.kind=none"]
    config = apply_settings(tiny, [*changes, "curriculum.interval=500"])
    assert (config.model.positions, config.curriculum.kind) == ("none", "none")
    assert config.model.relative_window is None


def test_settings_that_need_each_other_may_come_in_any_order(tiny: TrainingConfig) -> None:
    both = ["curriculum.max_n=9", "curriculum.start_n=7"]
    assert apply_settings(tiny, both) == apply_settings(tiny, both[::-1])


def test_the_recipe_is_left_as_it_was() -> None:
    before = RECIPES["addition"].to_dict()
    apply_settings(RECIPES["addition"], ["task_settings.format=pairs", "seed=5"])
    assert RECIPES["addition"].to_dict() == before


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("steps", "expected key=value"),
        ("=5", "expected key=value"),
        ("lr=1e-3", r"Did you mean optimiser\.lr\?"),
        ("kind=last", r"curriculum\.kind or .*objective\.kind|objective\.kind or .*curriculum"),
        ("stepz=5", "Did you mean 'steps'"),
        ("optimiser.lrr=5", "Did you mean 'optimiser.lr'"),
        ("optimiser=5", "setting"),
        ("steps=five", "steps: expected an integer >= 1, got 'five'"),
        ("steps=none", "steps: expected an integer >= 1, got None"),
        ("model.positions=null", "model.positions: expected one of none, absolute, .*, got None"),
        ("task_settings.fromat=pairs", "Did you mean 'format'"),
    ],
)
def test_wrong_settings_are_explained(tiny: TrainingConfig, setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        apply_settings(tiny, [setting])


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", 1), ("1.5", 1.5), ("True", True), ("None", None), (" a b ", "a b"), ('"1"', "1")],
)
def test_values_are_read_as_json_first(text: str, value: Any) -> None:
    assert parse_value(text) == value


@pytest.mark.parametrize("value", ["1" * 5000, "[" * 200_000], ids=["digits", "brackets"])
def test_what_python_cannot_parse_is_text_and_refused_as_such(
    tiny: TrainingConfig, value: str
) -> None:
    with pytest.raises(ConfigError, match="seed: expected an integer"):
        apply_settings(tiny, [f"seed={value}"])
