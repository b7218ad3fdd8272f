"""A model of the four methods is held to the protocol, by whatever studies it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY

import pytest
import torch
from torch import Tensor, nn

from loopinterp.comparison import compare_programs
from loopinterp.core.errors import InputError
from loopinterp.core.storage import digest_tensors, read_tensors
from loopinterp.dynamics import (
    convergence_study,
    extrapolation_study,
    geometry_study,
    local_stability_study,
    reachability_study,
    spectral_radius,
)
from loopinterp.interventions import patching_sweep
from loopinterp.lenses import exit_study, lens_study
from loopinterp.models import (
    LoopedTransformer,
    LoopedTransformerConfig,
    OptionalProperties,
    WithVocabulary,
    bind,
    describe_model,
    device_of,
    iterate,
    reach,
)
from loopinterp.models.protocol import declared, own_depth, rule_of, takes_loop
from loopinterp.tasks import Addition, Batch, as_batch
from loopinterp.training import evaluate
from tests.models.looped_toys import Halving
from tests.models.variants import build, some_inputs

BATCH, POS, WIDTH = 5, 7, 4


class Leaky(nn.Module):
    """``h <- h / 2 + W (mean of h so far) + e``, over the tokens of addition."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.tokens = nn.Embedding(6, WIDTH)
            self.mix, self.out = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 2)

    def embed(self, inputs: Tensor) -> Tensor:
        return self.tokens(inputs)

    def initial_state(self, e: Tensor) -> Tensor:
        return torch.zeros_like(e)

    def change(self, h: Tensor, e: Tensor) -> Tensor:
        so_far = h.cumsum(1) / torch.arange(1, h.shape[1] + 1)[:, None]
        return self.mix(so_far) / 4 + e

    def step(self, h: Tensor, e: Tensor) -> Tensor:
        return h / 2 + self.change(h, e)

    def readout(self, h: Tensor) -> Tensor:
        return self.out(h)


class WritesTokens(Leaky):
    def embed(self, inputs: Tensor) -> Tensor:
        inputs[inputs == 3] = 1
        return self.tokens(inputs)


class WritesState(Leaky):
    def step(self, h: Tensor, e: Tensor) -> Tensor:
        h = h.mul_(0.5) if h.requires_grad else h
        h += self.change(h, e)
        return h


class WritesInput(Leaky):
    def step(self, h: Tensor, e: Tensor) -> Tensor:
        e[:, 0] = 0  # a view of it, which counts as it
        return super().step(h, e)


class StartsWithInput(Leaky):
    """The state is the embedding itself, so that writing into it changes both."""

    def initial_state(self, e: Tensor) -> Tensor:
        return e

    def step(self, h: Tensor, e: Tensor) -> Tensor:
        return h.add_(self.change(h, e))


class WritesInReadout(Leaky):
    def readout(self, h: Tensor) -> Tensor:
        h -= h.mean(-1, keepdim=True)
        return self.out(h)


def inputs() -> Tensor:
    """Tokens of some sums."""
    sums = Addition().sample(POS - 1, batch_size=BATCH, generator=torch.Generator().manual_seed(0))
    return sums.inputs


@pytest.mark.parametrize(
    ("kind", "method", "argument"),
    [
        (WritesTokens, "embed", "inputs"),
        (WritesState, "step", "h"),
        (WritesInput, "step", "e"),
        (StartsWithInput, "step", "h"),
        (WritesInReadout, "readout", "h"),
    ],
)
@torch.no_grad()
def test_what_writes_into_what_it_is_given_is_refused(
    kind: type[Leaky], method: str, argument: str
) -> None:
    message = rf"^{method} of {kind.__name__}: .* {argument} written into"
    studies: list[Callable[[Any], object]] = [
        lambda model: [
            bind(model, inputs()).read(h, loop) for loop, h in iterate(model, inputs(), 2)
        ],
        lambda model: evaluate(model, Addition(), [3], n_samples=4),
        lambda model: convergence_study(model, Addition(), n=3, batch_size=4),
        lambda model: compare_programs(model, ["ripple"], Addition(), n=3),
    ]
    for study in studies:
        with pytest.raises(InputError, match=message):
            study(kind())
        with pytest.raises(InputError, match=message):
            study(WithVocabulary(kind()))


