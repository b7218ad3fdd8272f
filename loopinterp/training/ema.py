"""Exponential moving average of the weights: what a run is evaluated and saved with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn

if TYPE_CHECKING:
    from jaxtyping import Bool
    from torch import Tensor, nn


class Ema:
    """Running average of a model's parameters.

    ``shadow <- decay_t * shadow + (1 - decay_t) * weights`` after each optimiser step, with
    ``decay_t = min(decay, (1 + t) / (10 + t))``, so that the random initial weights are
    forgotten at once.

    Args:
        model: Whose parameters to average.
        decay: The decay that ``decay_t`` rises to, in [0, 1); 0 keeps the weights themselves.

    Example:
        >>> layer = torch.nn.Linear(1, 1, bias=False)
        >>> ema = Ema(layer, decay=0.0)
        >>> _ = torch.nn.init.constant_(layer.weight, 5.0)
        >>> ema.update()
        >>> ema.shadow["weight"].item()
        5.0
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.n_updates = 0
        self._live = dict(model.named_parameters())
        self.shadow: dict[str, Tensor] = {k: v.detach().clone() for k, v in self._live.items()}

    @torch.no_grad()
    def update(self, *, unless: Bool[Tensor, ""] | None = None) -> None:
        """Take in the current weights; where ``unless`` is true, nothing of them."""
        decay = min(self.decay, (1 + self.n_updates) / (10 + self.n_updates))
        average = get_ema_multi_avg_fn(decay)
        shadow: list[Tensor] = list(self.shadow.values())
        live: list[Tensor] = list(self._live.values())
        if unless is not None:
            live = [torch.where(unless, old, new) for old, new in zip(shadow, live)]
        average(shadow, live, torch.tensor(0))
        self.n_updates += 1
