"""Controls: random labels, random weights, majority, intervals."""

from __future__ import annotations

import pytest
import torch

from loopinterp.errors import InputError
from loopinterp.probing import (
    context_types,
    control_labels,
    majority_accuracy,
    with_random_weights,
)
from loopinterp.tasks.task import IGNORE


def test_contexts_are_the_same_type_exactly_where_their_inputs_agree() -> None:
    inputs = torch.randint(3, (6, 9), generator=torch.Generator().manual_seed(0))
    for width in (1, 2, 4):
        types = context_types(inputs, width=width)
        seen: dict[tuple[int, ...], int] = {}
        for row in range(6):
            for pos in range(9):
                window = [
                    int(inputs[row, p]) if p >= 0 else -1 for p in range(pos - width + 1, pos + 1)
                ]
                assert seen.setdefault(tuple(window), int(types[row, pos])) == types[row, pos]
        assert len(set(seen.values())) == len(seen)


def test_contexts_of_features_are_those_of_the_tokens_they_stand_for() -> None:
    tokens = torch.randint(4, (5, 6), generator=torch.Generator().manual_seed(0))
    features = torch.stack([tokens % 2, tokens // 2], dim=-1).float()
    same = context_types(tokens, width=2)[:, :, None] == context_types(tokens, width=2).flatten()
    other = context_types(features, width=2)
    assert torch.equal(same, other[:, :, None] == other.flatten())


def test_random_labels_are_fixed_by_type_and_keep_the_frequencies(
    generator: torch.Generator,
) -> None:
    types = torch.randint(2000, (100, 200), generator=generator)
    pool = torch.tensor([7] * 3 + [2])
    labels = control_labels(pool, types, n_draws=3, generator=generator)
    assert labels.shape == (3, 100, 200)
    for draw in labels:
        table = torch.zeros(2000, dtype=torch.long)
        table[types.flatten()] = draw.flatten()
        assert torch.equal(table[types], draw)
    assert (labels == 7).float().mean() == pytest.approx(0.75, abs=0.03)
    assert not torch.equal(labels[0], labels[1])


def test_majority_is_that_of_training_and_skips_what_is_not_asked() -> None:
    train = torch.tensor([[0, 0, 1, IGNORE, IGNORE], [1, 1, 0, 1, IGNORE]])
    test = torch.tensor([[0, 1, 1, 1], [1, 1, IGNORE, 0]])
    torch.testing.assert_close(
        majority_accuracy(train, test), torch.tensor([0.25, 2 / 3], dtype=torch.float64)
    )


def test_shuffled_weights_keep_their_values_and_lose_their_places() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.LayerNorm(30))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    shuffled = with_random_weights(model, seed=1)
    for name, weight in shuffled.state_dict().items():
        torch.testing.assert_close(
            weight.flatten().sort().values, before[name].flatten().sort().values
        )
        assert torch.equal(model.state_dict()[name], before[name])
    assert not torch.equal(shuffled.state_dict()["0.weight"], before["0.weight"])
    again = with_random_weights(model, seed=1).state_dict()
    assert torch.equal(again["0.weight"], shuffled.state_dict()["0.weight"])
    other = with_random_weights(model, seed=2).state_dict()
    assert not torch.equal(other["0.weight"], again["0.weight"])


@pytest.mark.usefixtures("no_type_checks")
def test_only_modules_have_weights_to_shuffle() -> None:
    with pytest.raises(InputError, match="random_model="):
        with_random_weights(object(), seed=0)  # type: ignore[type-var]
