"""Looped models whose every state is known in closed form, for tests of what runs them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class Halving:
    """``h_0 = 1``, ``h_{t+1} = h_t + (e - h_t) * rate``, so ``h_t = e + (1 - e)(1 - rate)^t``.

    The readout is the state itself. ``rows`` counts the examples of each step.
    """

    rate: float = 0.5
    rows: list[int] = field(default_factory=list)

    def embed(self, inputs: Tensor) -> Tensor:
        return inputs

    def initial_state(self, e: Tensor) -> Tensor:
        return torch.ones_like(e)

    def step(self, h: Tensor, e: Tensor) -> Tensor:
        self.rows.append(h.shape[0])
        return h + (e - h) * self.rate

    def readout(self, h: Tensor) -> Tensor:
        return h

    def states(self, e: Tensor, n_loops: int) -> Tensor:
        """h_0 to h_T, ``[loop, batch, pos, d_model]``, from the formula."""
        decay = (1 - self.rate) ** torch.arange(n_loops + 1, dtype=e.dtype)
        return e + (1 - e) * decay[:, None, None, None]


@dataclass
class Scripted:
    """A model whose logits after t loops are given: ``[loop, batch, pos, d_vocab_out]``.

    The state counts the loops and names the example, so rows may leave in any order.
    """

    logits: Tensor
    reads: list[int] = field(default_factory=list)

    def embed(self, inputs: Tensor) -> Tensor:
        batch, n_pos = self.logits.shape[1:3]
        example = torch.arange(batch).view(-1, 1, 1).expand(batch, n_pos, 1)
        return torch.cat([torch.zeros(batch, n_pos, 1), example.float()], dim=-1)

    def initial_state(self, e: Tensor) -> Tensor:
        return e

    def step(self, h: Tensor, e: Tensor) -> Tensor:
        return h + torch.tensor([1.0, 0.0])

    def readout(self, h: Tensor) -> Tensor:
        self.reads.append(h.shape[0])
        return self.logits[h[:, 0, 0].long(), h[:, 0, 1].long()]