def test_states_that_are_not_written_into_are_what_they_were() -> None:
    model = Leaky()
    with torch.no_grad():
        states = [h for _, h in iterate(model, inputs(), 4)]
        h = torch.zeros(BATCH, POS, WIDTH)
        for state in states:
            assert torch.equal(state, h)
            h = h / 2 + model.change(h, model.embed(inputs()))
    *_, (_, last) = iterate(model, inputs(), 4)  # with gradients too
    assert last.requires_grad and torch.equal(last.detach(), states[-1])


def test_in_inference_mode_nothing_is_written_into_what_is_kept() -> None:
    with torch.no_grad():
        expected = [h for _, h in iterate(StartsWithInput(), inputs(), 0)]
        for _ in range(3):
            e = StartsWithInput().embed(inputs())
            expected.append(expected[-1] + StartsWithInput().change(expected[-1], e))
    with torch.inference_mode():
        states = [h.clone() for h in [h for _, h in iterate(StartsWithInput(), inputs(), 3)]]
    for one, other in zip(states, expected, strict=True):
        assert torch.allclose(one, other)


def replaced(**methods: Callable[..., Any]) -> Leaky:
    """The model with other methods, of (model, …)."""
    model = Leaky()
    for name, method in methods.items():
        setattr(model, name, lambda *given, method=method: method(model, *given))
    return model


AXES = r" of Leaky: expected floats \[\d+, 7, "


SHAPES = {
    "a tuple": replaced(initial_state=lambda m, e: (e, e)),
    "a state per example": replaced(initial_state=lambda m, e: e.flatten(1)),
    "a pair on an axis of its own": replaced(initial_state=lambda m, e: torch.stack([e, e], 2)),
    "positions first": replaced(embed=lambda m, x: m.tokens(x).transpose(0, 1)),
    "a step that drops a position": replaced(step=lambda m, h, e: h[:, 1:]),
    "a step that widens": replaced(step=lambda m, h, e: torch.cat([h, h], -1)),
    "a step to a tuple": replaced(step=lambda m, h, e: (h, e)),
    "the last position alone": replaced(readout=lambda m, h: m.out(h[:, -1])),
    "the last position, kept": replaced(readout=lambda m, h: m.out(h[:, -1:])),
    "one class": replaced(readout=lambda m, h: m.out(h)[..., :1]),
    "an array": replaced(readout=lambda m, h: m.out(h).detach().numpy()),
    "answers": replaced(readout=lambda m, h: m.out(h).argmax(-1)),
}


DECLARED = {
    "a step that drops a position": r"step of Leaky: expected floats \[\d+, 7, 4\], got .*, 6",
    "one class": "d_vocab_out=1",
}


@pytest.mark.parametrize("kind", SHAPES)
@torch.no_grad()
def test_what_is_not_batch_by_position_by_feature_is_refused(kind: str) -> None:
    model = SHAPES[kind]
    base = Addition().sample(6, batch_size=BATCH, generator=torch.Generator().manual_seed(0))
    studies: list[Callable[[Any], object]] = [
        lambda m: convergence_study(m, base),
        lambda m: extrapolation_study(m, base),
        lambda m: evaluate(m, Addition(), [6], n_samples=4),
        lambda m: patching_sweep(m, base, base.inputs.roll(1, 0), component="state"),
    ]
    for study in studies:
        with pytest.raises(InputError, match=DECLARED.get(kind, AXES)):
            study(model)


def test_models_of_the_protocol_go_through_every_derivative() -> None:
    step = bind(Leaky(), inputs()).step
    h = torch.zeros(BATCH, POS, WIDTH)
    assert (spectral_radius(step, h).radius < 1).all()


