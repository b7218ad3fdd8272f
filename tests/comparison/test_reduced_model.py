"""A model reduced to the directions that it uses is the model; without them it is not."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import xarray as xr

from loopinterp.comparison import ProgramModel, reduction_study
from loopinterp.comparison.reduced_model import ReducedModel, StateDirections
from loopinterp.compiler import compile_program, rotate
from loopinterp.core.errors import InputError
from loopinterp.interventions.engine import InterchangeRun
from loopinterp.interventions.pairs import drawn_pairs
from loopinterp.models import LoopedTransformer, LoopedTransformerConfig, bind, iterate
from loopinterp.programs import get_program
from loopinterp.tasks import Addition, as_batch

BATCH = as_batch(Addition(), n=6, batch_size=64)


def transformer(**changed: object) -> LoopedTransformer:
    config = LoopedTransformerConfig(
        d_model=16, n_heads=2, d_vocab=6, d_vocab_out=2, attention_window=1, injection="input"
    )
    return LoopedTransformer(config.replace(**changed)).eval()


def fitted(model: object) -> StateDirections:
    generator = torch.Generator().manual_seed(0)
    return StateDirections.fit(model, drawn_pairs(BATCH, 7, 64, generator), tokens=torch.arange(5))


def test_directions_are_the_principal_ones_of_each_token() -> None:
    model = transformer()
    generator = torch.Generator().manual_seed(0)
    pairs = drawn_pairs(BATCH, 7, 32, generator)
    found = StateDirections.fit(model, pairs, tokens=torch.arange(6))
    run = InterchangeRun(model, pairs)
    after = run.states_after(run.source_state)
    states = [h[BATCH.inputs == 3] for t, h in iterate(model, BATCH.inputs, 7) if t]
    for pair, delays in zip(range(len(pairs)), run.within):
        at = BATCH.inputs[pairs.base[pair]] == 3
        states += [h[at] for h, inside in zip(after[pair], delays) if inside]
    every = torch.cat(states).double()
    assert torch.allclose(found.means[3].double(), every.mean(0), atol=1e-5)
    _, _, rows = torch.linalg.svd(every - every.mean(0), full_matrices=False)
    cosine = (found.directions[3, :3].double() * rows[:3]).sum(-1).abs()
    assert torch.allclose(cosine, torch.ones(3).double(), atol=1e-4)
    # Token 5 does not occur: it has the directions of all together.
    assert torch.isfinite(found.directions[5]).all()


@pytest.mark.parametrize("window", [1, None])
def test_a_model_that_keeps_all_directions_is_the_model(window: int | None) -> None:
    model = transformer(attention_window=window)
    whole = ReducedModel(model, fitted(model), slice(None))
    for (_, own), (_, other) in zip(
        iterate(model, BATCH.inputs, 7), iterate(whole, BATCH.inputs, 7)
    ):
        assert torch.allclose(own, other, atol=1e-4)


@pytest.mark.parametrize("window", [1, None])
def test_a_reduced_state_is_the_nearest_point_of_its_tokens_plane(window: int | None) -> None:
    model = transformer(attention_window=window)
    directions = fitted(model)
    reduced = bind(ReducedModel(model, directions, slice(2)), BATCH.inputs)
    own = bind(model, BATCH.inputs)
    assert torch.equal(reduced.h0, own.h0)  # the initial state is not reduced
    stepped, after = own.step(own.h0), reduced.step(own.h0)
    for row, position in ((0, 1), (5, 4), (9, 0)):
        token = int(BATCH.inputs[row, position])
        basis, mean = directions.directions[token, :2], directions.means[token]
        weights = torch.linalg.lstsq(basis.T, (stepped[row, position] - mean)[:, None]).solution
        assert torch.allclose(after[row, position], mean + (basis.T @ weights)[:, 0], atol=1e-4)


def test_parts_of_a_sequence_are_reduced_as_the_whole() -> None:
    """Within a window only what an exchange can reach is run again."""
    model = transformer()
    pairs = drawn_pairs(BATCH, 7, 40, torch.Generator().manual_seed(1), across_loops=True)
    reduced = ReducedModel(model, fitted(model), slice(3))
    in_parts = InterchangeRun(reduced, pairs).interchange()
    reduced.local_step = False
    whole = InterchangeRun(reduced, pairs).interchange()
    assert torch.equal(in_parts, whole)


def test_a_compiled_carry_takes_as_few_numbers_as_it_has() -> None:
    # One bit of a token's state is used; others vary, and where each stands the rotation says.
    model = rotate(compile_program("ripple", max_length=13), seed=0).model
    found = reduction_study(
        model, Addition(), n=(6, 12), batch_size=256, ranks=(1, 4, 8), pairs=384
    )
    assert 0 < found.enough < found.width / 3
    at = found.data.sel(rank=found.enough)
    assert found.weakest(found.enough).share.value == 1
    assert (at["undisturbed"].sel(estimate="value") == 1).all()
    assert float(at["others"].sel(estimate="value").max()) < 0.2
    assert found.findings()[0].value == f"{found.enough} of {found.width}"


def test_what_needs_more_numbers_than_were_tried_is_said_to() -> None:
    # The time for which a carry is held counts too.
    model = ProgramModel(get_program("ripple_held_3"), max_length=13)
    found = reduction_study(model, Addition(), n=6, batch_size=128, ranks=(1,), pairs=128)
    assert found.enough == 0
    [finding] = found.findings()
    assert finding.value.endswith(f" than 1 of {found.width}")
    assert "too few:" in finding.text
    # A rank that is right as often as needed, of some kinds on few inputs, is not called too few.
    of_first = found.data["kind"] == found.data["kind"][0]
    right = xr.full_like(found.data["accuracy"], 1.0).where(~of_first, 0.97)
    inputs = found.data["inputs"].where(~of_first, 64).where(of_first, 10)
    sparse = dataclasses.replace(found, data=found.data.assign(accuracy=right, inputs=inputs))
    [finding] = sparse.findings()
    assert sparse.enough == 0 and "97%" in finding.text and "too few" not in finding.text


def test_fitted_inputs_are_not_scored_and_numbers_that_make_no_sense_are_refused() -> None:
    model = transformer()
    found = reduction_study(model, BATCH, ranks=(2,), pairs=16)
    assert found.fitted_at == 6 and found.data.sizes["kind"] == 3
    larger = reduction_study(model, BATCH, ranks=(2, 16), pairs=16)
    assert larger.data["rank"].values.tolist() == [2]
    for what, data, options in (
        ("ranks", BATCH, {"ranks": (0,)}),
        *(("ranks, kinds", BATCH, {"ranks": ranks}) for ranks in ((16,), ())),
        ("pairs", BATCH, {"pairs": 7}),
        ("kinds", BATCH, {"kinds": ("same loops",)}),
        ("ranks, kinds", BATCH, {"kinds": ()}),
        ("data", [BATCH, BATCH], {}),
        ("data", BATCH[:2], {}),
    ):
        with pytest.raises(InputError) as refused:
            reduction_study(model, data, **{"ranks": (2,), "pairs": 16, **options})
        assert refused.value.what == what
    features = transformer(d_vocab=None, d_features=2)
    with pytest.raises(InputError) as refused:
        reduction_study(features, Addition(format="features"), n=4, batch_size=16)
    assert refused.value.what == "data"


def test_a_model_that_no_interchange_changes_keeps_nothing() -> None:
    class Still(torch.nn.Module):
        """Forgets its state in every loop."""

        def embed(self, inputs: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.one_hot(inputs, 6).float()

        def initial_state(self, e: torch.Tensor) -> torch.Tensor:
            return e

        def step(self, h: torch.Tensor, e: torch.Tensor) -> torch.Tensor:
            return e

        def readout(self, h: torch.Tensor) -> torch.Tensor:
            return h[..., :2]

    found = reduction_study(Still(), BATCH, ranks=(2,), pairs=16)
    [finding] = found.findings()
    assert found.enough == 0 and not finding.value
    assert len(found.figures()) == 1


def test_a_delay_that_clearly_fails_is_not_made_good_by_those_beside_it() -> None:
    found = reduction_study(transformer(), BATCH, ranks=(2,), pairs=16)
    data = found.data.copy(deep=True)
    data["effective"][:], data["inputs"][:], data["accuracy"][:] = 400, 100, 1.0
    assert dataclasses.replace(found, data=data).enough == 2
    last = {"kind": "same loop", "delay": 5}
    for name, value in (("effective", 20), ("inputs", 20), ("accuracy", 0.0)):
        data[name].loc[last] = value
    failing = dataclasses.replace(found, data=data)
    assert failing.enough == 0
    assert failing.weakest(2).share[:3] == (5, 5, 0.0)
    data["accuracy"][:], data["inputs"][:] = 1.0, 10
    assert dataclasses.replace(found, data=data).enough == 0, "too few inputs"
    data["inputs"][:] = 100
    data["accuracy"].loc[{"kind": "same loop"}] = 0.96
    data["inputs"].loc[{"kind": "any loop"}] = 10
    mixed = dataclasses.replace(found, data=data)
    assert mixed.weakest(2).kind == "same loop"
    assert mixed.enough == 0  # too few inputs of the other kind of pairs


class Untied(torch.nn.Module):
    """Layers of their own, one a loop."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        alike = {"attention_window": None, "init_std": 0.5}
        self.layers = [transformer(**alike) for _ in range(7)]

    def embed(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers[0].embed(inputs)

    def initial_state(self, e: torch.Tensor) -> torch.Tensor:
        return e

    def step(self, h: torch.Tensor, e: torch.Tensor, loop: int = 0) -> torch.Tensor:
        return self.layers[loop].step(h, e)

    def readout(self, h: torch.Tensor) -> torch.Tensor:
        return self.layers[0].readout(h)


@torch.no_grad()
def test_untied_layers_have_directions_of_their_own() -> None:
    model = Untied().eval()
    directions = fitted(model)
    assert directions.means.shape == (7 * 5, 16)
    whole, own = ReducedModel(model, directions, slice(None)), bind(model, BATCH.inputs)
    for (_, h), (_, other) in zip(own.run(7), iterate(whole, BATCH.inputs, 7)):
        assert torch.allclose(h, other, atol=1e-4)
    reduced = bind(ReducedModel(model, directions, slice(2)), BATCH.inputs)
    token = int(BATCH.inputs[0, 1])
    for loop in (0, 6):
        mean, basis = directions.means[loop * 5 + token], directions.directions[loop * 5 + token]
        moved = own.step(own.h0, loop)[0, 1] - mean
        nearest = mean + moved @ basis[:2].T @ basis[:2]
        assert torch.allclose(reduced.step(own.h0, loop)[0, 1], nearest, atol=1e-4)


def test_answers_at_the_end_are_those_after_all_loops() -> None:
    model = Untied().eval()
    options = {"ranks": (15,), "kinds": ("same loop",), "pairs": 512}
    at_end, by_loop = (
        reduction_study(model, BATCH, at_end=chosen, **options) for chosen in (True, False)
    )
    assert at_end.data["kind"].values.tolist() == ["same loop"] and at_end.at_end
    assert len(at_end.figures()) == 1
    # An interchange is read once at the end, and at every loop from its own on else.
    first = {"delay": 0, "kind": "same loop", "n": 6, "rank": 15}
    assert 0 < at_end.data["effective"].sel(first) < by_loop.data["effective"].sel(first)


def test_tokens_are_told_apart_in_half_precision() -> None:
    model = transformer(d_vocab=600).bfloat16()
    tokens = torch.arange(600)
    means = torch.arange(600.0).bfloat16()[:, None].expand(-1, 16)
    directions = StateDirections(tokens, means, torch.eye(16).bfloat16().expand(600, -1, -1))
    inputs = torch.tensor([[0, 200, 300, 598, 599]])
    reduced = bind(ReducedModel(model, directions, slice(0)), inputs)
    assert torch.equal(reduced.step(reduced.h0)[0, :, 0], means[inputs[0], 0])
