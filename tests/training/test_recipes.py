"""Recipes, and changing a configuration."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopinterp.core.errors import ConfigError, UnknownKeyError
from loopinterp.models import LoopedTransformer, LoopedTransformerConfig
from loopinterp.tasks import Addition, list_tasks
from loopinterp.training import (
    RECIPES,
    CurriculumConfig,
    Measurement,
    ObjectiveConfig,
    Recipe,
    Trainer,
    TrainingConfig,
    apply_settings,
    get_recipe,
    list_recipes,
    recipes,
)
from loopinterp.training.recipes import parse_value
from tests.refusals import naming

FOLDER = Path(recipes.__file__).with_suffix("")
FILES = sorted(FOLDER.glob("*.json"))
MEASURED: dict[str, Any] = {
    "seeds": [0, 1],
    "samples": 10,
    "exact_match": {
        "propagate": {"12": [1.0, 1.0], "24": [1.0, 1.0]},
        "uniform": {"12": [1.0, 0.8], "24": [0.5, 0.7]},
        "chain": {"12": [1.0, None], "24": [0.9, None]},
    },
    "minutes": 1.0,
    "on": "paper",
}


def _as_code() -> dict[str, TrainingConfig]:
    """The recipes as they were written before they were files."""
    window = LoopedTransformerConfig(
        d_model=64,
        n_heads=4,
        d_vocab=6,
        d_vocab_out=2,
        positions="relative",
        relative_window=1,
        attention_window=1,
        norm="pre",
        loop_norm=True,
        injection="input",
        initial_state="zeros",
        final_norm=True,
    )
    addition = TrainingConfig(
        task="addition",
        model=window,
        distribution="propagate",
        objective=ObjectiveConfig(kind="step_dependent", hold_loops=12),
        curriculum=CurriculumConfig(max_n=12),
        state_noise=0.3,
        steps=800,
    )
    everywhere = {"positions": "none", "relative_window": None, "attention_window": None}
    return {
        "addition": addition,
        "addition-quick": addition.replace(curriculum=CurriculumConfig(max_n=8), steps=500),
        "parity-no-window": TrainingConfig(
            task="parity",
            model=window.replace(d_vocab=5, d_vocab_out=3, **everywhere),
            distribution="uniform",
            objective=ObjectiveConfig(kind="step_dependent"),
            curriculum=CurriculumConfig(max_n=20),
            steps=1600,
        ),
    }


@pytest.mark.parametrize("name", sorted(_as_code()))
def test_a_recipe_is_what_it_was_as_code(name: str) -> None:
    assert RECIPES[name].to_dict() == _as_code()[name].to_dict()


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_file_holds_a_whole_recipe_and_says_nothing_twice(file: Path) -> None:
    document = json.loads(file.read_text())
    assert document.keys() == {"about", "config", "measured", "tried"}
    recipe = get_recipe(file.stem)
    assert recipe.config.task in list_tasks()
    assert recipe.config.to_dict(defaults=False) == document["config"]
    assert recipe.measured.to_dict() == document["measured"] | {
        "minutes": float(document["measured"]["minutes"])
    }
    # A recipe is for any machine.
    assert recipe.config.device == "auto"
    if file.stem in list_tasks():
        assert file.stem == recipe.config.task
        # Name it otherwise, so that `train --task` does not take it.
        assert recipe.generalises


@pytest.mark.parametrize("name", list_recipes())
def test_a_recipe_trains(name: str) -> None:
    trainer = Trainer(RECIPES[name].replace(device="cpu"))
    first, second = trainer.step(), trainer.step()
    assert math.isfinite(first["loss"])
    assert (first["step"], second["step"]) == (1, 2)


def test_the_demo_model_is_of_the_size_that_was_asked_for() -> None:
    model = LoopedTransformer(RECIPES["addition"].model)
    n_weights = sum(p.numel() for p in model.parameters())
    assert 50_000 < n_weights < 53_000


def test_the_mapping_of_configurations_is_that_of_the_files() -> None:
    assert list(RECIPES) == sorted(file.stem for file in FILES)
    assert len(RECIPES) == len(FILES)
    assert "addition" in RECIPES and "nothing" not in RECIPES
    assert RECIPES.get("nothing") is None
    with naming("recipe", UnknownKeyError) as caught:
        RECIPES["adition"]
    assert isinstance(caught.value, KeyError) and "'addition'" in caught.value.fix
    with naming("recipe"):
        get_recipe("additon")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Another folder of recipes."""
    monkeypatch.setattr(recipes, "_FOLDER", tmp_path)
    for cached in (get_recipe, list_recipes):
        cached.cache_clear()
    yield tmp_path
    for cached in (get_recipe, list_recipes):
        cached.cache_clear()


