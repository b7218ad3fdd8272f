"""Recipes are whole configurations of registered tasks."""

from __future__ import annotations

import math

import pytest

from loopinterp.models import LoopedTransformer
from loopinterp.training import RECIPES, Trainer


def test_the_recipes_that_are_promised_exist() -> None:
    assert set(RECIPES) == {"addition", "addition-quick", "parity", "prefix_sum"}


@pytest.mark.parametrize("name", ["addition", "addition-quick", "parity", "prefix_sum"])
def test_a_recipe_trains(name: str) -> None:
    trainer = Trainer(RECIPES[name].replace(device="cpu"))
    first, second = trainer.step(), trainer.step()
    assert math.isfinite(first["loss"])
    assert (first["step"], second["step"]) == (1, 2)


def test_the_demo_model_is_of_the_size_that_was_asked_for() -> None:
    model = LoopedTransformer(RECIPES["addition"].model)
    n_weights = sum(p.numel() for p in model.parameters())
    assert 50_000 < n_weights < 53_000


def test_the_quick_recipe_is_the_addition_recipe_on_shorter_problems() -> None:
    whole, quick = RECIPES["addition"], RECIPES["addition-quick"]
    assert quick.model == whole.model
    assert quick.curriculum.max_n == 8 < whole.curriculum.max_n == 12
    assert quick.steps < whole.steps
