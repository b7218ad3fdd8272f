"""A run small enough to be trained in a second, and how a folder is refused."""

from __future__ import annotations

import pytest

from loopinterp.models.config import LoopedTransformerConfig
from loopinterp.training import CurriculumConfig, OptimiserConfig, TrainingConfig
from loopinterp.training.run import RunError, RunFault

TINY = TrainingConfig(
    task="addition",
    model=LoopedTransformerConfig(
        d_model=8,
        n_heads=2,
        d_vocab=6,
        d_vocab_out=2,
        positions="relative",
        relative_window=1,
        attention_window=1,
        loop_norm=True,
        injection="input",
        initial_state="zeros",
    ),
    curriculum=CurriculumConfig(kind="interval", max_n=3, interval=5),
    optimiser=OptimiserConfig(warmup_steps=4),
    steps=24,
    batch_size=4,
    state_noise=0.1,
    log_every=2,
    checkpoint_every=5,
    device="cpu",
)
"""Addition of up to three bits, 24 steps, everything random in use."""


def refused(fault: RunFault) -> pytest.RaisesExc[RunError]:
    """The context in which a folder is refused for a reason."""
    return pytest.raises(RunError, check=lambda error: error.fault is fault)