class Regression(Leaky):
    """One number for each position."""

    def readout(self, h: Tensor) -> Tensor:
        return self.out(h)[..., :1]


def test_studies_of_states_take_a_readout_of_one_number() -> None:
    batch = as_batch(Addition(), n=3, batch_size=4)
    result = convergence_study(Regression(), batch_without_task(batch), n_loops=14, n_spectral=1)
    assert (result.data["right"] == -1).all() and result.data["margin"].isnull().all()
    same = convergence_study(Leaky(), batch, n_loops=14, n_spectral=1)
    assert result.data["residual"].equals(same.data["residual"])
    assert result.data["spectral_radius"].equals(same.data["spectral_radius"])
    # The share that settles; no share of right answers, which the other model has.
    n_shares = [each.findings()[0].text.count("%") for each in (result, same)]
    assert n_shares == [1, 2]
    assert result.figures()
    shape = geometry_study(Regression(), batch_without_task(batch), limit_steps=5)
    assert (shape.data["right"] == -1).all() and shape.findings() and shape.figures()
    stability = local_stability_study(Regression(), batch_without_task(batch), k=1)
    assert stability.findings() and stability.figures()


def batch_without_task(batch: Batch) -> Batch:
    return replace(batch, task=None)


@pytest.mark.parametrize("study", [exit_study, lens_study, reachability_study])
def test_studies_of_answers_say_what_a_readout_of_one_number_needs(study: Any) -> None:
    batch = batch_without_task(as_batch(Addition(), n=3, batch_size=4))
    with pytest.raises(InputError) as error:
        study(Regression(), batch)
    assert error.value.what == "readout of Regression"
    assert "geometry_study" in error.value.fix


def test_more_states_than_inputs_are_refused_with_what_to_do() -> None:
    class Registers(Leaky):
        def initial_state(self, e: Tensor) -> Tensor:
            return torch.zeros_like(torch.cat([e, e[:, :2]], 1))

    with pytest.raises(InputError) as error:
        bind(Registers(), torch.zeros(2, 5, dtype=torch.long))
    assert error.value.what == "initial_state of Registers" and "embed" in error.value.fix


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
        (torch.nn.Dropout(0.1), "Dropout .*dropout=0.1"),
        (torch.nn.MultiheadAttention(2, 1, dropout=0.2), "MultiheadAttention .*dropout=0.2"),
        (torch.nn.BatchNorm1d(2), "BatchNorm1d"),
    ],
)
def test_what_training_mode_makes_another_model_is_refused(
    part: torch.nn.Module, given: str
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ModuleDict({"inner": part}))
    with pytest.raises(InputError, match=rf"^module 1.inner: .*{given}"):
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
        with pytest.raises(InputError, match=r"^reach"):
            reach(SimpleNamespace(reach=wrong))


def test_a_model_of_four_methods_has_the_default_of_every_optional_property() -> None:
    for name in OptionalProperties.__annotations__:
        assert declared(Halving(), name) == getattr(OptionalProperties, name)
    assert not takes_loop(Halving())
    assert (reach(Halving()), rule_of(Halving()), own_depth(Halving())) == (None, None, None)


def test_an_optional_property_is_the_models_own_or_its_configurations() -> None:
    config = SimpleNamespace(causal=False, n_ctx=7)
    assert declared(SimpleNamespace(config=config), "causal") is False
    assert declared(SimpleNamespace(config=config, n_ctx=3), "n_ctx") == 3
    with pytest.raises(AttributeError):
        declared(Halving(), "no_such_property")


def test_what_a_looped_transformer_declares_is_among_the_optional_properties() -> None:
    model = LoopedTransformer(
        LoopedTransformerConfig(d_model=8, n_heads=2, d_vocab=5, d_vocab_out=2, attention_window=1)
    )
    assert (declared(model, "reach"), declared(model, "attention_window")) == (1, 1)
    assert declared(model, "causal") and declared(model, "repeatable")
    assert declared(WithVocabulary(model), "reach") == 1
