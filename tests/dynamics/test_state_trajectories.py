from __future__ import annotations

import pytest
import torch

from loopinterp.dynamics import run_loops
from loopinterp.dynamics.state_trajectories import chunks
from loopinterp.errors import InputError
from loopinterp.models import LoopedTransformer, LoopedTransformerConfig, bind
from tests.dynamics.toys import LinearModel

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
    with pytest.raises(InputError, match="state after loop 0"):
        run_loops(bind(model, inputs), 2)


def test_chunks_cover_the_batch_once_even_where_one_example_is_too_large() -> None:
    for n, size in [(7, 2**25), (3, 2**30), (4, 1)]:
        rows = [row for part in chunks(n, size) for row in range(n)[part]]
        assert rows == list(range(n))
