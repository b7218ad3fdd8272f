"""Attention among packed rows, and its gradients, against each example alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from loopinterp.models import LoopedTransformer, LoopedTransformerConfig
from loopinterp.models.positions import attention_mask
from loopinterp.training.packed_attention import PackedAttention, goes_by_key
from loopinterp.training.packed_examples import Packing
from tests.training.test_packed_examples import Lengths, asked_of, examples

KINDS: dict[str, dict[str, Any]] = {
    "key by key": {"attention_window": 2},
    "key by key, bias": {"attention_window": 1, "positions": "relative", "relative_window": 1},
    "squares": {},
    "squares, window": {"attention_window": 2, "windowed_heads": 1},
    "squares, bias": {"positions": "relative", "relative_window": 2},
    "squares, FIRE": {"positions": "fire"},
}


def model_of(kind: str, seed: int) -> LoopedTransformer:
    config = LoopedTransformerConfig(d_model=6, n_heads=2, d_vocab=6, d_vocab_out=2, **KINDS[kind])
    return LoopedTransformer(config, seed=seed).double()


def alone(model: LoopedTransformer, q: Any, k: Any, v: Any) -> torch.Tensor:
    """``[head, pos, d_head]`` of one example, by the definition."""
    n_pos = q.shape[1]
    place, scores = torch.arange(n_pos), q @ k.transpose(1, 2) / 3**0.5
    if model.relative_bias is not None:
        scores = scores + model.relative_bias(place[None, :, None], place[None, None])[0]
    allowed = attention_mask(model.config, n_pos, device=q.device)
    return scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ v


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=5)
@given(examples(3), st.booleans(), st.integers(0, 3))
def test_each_example_attends_as_it_does_alone(
    kind: str, drawn: Lengths, square: bool, loop: int
) -> None:
    asked = asked_of(drawn)
    models = [model_of(kind, seed) for seed in range(len(asked))]
    packing = Packing.of(asked, square=square and not goes_by_key(models[0].config))
    assume(loop < len(packing.running))
    n_examples, n_places = packing.running[loop]
    bound = [m.bind(torch.zeros(one.targets.shape[1:]).long()) for m, one in zip(models, asked)]
    attend = PackedAttention(models, bound, packing).of_loop(loop).attend
    assert attend is not None
    shape, generator = (4, len(models), 2, max(n_places), 3), torch.Generator().manual_seed(loop)
    *qkv, g = torch.randn(shape, generator=generator, dtype=torch.float64).unbind(0)
    weights = [x.requires_grad_() for x in qkv]
    weights += [w for m in models if m.relative_bias for w in m.relative_bias.parameters()]
    z, ours, theirs = attend(*qkv), [], []
    for seed, model in enumerate(models):
        for row in range(n_examples[seed]):
            start, length = (int(x[seed, row]) for x in (packing.starts, packing.lengths))
            own = slice(start, start + length)
            wanted = alone(model, *(x[seed, :, own] for x in qkv))
            torch.testing.assert_close(z[seed, :, own], wanted)
            for found, of in ((z[seed, :, own], ours), (wanted, theirs)):
                of.append((found * g[seed, :, own]).sum())
    gradients = [
        torch.autograd.grad(
            torch.stack(of).sum(), weights, retain_graph=True, materialize_grads=True
        )
        for of in (ours, theirs)
    ]
    torch.testing.assert_close(*gradients)
