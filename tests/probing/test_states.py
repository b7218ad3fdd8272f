"""States at chosen places are those of an ordinary run."""

from __future__ import annotations

import pytest
import torch

from loopinterp.errors import InputError
from loopinterp.models import LoopedTransformer, LoopedTransformerConfig
from loopinterp.probing import states_at
from loopinterp.probing.states import describe_model, device_of
from tests.probing.toys import CarryToy

CONFIG = LoopedTransformerConfig(
    d_model=8, n_heads=2, d_vocab=5, d_vocab_out=2, injection="input", loop_norm=True
)


@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_places_of_an_ordinary_run(batch_size: int, generator: torch.Generator) -> None:
    model = LoopedTransformer(CONFIG)
    inputs = torch.randint(5, (7, 6), generator=generator)
    row = torch.randint(7, (2, 9), generator=generator)
    pos = torch.randint(6, (2, 9), generator=generator)
    states, e = states_at(model, inputs, row, pos, loops=[0, 2, 5], batch_size=batch_size)
    with torch.no_grad():
        expected = model(inputs, n_loops=5, return_type="states")
        torch.testing.assert_close(e, model.embed(inputs)[row, pos])
    torch.testing.assert_close(states, expected[[0, 2, 5]][:, row, pos], atol=1e-5, rtol=1e-5)
    assert not states.requires_grad


def test_loops_are_checked() -> None:
    inputs, place = torch.zeros(1, 3, dtype=torch.long), torch.zeros(1, dtype=torch.long)
    for loops in ([], [-1, 2], [2, 2]):
        with pytest.raises(InputError, match="increasing"):
            states_at(CarryToy(), inputs, place, place, loops=loops)
    with pytest.raises(InputError, match="at least one"):
        states_at(CarryToy(), inputs[:0], place[:0], place[:0], loops=[1])


def test_models_are_described_by_their_configuration_or_class() -> None:
    assert describe_model(LoopedTransformer(CONFIG)) == CONFIG.to_dict()
    assert describe_model(CarryToy()) == "CarryToy"
    assert device_of(CarryToy()).type == device_of(object()).type == "cpu"
