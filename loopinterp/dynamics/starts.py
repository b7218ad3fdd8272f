"""States that a run to a limit starts from, in place of the model's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

OWN = "own"
"""The start that the model itself makes."""


def other_starts(
    limit: Float[Tensor, "batch pos d_model"],
    generator: torch.Generator,
    *,
    n_noise: int,
    n_others: int,
) -> dict[str, Float[Tensor, "batch pos d_model"]]:
    """Zeros, noise of the size of the limits, and the limits of other examples ("other 1": the
    next one's), by name.
    """
    starts = {"zeros": torch.zeros_like(limit)}
    starts |= {f"noise {k + 1}": noise_like(limit, generator) for k in range(n_noise)}
    return starts | {f"other {k + 1}": limit.roll(-k - 1, 0) for k in range(n_others)}


def noise_like(
    state: Float[Tensor, "batch pos d_model"], generator: torch.Generator
) -> Float[Tensor, "batch pos d_model"]:
    """A random direction at each position, as long as the state is there."""
    noise = torch.randn(state.shape, generator=generator, dtype=torch.float64)
    unit = noise / noise.norm(dim=-1, keepdim=True)
    return unit.to(state) * state.norm(dim=-1, keepdim=True)
