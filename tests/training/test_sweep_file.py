"""A sweep is a file: what it says, at each scale, and what is refused."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loopinterp.core.errors import CheckpointError, ConfigError, InputError
from loopinterp.core.settings import flatten_settings
from loopinterp.training import Sweep, SweepEvaluation, SweepScale, Trainer, apply_settings
from tests.refusals import naming
from tests.training.small_sweep import SMALL

SHIPPED = sorted((Path(__file__).parents[2] / "analyses" / "sweeps").glob("*.json"))


@given(
    chosen=st.fixed_dictionaries(
        {"state_noise": st.just([0, 0.5])},
        optional={
            "model.loop_norm": st.permutations([True, False]),
            "batch_size": st.lists(st.integers(1, 9), min_size=1, max_size=3, unique=True),
            "objective.kind": st.permutations(["step_dependent", "last"]),
        },
    )
)
@settings(max_examples=10)
def test_a_grid_is_all_combinations(chosen: dict[str, list]) -> None:
    sweep = SMALL.replace(settings={}, grid={key: tuple(v) for key, v in chosen.items()})
    expected = list(itertools.product(*chosen.values()))
    assert len(sweep.changes) == len(expected)
    for name, values in [*zip(sweep.changes, expected)][-2:]:
        flat = flatten_settings(sweep.config_of(name, 1).to_dict())
        assert [flat[key] for key in chosen] == list(values) and flat["seed"] == 1


def test_a_sweep_without_settings_has_one() -> None:
    assert list(SMALL.replace(settings={}).changes) == ["base"]


def test_a_setting_changes_the_base_and_nothing_else() -> None:
    changed = SMALL.replace(set=("batch_size=2",)).config_of("no noise", 1)
    assert SMALL.config is not None
    assert changed == SMALL.config.replace(batch_size=2, state_noise=0.0, seed=1)


def test_a_scale_adds_to_the_file_and_replaces_what_it_names() -> None:
    laptop = SweepScale(about="Small.", set=("steps=2",), evaluation={"lengths": [3]})
    paper = SweepScale(about="Large.", set=("steps=9",), seeds=(4, 5, 6))
    sweep = SMALL.replace(set=("batch_size=2",), scales={"laptop": laptop, "paper": paper})
    small, large = sweep.at(), sweep.at("paper")
    assert (small.base.steps, small.base.batch_size, small.seeds) == (2, 2, (0, 1))
    assert small.evaluation == SweepEvaluation(lengths=(3,), samples=8)
    assert (large.base.steps, large.seeds, large.evaluation) == (9, (4, 5, 6), SMALL.evaluation)
    assert not small.scales and SMALL.at() == SMALL


def test_it_goes_to_its_file_and_back(tmp_path: Path) -> None:
    file = tmp_path / "sweep.json"
    file.write_text(json.dumps(SMALL.to_dict()))
    assert Sweep.read(file) == SMALL
    with naming(".*none.json", CheckpointError):
        Sweep.read(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"config": None}, "recipe: expected it or config, got neither"),
        ({"recipe": "addition"}, "recipe: expected it or config, got both"),
        ({"grid": {"seed": (1,)}}, "settings: expected it or grid, got both"),
        ({"settings": {}, "grid": {"seed": (1,)}}, "expected no seed, got seed=1"),
        ({"set": ("seed=3",)}, "set: expected no seed"),
        ({"set": ("nosuch=3",)}, "setting: expected one of"),
        ({"settings": {"../a": ()}}, "name of a setting: expected the name of a file"),
        ({"seeds": (1, 1)}, "seeds: expected each seed once"),
        ({"seeds": ()}, "seeds: expected a list"),
        ({"evaluation": SweepEvaluation(lengths=(2,), distributions=("chains",))}, "'chain'"),
        ({"show": {"exact_match": "loop"}}, "show.exact_match: expected an axis"),
        ({"show": {"exact_match": "extra_loop"}}, "Set evaluation.extra_loops"),
        ({"scales": {"paper": SweepScale(about="A.", set=("lr=1",))}}, "optimiser.lr"),
    ],
)
def test_what_cannot_be_is_refused_at_once(changes: dict, words: str) -> None:
    with pytest.raises(InputError, match=words.replace("?", r"\?")):
        SMALL.replace(**changes)


def test_a_scale_or_setting_that_is_not_there_is_refused() -> None:
    with naming("scale"):
        SMALL.at("paper")
    with naming("setting"):
        SMALL.pick(["no_noise"])
    assert SMALL.pick([]) == ["base", "no noise"]


def test_a_setting_that_cannot_be_is_found_out_when_it_is_asked_for() -> None:
    sweep = SMALL.replace(settings={"wrong": ("model.n_heads=3",)})
    with naming("model.n_heads", ConfigError):
        sweep.config_of("wrong", 0)


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_every_setting_of_a_shipped_sweep_makes_a_step(file: Path) -> None:
    full = Sweep.read(file)
    sweep = full.at()
    small = ["model.d_model=8", "model.n_heads=2", "batch_size=1", "steps=1", "device=cpu"]
    for name in sweep.changes:
        config = sweep.config_of(name, sweep.seeds[0])
        assert config.model.n_ctx is None or config.model.n_ctx > max(sweep.evaluation.lengths)
        assert 0 < Trainer(apply_settings(config, small)).step()["loss"] < 20
    for scale in full.scales:
        sweep = full.at(scale)
        configs = {repr(sweep.config_of(name, 0).to_dict()) for name in sweep.changes}
        # No two settings are the same.
        assert len(configs) == len(sweep.changes)
