"""A model of the four methods is held to the protocol, by whatever studies it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loopinterp.circuits import compare_programs, patching_sweep
from loopinterp.dynamics import (
    convergence_study,
    extrapolation_study,
    geometry_study,
    local_stability_study,
    reachability_study,
    spectral_radius,
)
from loopinterp.errors import InputError
from loopinterp.lenses import exit_study, lens_study
from loopinterp.models import WithVocabulary, bind, iterate
from loopinterp.tasks import Addition, Batch, as_batch
from loopinterp.training import evaluate

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
    message = rf"{method} of {kind.__name__}: .* {argument} left as it was.* {argument}\.clone"
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
        kept = [h for _, h in iterate(model, inputs(), 4)]
        h = torch.zeros(BATCH, POS, WIDTH)
        for state in kept:
            assert torch.equal(state, h)
            h = h / 2 + model.change(h, model.embed(inputs()))
    *_, (_, last) = iterate(model, inputs(), 4)  # with gradients too
    assert last.requires_grad and torch.equal(last.detach(), kept[-1])


def test_in_inference_mode_nothing_is_written_into_what_is_kept() -> None:
    with torch.no_grad():
        expected = [h for _, h in iterate(StartsWithInput(), inputs(), 0)]
        for _ in range(3):
            e = StartsWithInput().embed(inputs())
            expected.append(expected[-1] + StartsWithInput().change(expected[-1], e))
    with torch.inference_mode():
        found = [h.clone() for h in [h for _, h in iterate(StartsWithInput(), inputs(), 3)]]
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other)


def replaced(**methods: Callable[..., Any]) -> Leaky:
    """The model with other methods, of (model, …)."""
    model = Leaky()
    for name, method in methods.items():
        setattr(model, name, lambda *given, method=method: method(model, *given))
    return model


AXES = r" of Leaky: expected floats \[\d+, 7, .*axes batch"

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

SAID = {
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
        with pytest.raises(InputError, match=SAID.get(kind, AXES)):
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
    found = convergence_study(Regression(), batch_without_task(batch), n_loops=14, n_spectral=1)
    assert (found.data["right"] == -1).all() and found.data["margin"].isnull().all()
    same = convergence_study(Leaky(), batch, n_loops=14, n_spectral=1)
    assert found.data["residual"].equals(same.data["residual"])
    assert found.data["spectral_radius"].equals(same.data["spectral_radius"])
    assert "100% of the answers" not in found.findings()[0].text
    assert found.figures()
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
    assert "cat" in error.value.fix and "geometry_study" in error.value.fix


def test_more_states_than_inputs_are_refused_with_what_to_do() -> None:
    class Registers(Leaky):
        def initial_state(self, e: Tensor) -> Tensor:
            return torch.zeros_like(torch.cat([e, e[:, :2]], 1))

    with pytest.raises(InputError) as error:
        bind(Registers(), torch.zeros(2, 5, dtype=torch.long))
    assert error.value.what == "initial_state of Registers" and "embed" in error.value.fix
