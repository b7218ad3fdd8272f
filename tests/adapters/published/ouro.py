"""Ouro of the package, tiny and random, and its own forward."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from loopinterp.adapters.plain.language_models import OuroConfig, OuroForCausalLM


def tiny(seed: int = 0, **sizes: int) -> OuroForCausalLM:
    """A random one; no norm or bias is at its neutral initial value."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = OuroForCausalLM(OuroConfig(**sizes))  # type: ignore[arg-type]
        for weight in model.parameters():
            if weight.dim() == 1:
                nn.init.normal_(weight, mean=1.0, std=0.2)
    return model.eval()


def native(model: OuroForCausalLM, tokens: Tensor, n_loops: int) -> Tensor:
    """Logits of the model's own forward after so many loops."""
    model.model.total_ut_steps = n_loops
    return model(tokens, use_cache=False).logits
