"""Huginn of the package, tiny and random, and its own forward."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from loopinterp.adapters.plain.language_models import RavenConfig, RavenForCausalLM


def tiny(seed: int = 0, **sizes: int) -> RavenForCausalLM:
    """A random one; no norm or bias is at its neutral initial value."""
    sizes = {"n_layers_in_recurrent_block": 3, "mean_recurrence": 3} | sizes
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = RavenForCausalLM(RavenConfig(**sizes))  # type: ignore[arg-type]
        for name, weight in model.named_parameters():
            if weight.dim() == 1 or "qk_bias" in name:
                nn.init.normal_(weight, mean=1.0, std=0.2)
            elif weight.dim() == 2:
                nn.init.normal_(weight, std=0.5 / math.sqrt(weight.shape[1]))
    return model.eval()


def native(
    model: RavenForCausalLM, tokens: Tensor, n_loops: int, *, start: Tensor | None = None
) -> Tensor:
    """Logits of the model's own forward after so many loops from a given start."""
    return model(tokens, input_states=start, num_steps=n_loops).logits
