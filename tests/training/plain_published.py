"""The published looped transformer and its training in plain PyTorch: nothing of ours is used.

All examples run all loops, and each answer is picked out of all states: no batch shrinks, no
operation is fused, and what a step needs is written where it is used. Source: arXiv 2409.15647.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

Weights = dict[str, Tensor]


def logits_at(w: Weights, tokens: Tensor, ends: Tensor, *, n_layers: int, n_heads: int) -> Tensor:
    """``[batch, pos, class]`` of each example after its own loops, h <- LN(block(h + e)) from 0."""
    e = w["embedding.weight"][tokens]
    h, states = torch.zeros_like(e), []
    for _ in range(int(ends.max())):
        h = h + e
        for layer in range(n_layers):
            h = gpt2_layer(w, f"block.{layer}", h, n_heads)
        h = norm(w, "ln_loop", h)
        states.append(h)
    final = torch.stack(states)[ends - 1, torch.arange(len(tokens))]
    return linear(w, "unembedding", final)


def gpt2_layer(w: Weights, name: str, h: Tensor, n_heads: int) -> Tensor:
    """Attention to what is not later, and an MLP, each of the normed stream and added to it."""
    batch, n_pos, width = h.shape
    qkv = linear(w, f"{name}.attn.qkv", norm(w, f"{name}.ln1", h)).chunk(3, dim=-1)
    q, k, v = (x.reshape(batch, n_pos, n_heads, width // n_heads).transpose(1, 2) for x in qkv)
    later = torch.ones(n_pos, n_pos, dtype=torch.bool).triu(1)
    scores = (q @ k.mT / math.sqrt(width // n_heads)).masked_fill(later, -math.inf)
    z = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, n_pos, width)
    h = h + linear(w, f"{name}.attn.out", z)
    x = linear(w, f"{name}.mlp.fc_in", norm(w, f"{name}.ln2", h))
    gelu = 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return h + linear(w, f"{name}.mlp.fc_out", gelu)


def linear(w: Weights, name: str, x: Tensor) -> Tensor:
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def norm(w: Weights, name: str, x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    scale = (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    return centred / scale * w[f"{name}.weight"] + w[f"{name}.bias"]


def train_plainly(
    weights: Weights,
    batches: Iterable[tuple[Tensor, Tensor, Tensor]],
    *,
    n_layers: int,
    n_heads: int,
    n_steps: int,
    grown_at: int,
) -> Iterator[tuple[float, float, float]]:
    """Loss, norm of the gradient, and learning rate of each step.

    Args:
        weights: Where to begin; they are copied.
        batches: Tokens, targets (negative where nothing is asked) and T(n) of each example.
        n_layers: Of the block.
        n_heads: Of each layer.
        n_steps: Of the whole training: the cosine ends there.
        grown_at: Steps after which the curriculum has reached its end: the cosine begins there.
    """
    w = {name: x.detach().clone().requires_grad_() for name, x in weights.items()}
    optimiser = torch.optim.AdamW(w.values(), lr=1e-4, foreach=False)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, n_steps - grown_at)
    for step, (tokens, targets, ends) in enumerate(batches):
        logits = logits_at(w, tokens, ends, n_layers=n_layers, n_heads=n_heads)
        of_right = logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
        loss = -of_right[targets >= 0].mean()
        optimiser.zero_grad()
        loss.backward()
        length = torch.nn.utils.clip_grad_norm_(w.values(), 1.0)
        yield loss.item(), length.item(), optimiser.param_groups[0]["lr"]
        optimiser.step()
        if step >= grown_at:
            cosine.step()
