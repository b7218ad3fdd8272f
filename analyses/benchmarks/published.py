"""Random models of the published structures: what ``adapters`` and its peers are timed on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from analyses.published_code import KINDS, module_of

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn

TOKENS, VOCAB = 32, 1000
BATCH = {"tiny": 4, "100M": 1}
"""Prompts by size: about 1 million weights, and about 100 million."""
SIZES = {
    "ouro": {
        "tiny": {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 2},
        "100M": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8},
    },
    "huginn": {
        "tiny": {"n_embd": 128, "intermediate_size": 352},
        "100M": {"n_embd": 1024, "intermediate_size": 2816},
    },
    "hrm_text": {
        "tiny": {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 2},
        "100M": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4},
    },
    "hrm": {
        "tiny": {"hidden_size": 128, "H_layers": 2, "L_layers": 2},
        "100M": {"hidden_size": 1024, "H_layers": 4, "L_layers": 4, "expansion": 4},
    },
    "trm": {
        "tiny": {"hidden_size": 128, "L_layers": 2},
        "100M": {"hidden_size": 1024, "L_layers": 8, "expansion": 4},
    },
}
HEADS = {
    "ouro": lambda n: {"num_attention_heads": n, "num_key_value_heads": n},
    "huginn": lambda n: {"n_heads": n, "block_size": TOKENS},
    "hrm_text": lambda n: {"num_attention_heads": n, "head_dim": 64},
    "hrm": lambda n: {"num_heads": n, "seq_len": TOKENS, "halt_max_steps": 1},
    "trm": lambda n: HEADS["hrm"](n),
}


def random_model(
    kind: str, file: Path | None, size: str, *, device: str = "cpu"
) -> tuple[nn.Module, Tensor]:
    """A published model with random weights, and prompts for it."""
    sizes = SIZES[kind][size]
    width = sizes.get("hidden_size", sizes.get("n_embd", 0))
    torch.manual_seed(0)
    settings = sizes | HEADS[kind](width // 64) | {"vocab_size": VOCAB}
    published = KINDS[kind].build(module_of(file), **settings).eval()
    for weight in published.parameters():
        torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
    return published.to(device), torch.randint(VOCAB, (BATCH[size], TOKENS)).to(device)
