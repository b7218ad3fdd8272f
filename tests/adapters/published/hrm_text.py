"""HRM-Text at random initialisation: the module of ``transformers`` itself, tiny."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import HrmTextConfig, HrmTextForCausalLM


def tiny(seed: int = 0, **settings: Any) -> HrmTextForCausalLM:
    """A random one."""
    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "head_dim": 16,
        "initializer_range": 0.1,
        "prefix_lm": False,
        **settings,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = HrmTextForCausalLM(HrmTextConfig(**sizes))
        torch.nn.init.normal_(model.model.z_L_init)
    return model.eval()


def native(model: HrmTextForCausalLM, tokens: Tensor, n_loops: int) -> Tensor:
    """Logits of the model's own forward after so many slow cycles."""
    cycles, model.config.H_cycles = model.config.H_cycles, n_loops
    try:
        return model(tokens, use_cache=False).logits
    finally:
        model.config.H_cycles = cycles
