from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from loopinterp.core.errors import InputError
from loopinterp.dynamics import (
    LoopMeasures,
    contraction_rates,
    relative_residual,
    run_loops,
    stream_measures,
    update_cosine,
)
from loopinterp.dynamics.measures import chunks
from loopinterp.models import LoopedTransformer, LoopedTransformerConfig, bind
from tests.dynamics.toys import LinearModel, MapModel, rotation

CONFIG = LoopedTransformerConfig(d_model=8, n_heads=2, d_vocab=5, d_vocab_out=2)


def test_states_are_those_of_the_models_own_run() -> None:
    model, inputs = LoopedTransformer(CONFIG), torch.tensor([[0, 1, 2], [4, 3, 2]])
    states = run_loops(bind(model, inputs), 5)
    torch.testing.assert_close(states, model(inputs, n_loops=5, return_type="states"))
    assert not states.requires_grad


def test_bad_loops_and_initial_states_are_refused() -> None:
    model, inputs = LinearModel(torch.eye(2)), torch.ones(1, 3, dtype=torch.int64)
    with pytest.raises(InputError, match="n_loops"):
        run_loops(bind(model, inputs), 0)
    model.initial_state = lambda e: e * float("nan")
    with pytest.raises(InputError) as caught:
        run_loops(bind(model, inputs), 2)
    assert caught.value.what.startswith("state")


def test_chunks_cover_the_batch_once_even_where_one_example_is_too_large() -> None:
    for n, size in [(7, 2**25), (3, 2**30), (4, 1)]:
        rows = [row for part in chunks(n, size) for row in range(n)[part]]
        assert rows == list(range(n))


STREAMED = LoopedTransformerConfig(
    d_model=16, n_heads=2, d_vocab=6, d_vocab_out=2, injection="input", initial_state="zeros"
)


def measured(model: object, n_loops: int) -> LoopMeasures:
    """The measures of all loops, stacked."""
    inputs = torch.tensor([[1, 2, 3], [4, 5, 0]])
    every = [done for _, _, done in stream_measures(bind(model, inputs), n_loops)]
    names = [field.name for field in dataclasses.fields(LoopMeasures)]
    return LoopMeasures(**{k: torch.stack([getattr(one, k) for one in every]) for k in names})


def test_they_are_those_of_the_whole_run() -> None:
    for model in (
        LoopedTransformer(STREAMED).eval(),
        LinearModel(0.5 * torch.eye(2)),
    ):
        n_loops = 60  # far enough for updates of the contraction to drown in rounding
        states = run_loops(bind(model, torch.tensor([[1, 2, 3], [4, 5, 0]])), n_loops)
        measures = measured(model, n_loops)
        options = {"rtol": 1e-4, "atol": 1e-6, "equal_nan": True}
        torch.testing.assert_close(measures.norm, states.norm(dim=-1), **options)
        torch.testing.assert_close(measures.residual[1:], relative_residual(states), **options)
        of_sequence = relative_residual(states.flatten(2), norm="max")
        torch.testing.assert_close(measures.residual_max[1:], of_sequence, **options)
        rates = contraction_rates(states).per_loop
        torch.testing.assert_close(measures.contraction[2:], rates, **options)
        torch.testing.assert_close(measures.cosine[2:], update_cosine(states), **options)
        assert measures.residual[0].isnan().all() and measures.contraction[:2].isnan().all()


def test_a_rotation_turns_by_its_angle_for_ever() -> None:
    measures = measured(LinearModel(rotation(0.7)), 1000)
    torch.testing.assert_close(
        measures.cosine[2:], torch.full((999, 2, 3), math.cos(0.7)), atol=1e-3, rtol=0
    )
    torch.testing.assert_close(measures.contraction[2:], torch.ones(999, 2, 3), atol=1e-3, rtol=0)


def test_what_leaves_the_finite_numbers_is_measured_to_the_end() -> None:
    measures = measured(MapModel(lambda h, e: 10 * h + e), 60)
    assert measures.norm[-1].isinf().all() and measures.residual[-1].isnan().all()
    torch.testing.assert_close(measures.contraction[10], torch.full((2, 3), 10.0))
    half = MapModel(lambda h, e: (10 * h + e).bfloat16().to(h))
    assert measured(half, 45).norm[-1].isinf().all()
