"""A small model with a state code, of random weights."""

from __future__ import annotations

from loopinterp.models import LoopedTransformer, LoopedTransformerConfig


def coded(n_bits: int = 3, *, seed: int = 0, **changes) -> LoopedTransformer:
    config = LoopedTransformerConfig(
        d_model=16,
        n_heads=2,
        d_vocab=6,
        d_vocab_out=2,
        attention_window=1,
        positions="relative",
        relative_window=1,
        loop_norm=True,
        injection="input",
        initial_state="code",
        state_code=n_bits,
    ).replace(**changes)
    return LoopedTransformer(config, seed=seed)
