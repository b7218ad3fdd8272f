"""What a model says of itself: where it lies, its configuration, and how far a loop carries."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY

import pytest
import torch

from loopinterp.errors import InputError
from loopinterp.models import LoopedTransformer, describe_model, device_of, reach
from loopinterp.storage import digest_tensors, read_tensors
from tests.models.looped_toys import Halving
from tests.models.variants import build, some_inputs


def test_models_are_described_by_their_configuration_or_class() -> None:
    model = build("demo")
    assert describe_model(model) == {**model.config.to_dict(), "weights_sha256": ANY}
    assert describe_model(Halving()) == "Halving"
    assert device_of(Halving()).type == device_of(object()).type == "cpu"
    assert device_of(SimpleNamespace(parameters=lambda: iter([torch.ones(1)]))).type == "cpu"


def test_the_digest_of_a_model_is_that_of_its_file(tmp_path: Path) -> None:
    for name in ("demo", "tied"):
        model = build(name, seed=1)
        model.save_pretrained(tmp_path / name)
        described = describe_model(model)
        assert isinstance(described, dict)
        weights = read_tensors(tmp_path / name / "model.safetensors")
        assert described["weights_sha256"] == digest_tensors(weights)
        assert described == describe_model(LoopedTransformer.from_pretrained(tmp_path / name))
        assert described != describe_model(build(name, seed=2))


def test_modules_without_a_configuration_are_described_by_class_and_weights() -> None:
    one, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, bias=False)
    assert describe_model(one) == {"class": "Linear", "weights_sha256": ANY}
    assert describe_model(one) != describe_model(other)


def test_buffers_that_are_not_saved_are_part_of_the_model() -> None:
    model = torch.nn.Linear(2, 2)
    bare = describe_model(model)
    model.register_buffer("scale", torch.ones(2), persistent=False)
    one = describe_model(model)
    model.scale = torch.full((2,), 2.0)
    two = describe_model(model)
    assert bare != one != two != bare
    model.scale = torch.ones(2)
    assert describe_model(model) == one


@pytest.mark.parametrize(
    ("part", "given"),
    [
        (torch.nn.Dropout(0.1), "Dropout in training mode, with dropout=0.1"),
        (torch.nn.MultiheadAttention(2, 1, dropout=0.2), "MultiheadAttention .* dropout=0.2"),
        (torch.nn.BatchNorm1d(2), "BatchNorm1d in training mode"),
    ],
)
def test_what_training_mode_makes_another_model_is_refused(
    part: torch.nn.Module, given: str
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ModuleDict({"inner": part}))
    with pytest.raises(InputError, match=rf"module 1.inner: expected evaluation mode.*{given}"):
        describe_model(model)
    assert describe_model(model.eval())
    model[1] = torch.nn.Dropout(0.0)
    assert describe_model(model.train())  # nothing is drawn


def changed_positions(model: Any, n_pos: int, at: int) -> list[int]:
    """Positions whose next state, or whose readout, a change of the state at one place changes."""
    torch.manual_seed(1)
    e, h = torch.randn(1, n_pos, 16), torch.randn(1, n_pos, 16)
    other = h.clone()
    other[:, at] += torch.randn(16)
    stepped = (model.step(h, e) - model.step(other, e)).abs().amax((0, 2)) > 1e-6
    read = (model.readout(h) - model.readout(other)).abs().amax((0, 2)) > 1e-6
    return (stepped | read).nonzero().flatten().tolist()


@pytest.mark.parametrize("window", [0, 1, 3])
@pytest.mark.parametrize("n_layers", [1, 2])
@pytest.mark.parametrize("name", ["plain", "demo", "post rms", "sandwich rotary"])
def test_a_change_spreads_as_far_as_the_reach_says_and_no_farther(
    name: str, n_layers: int, window: int
) -> None:
    model = build(name, n_layers=n_layers, attention_window=window)
    assert reach(model) == n_layers * window
    assert changed_positions(model, 14, at=4) == list(range(4, 5 + n_layers * window))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention_window": 1, "causal": False},
        {"attention_window": 1, "n_coda": 2},
        {"attention_window": 1, "windowed_heads": 1},
    ],
)
def test_no_bound_where_a_change_spreads_farther(changes: dict[str, Any]) -> None:
    model = build("plain", **changes)
    assert reach(model) is None
    changed = changed_positions(model, 14, at=4)
    assert min(changed) < 4 or max(changed) > 4 + 1


def test_an_input_may_reach_farther_than_a_state() -> None:
    model = build("plain", n_prelude=2, attention_window=1)
    assert reach(model) == 1
    inputs = some_inputs(model, batch=1, n_pos=8)
    other = inputs.clone()
    other[:, 0] = (other[:, 0] + 1) % 6
    changed = (model.embed(inputs) - model.embed(other)).abs().amax((0, 2)) > 1e-6
    assert changed.nonzero().flatten().tolist() == [0, 1, 2]


def test_a_free_prelude_has_no_bound_and_the_loop_keeps_its_own() -> None:
    model = build("window in the loop only", n_coda=0)
    assert (reach(model), model.reach_before) == (1, None)
    bounded = build("plain", n_prelude=2, attention_window=1), build("plain", attention_window=1)
    assert [one.reach_before for one in bounded] == [2, 0]


def test_a_foreign_model_may_say_its_reach() -> None:
    assert reach(Halving()) is None and reach(SimpleNamespace(reach=0)) == 0
    for wrong in (-1, 1.0, True):
        with pytest.raises(InputError, match="reach of the model"):
            reach(SimpleNamespace(reach=wrong))
