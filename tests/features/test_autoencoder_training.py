"""Training finds directions that were planted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from loopinterp.core.errors import InputError
from loopinterp.features import SparseAutoencoder, train_autoencoder
from loopinterp.models import LoopedTransformer, LoopedTransformerConfig, store_activations


def planted(n_rows: int = 4000) -> tuple[Tensor, Tensor]:
    """Rows that are sums of few of 16 directions in 12 dimensions, and the directions."""
    generator = torch.Generator().manual_seed(99)
    directions = torch.randn(16, 12, generator=generator)
    directions = directions / directions.norm(dim=1, keepdim=True)
    active = torch.rand(n_rows, 16, generator=generator) < 2 / 16
    sizes = active * (1 + torch.rand(n_rows, 16, generator=generator))
    return 5 * (sizes @ directions) + 3, directions


@torch.no_grad()
def test_planted_directions_are_found() -> None:
    rows, directions = planted()
    with torch.enable_grad():
        trained = train_autoencoder(
            rows, n_features=32, k=4, steps=1000, batch_size=256, learning_rate=5e-3
        )
    closest = (directions @ trained.W_dec.T).max(1).values
    assert closest.mean() > 0.88
    start = SparseAutoencoder(trained.config, seed=0).W_dec  # where training began
    assert (directions @ start.T).max(1).values.mean() < 0.7
    explained = 1 - (rows - trained(rows)).square().sum() / (rows - rows.mean(0)).square().sum()
    assert explained > 0.9
    torch.testing.assert_close(trained.W_dec.norm(dim=1), torch.ones(32))
    assert int((trained.encode(rows) > 0).sum(1).max()) <= 4


@torch.no_grad()
def test_another_scale_and_place_of_the_rows_changes_nothing_else() -> None:
    """Rows 8 x + 1 give 8 times the features: training sees the same scaled rows."""
    rows = planted(500)[0].double()
    options: Any = {"n_features": 16, "k": 2, "steps": 30, "batch_size": 64}
    with torch.enable_grad():
        one, other = (train_autoencoder(x, **options) for x in (rows, 8 * rows + 1))
    expected = 8 * one.encode(rows.float())
    torch.testing.assert_close(other.encode((8 * rows + 1).float()), expected, atol=1e-2, rtol=1e-3)
    again = one.W_dec.clone()
    with torch.enable_grad():
        repeated = train_autoencoder(rows, **options)
    assert torch.equal(repeated.W_dec, again)


@torch.no_grad()
def test_silent_features_start_again() -> None:
    """Far fewer stay silent than if they are left as they are."""
    rows = planted()[0]
    options: Any = {
        "n_features": 128,
        "k": 1,
        "steps": 400,
        "batch_size": 128,
        "learning_rate": 0.01,
    }
    silent = []
    for after in (25, 10**6):
        with torch.enable_grad():
            trained = train_autoencoder(rows, **options, dead_after=after)
        silent.append(int((trained.encode(rows) <= 0).all(0).sum()))
    assert silent[0] < silent[1] / 2


def test_training_needs_no_gradients_of_the_caller() -> None:
    rows, _ = planted(200)
    options: dict[str, Any] = {"n_features": 8, "k": 2, "steps": 3}
    trained = train_autoencoder(rows, **options).state_dict()
    with torch.no_grad():
        without = train_autoencoder(rows, **options).state_dict()
    carrying = train_autoencoder((rows.requires_grad_() * 1).clone(), **options).state_dict()
    for name, weight in trained.items():
        assert torch.equal(without[name], weight) and torch.equal(carrying[name], weight)
    with torch.inference_mode(), pytest.raises(InputError) as caught:
        train_autoencoder(rows, **options)
    assert caught.value.what == "gradients"


def test_stored_states_are_rows(tmp_path: Path) -> None:
    config = LoopedTransformerConfig(d_model=16, n_heads=2, d_vocab=5, d_vocab_out=2)
    model = LoopedTransformer(config.replace(n_loops=3))
    tokens = torch.randint(5, (32, 4), generator=torch.Generator().manual_seed(0))
    store = store_activations(model, tokens, tmp_path, names_filter="hook_state_post")
    rows = store.stack("state_post").flatten(0, 1)
    trained = train_autoencoder(rows, n_features=8, k=2, steps=3, about={"site": "state_post"})
    assert trained.about == {"site": "state_post"} and trained(rows).shape == rows.shape


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize("rows", [torch.zeros(3, 2), torch.zeros(1, 2), torch.zeros(4).long()])
def test_rows_without_variance_or_of_another_kind_are_refused(rows: Tensor) -> None:
    with pytest.raises(InputError) as caught:
        train_autoencoder(rows, n_features=4, k=1)
    assert caught.value.what == "activations"
