"""Small models that between them use every axis of the configuration."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from loopinterp.models import LoopedTransformer, LoopedTransformerConfig

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "demo": {
        "positions": "relative",
        "relative_window": 1,
        "attention_window": 1,
        "loop_norm": True,
        "injection": "input",
        "initial_state": "zeros",
    },
    "sandwich rotary": {
        "norm": "sandwich",
        "injection": "sublayer",
        "positions": "rotary",
        "n_layers": 2,
    },
    "post rms": {
        "norm": "post",
        "injection": "internal",
        "norm_type": "rmsnorm",
        "initial_state": "noise",
    },
    "gated": {"norm": "gated", "injection": "concat", "initial_state": "zeros", "n_layers": 2},
    "surround": {
        "injection": "concat",
        "initial_state": "zeros",
        "n_prelude": 1,
        "n_coda": 2,
        "n_layers": 2,
        "positions": "absolute",
        "n_ctx": 20,
    },
    "abacus on q and k": {
        "injection": "gated_output",
        "positions": "abacus",
        "n_ctx": 30,
        "digit_tokens": (1, 2, 3),
        "abacus_target": "qk",
    },
    "abacus on input": {"positions": "abacus", "n_ctx": 30, "digit_tokens": (1, 2, 3)},
    "abacus window": {
        "injection": "sublayer",
        "positions": "abacus",
        "n_ctx": 30,
        "digit_tokens": (0, 1, 2, 3),
        "abacus_window": 1,
        "abacus_signs": True,
        "abacus_target": "attention",
        "n_prelude": 1,
    },
    "no norm, both ways": {"norm": "none", "final_norm": False, "causal": False},
    "fire": {"positions": "fire", "fire_threshold": 3.0, "n_layers": 2},
    "mixed windows": {"attention_window": 1, "windowed_heads": 1, "positions": "rotary"},
    "window in the loop only": {
        "attention_window": 1,
        "windowed_surround": False,
        "positions": "relative",
        "relative_window": 2,
        "n_prelude": 1,
        "n_coda": 1,
        "injection": "input",
        "initial_state": "zeros",
    },
    "features": {"d_vocab": None, "d_features": 2, "act_fn": "relu", "n_layers": 2},
    "tied": {"d_vocab_out": 6, "tie_unembed": True, "unembed_bias": False, "act_fn": "silu"},
}


def build(name: str, *, seed: int = 0, **changes: Any) -> LoopedTransformer:
    """One of the variants, 16 wide with 2 heads and 6 tokens."""
    settings = {"d_model": 16, "n_heads": 2, "d_vocab": 6, "d_vocab_out": 3, **VARIANTS[name]}
    return LoopedTransformer(LoopedTransformerConfig(**{**settings, **changes}), seed=seed)


def some_inputs(model: LoopedTransformer, batch: int = 3, n_pos: int = 7, seed: int = 0) -> Tensor:
    """Random inputs of the kind that the model reads."""
    generator = torch.Generator().manual_seed(seed)
    if model.config.token_input:
        return torch.randint(0, 6, (batch, n_pos), generator=generator)
    return torch.randint(0, 2, (batch, n_pos, 2), generator=generator).float()