def test_to_add_a_recipe_is_to_add_a_file(folder: Path) -> None:
    config = _as_code()["addition"].replace(steps=7)
    document = {"about": "New.", "config": config.to_dict(defaults=False), "measured": MEASURED}
    (folder / "new.json").write_text(json.dumps(document))
    assert list_recipes() == ("new",)
    assert RECIPES["new"] == config
    assert get_recipe("new").tried == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seeds": []}, "exact_match: expected shares of one seed at least"),
        ({"exact_match": {}}, "exact_match: expected shares"),
        ({"exact_match": {"uniform": {}}}, "exact_match: expected shares"),
        ({"exact_match": {"uniform": {"12": [1.0]}}}, "uniform.12: expected one share for each"),
        (
            {"exact_match": {"uniform": {"12": [1.0, 1.1]}}},
            r"uniform\.12: expected a list, each a number in 0\.\.1 or none, got 1\.1",
        ),
        ({"exact_match": {"uniform": {"12": [None, None]}}}, "uniform.12: expected one share for"),
        ({"exact_match": {"uniform": {"12": [1.0, 1.0]}}}, "got none of propagate, chain"),
        (
            {"exact_match": {d: {"24": [1.0, 1.0]} for d in Addition.distributions}},
            "the training cutoff, 12, among",
        ),
        ({"exact_match": {"unifrom": {"12": [1.0, 1.0]}}}, "Did you mean 'uniform'"),
        ({"minutes": 0}, "minutes: expected a number > 0"),
        ({"on": ""}, "on: expected text"),
    ],
)
def test_what_was_not_measured_is_refused(change: dict[str, Any], message: str) -> None:
    values = {"about": "A.", "config": _as_code()["addition"].to_dict()}
    with pytest.raises(ConfigError, match=message):
        Recipe.from_dict({**values, "measured": MEASURED | change})
    with pytest.raises(ConfigError, match="measured: expected"):
        Recipe.from_dict(values)


def test_a_recipe_is_worth_its_lowest_distribution_and_a_seed_may_be_unmeasured_there() -> None:
    measured = Measurement.from_dict(MEASURED)
    assert measured.worst() == {12: 0.9, 24: pytest.approx(0.6)}
    assert measured.lowest(12).distributions == ("uniform",)
    # One seed, so no error.
    assert measured.mean("chain", 24)[::2] == (0.9, 1)
    only = measured.replace(exact_match={**measured.exact_match, "chain": {12: (None, 0.25)}})
    assert only.worst() == {12: 0.25} and only.lowest(12).distributions == ("chain",)
    assert only.reach() == (0, 12)
    shares = {"uniform": {12: (1.0,), 24: (1.0,), 96: (0.5,)}, "chain": {12: (1.0,), 24: (1.0,)}}
    part = measured.replace(seeds=(0,), exact_match=shares)
    # That others were not measured there hides no failure.
    assert part.reach() == (24, 96)
    assert not get_recipe("multiplication-two-bits").generalises
    assert get_recipe("multiplication-two-bits").measured.lowest(12).distributions == ("mixed",)


@given(st.lists(st.lists(st.floats(0, 1), min_size=4, max_size=4), min_size=1, max_size=4))
def test_the_worst_is_the_least_mean_over_seeds(shares: list[list[float]]) -> None:
    n_seeds = len(shares[0]) // 2
    by_distribution = {
        f"d{k}": {12: tuple(row[:n_seeds]), 24: tuple(row[n_seeds:]), 100 + k: (0.0,) * n_seeds}
        for k, row in enumerate(shares)
    }
    seeds = tuple(range(n_seeds))
    measured = Measurement(
        seeds=seeds, samples=1, exact_match=by_distribution, minutes=1.0, on="paper"
    )
    means = np.array(shares).reshape(len(shares), 2, n_seeds).mean(-1).min(0)
    worst = measured.worst()
    assert [worst[12], worst[24]] == pytest.approx(means.tolist())
    assert len(worst) == 2 + (len(shares) == 1)


@pytest.mark.parametrize(
    ("shares", "far"),
    [
        ({12: 1.0, 18: 0.9}, True),
        ({12: 1.0, 18: 0.89}, False),
        ({12: 1.0, 17: 1.0}, False),
        ({12: 0.5, 96: 0.95}, True),
    ],
)
def test_a_recipe_generalises_if_it_holds_at_one_and_a_half_times(
    shares: dict[int, float], far: bool
) -> None:
    right = dict.fromkeys(shares, (1.0,))
    exact = {"propagate": right, "uniform": right}
    exact["chain"] = {n: (share,) for n, share in shares.items()}
    measured = get_recipe("addition").measured.replace(seeds=(0,), exact_match=exact)
    assert get_recipe("addition").replace(measured=measured).generalises is far


def test_a_recipe_generalises_if_its_seeds_do_on_the_whole() -> None:
    recipe = get_recipe("addition")
    for shares, most in (((1.0, 0.75, 1.0), True), ((1.0, 0.2, 1.0), False)):
        by_distribution = {"uniform": {12: (1.0,) * 3, 18: shares}}
        right = {12: (1.0,) * 3, 18: (1.0,) * 3}
        by_distribution |= {"propagate": right, "chain": right}
        measured = recipe.measured.replace(seeds=(0, 1, 2), exact_match=by_distribution)
        assert recipe.replace(measured=measured).generalises is most


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
    with naming("seed", ConfigError):
        apply_settings(tiny, [f"seed={value}"])
