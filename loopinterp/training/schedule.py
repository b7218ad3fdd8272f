"""The learning rate at each step: warm-up, then constant, then down to zero at the end."""

from __future__ import annotations

import math

from loopinterp.training.config import OptimiserConfig


def learning_rate_factor(
    optimiser: OptimiserConfig, *, step: int, n_steps: int, curriculum_done_at: int | None
) -> float:
    """What the peak learning rate is multiplied with.

    ``linear``: up over ``warmup_steps``, constant, and linearly down to 0 over the last
    ``decay`` share of the steps. ``cosine``: up, constant while the curriculum grows, and from
    there down to 0 along half a cosine (arXiv 2409.15647). ``constant``: up, then constant.

    Args:
        optimiser: The schedule's settings.
        step: Index of the step, from 0.
        n_steps: Steps of the whole run.
        curriculum_done_at: Step at which the curriculum reached its end, or None.

    Example:
        >>> settings = OptimiserConfig(warmup_steps=10, decay=0.5)
        >>> [learning_rate_factor(settings, step=s, n_steps=100, curriculum_done_at=None)
        ...  for s in (0, 9, 50, 75, 99)]
        [0.1, 1.0, 1.0, 0.5, 0.02]
    """
    warm = min(1.0, (step + 1) / optimiser.warmup_steps) if optimiser.warmup_steps else 1.0
    if optimiser.schedule == "linear" and optimiser.decay > 0:
        return warm * min(1.0, (n_steps - step) / (optimiser.decay * n_steps))
    if optimiser.schedule == "cosine" and curriculum_done_at is not None:
        span = max(n_steps - curriculum_done_at, 1)
        return warm * 0.5 * (1 + math.cos(math.pi * (step - curriculum_done_at) / span))
    return warm
