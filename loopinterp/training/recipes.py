"""Configurations that are known to work."""

from __future__ import annotations

from loopinterp.models.config import LoopedTransformerConfig
from loopinterp.training.config import CurriculumConfig, ObjectiveConfig, TrainingConfig

_WINDOW_MODEL = LoopedTransformerConfig(
    d_model=64,
    n_heads=4,
    d_vocab=6,
    d_vocab_out=2,
    positions="relative",
    relative_window=1,
    attention_window=1,
    norm="pre",
    loop_norm=True,
    injection="input",
    initial_state="zeros",
    final_norm=True,
)

RECIPES: dict[str, TrainingConfig] = {
    "addition": TrainingConfig(
        task="addition",
        model=_WINDOW_MODEL,
        distribution="propagate",
        objective=ObjectiveConfig(kind="step_dependent"),
        curriculum=CurriculumConfig(max_n=12),
        steps=1000,
        state_noise=0.1,
    ),
}
