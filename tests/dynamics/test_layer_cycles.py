"""Layers' limits against a block that adds known vectors, and against the cache."""

from __future__ import annotations

import pytest
import torch

from loopinterp.dynamics import layer_limits
from loopinterp.dynamics.layer_cycles import why_no_layers
from loopinterp.errors import InputError
from loopinterp.models import LoopedTransformer, LoopedTransformerConfig
from tests.dynamics.toys import LinearModel

TOKENS = torch.tensor([[0, 1, 2, 3], [4, 4, 0, 1]])


def block(n_layers: int = 2, **options: object) -> LoopedTransformer:
    config = LoopedTransformerConfig(
        d_model=8,
        n_heads=2,
        n_layers=n_layers,
        d_vocab=5,
        d_vocab_out=2,
        loop_norm=True,
        **options,  # pyright: ignore[reportArgumentType]
    )
    return LoopedTransformer(config, seed=1)


def adding(*vectors: torch.Tensor) -> LoopedTransformer:
    """A block whose layers add one vector each, whatever the state."""
    model = block(len(vectors))
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for name, weight in weights.items():
            if name.startswith("block."):
                weight.zero_()
        for k, vector in enumerate(vectors):
            weights[f"block.{k}.mlp.fc_out.bias"].copy_(vector)
    return model


def centred(vector: torch.Tensor) -> torch.Tensor:
    return vector - vector.mean()


def test_layers_that_add_known_vectors_have_known_limits() -> None:
    first, second = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    found = layer_limits(adding(first, second), TOKENS, n_loops=60)
    # The loop norm leaves the direction of what is added, at a norm of the root of the width.
    entering = centred(first + second)
    entering = entering / entering.norm() * 8**0.5
    after = torch.stack([entering + first, entering + first + second])
    cosine = torch.cosine_similarity(*after, dim=0)
    torch.testing.assert_close(
        found.cosine[0, 1], cosine.expand_as(found.cosine[0, 1]), atol=1e-4, rtol=0
    )
    distance = second.norm() / (after.norm(dim=1).sum() / 2)
    torch.testing.assert_close(
        found.distance[1, 0], distance.expand_as(found.distance[1, 0]), atol=1e-4, rtol=0
    )
    assert (found.residual[-1] < 1e-5).all() and (found.residual[1] > 1e-3).any()


def test_a_layer_that_does_nothing_has_the_limit_of_the_one_before() -> None:
    vector = torch.randn(8, generator=torch.Generator().manual_seed(0))
    found = layer_limits(adding(vector, torch.zeros(8)), TOKENS, n_loops=20)
    assert (found.distance == 0).all() and (found.cosine > 1 - 1e-6).all()


def test_against_the_cache() -> None:
    model, n_loops = block(3, injection="input"), 5
    _, cache = model.run_with_cache(TOKENS, n_loops=n_loops)
    states = torch.stack([cache.stack("resid_post", layer=k) for k in range(3)], dim=1).detach()
    counted = torch.tensor([[False, True, True, True], [True, True, False, True]])
    found = layer_limits(model, TOKENS, n_loops=n_loops, counted=counted)
    assert found.residual.shape == (5, 3, 2) and found.residual[0].isnan().all()
    kept = states * counted[..., None]
    moved = (kept[1:] - kept[:-1]).flatten(3).norm(dim=3) / kept[1:].flatten(3).norm(dim=3)
    torch.testing.assert_close(found.residual[1:], moved)
    a, b = states[-1, 0], states[-1, 2]
    torch.testing.assert_close(found.cosine[0, 2], torch.cosine_similarity(a, b, dim=-1))
    apart = 2 * (a - b).norm(dim=-1) / (a.norm(dim=-1) + b.norm(dim=-1))
    torch.testing.assert_close(found.distance[2, 0], apart)


def test_what_has_no_layers_to_compare_is_refused() -> None:
    assert why_no_layers(block(1)) == "the block has one layer" and not why_no_layers(block(2))
    assert "no hooks" in why_no_layers(LinearModel(torch.eye(2)))
    with pytest.raises(InputError, match="several layers"):
        layer_limits(block(1), TOKENS, n_loops=4)
    with pytest.raises(InputError, match="n_loops"):
        layer_limits(block(2), TOKENS, n_loops=1)


@pytest.mark.usefixtures("no_type_checks")
def test_a_model_without_hooks_is_refused() -> None:
    with pytest.raises(InputError, match="need hooks"):
        layer_limits(LinearModel(torch.eye(2)), TOKENS, n_loops=4)  # type: ignore[arg-type]
