"""Looped models whose carries are known at each loop: the ground truth of the carry study."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class CarryToy(nn.Module):
    """A state of two numbers, (known, known and 1), that moves ``reach`` positions a loop.

    ``known`` says whether the bit that decides the carry into the position has been seen; a few
    idle features are added, and all are turned by a fixed rotation, so that a probe has to find
    its direction. ``frozen`` makes a model that never moves: it stays at its initial state.
    """

    def __init__(self, *, reach: int = 1, frozen: bool = False, d_model: int = 6) -> None:
        super().__init__()
        self.reach, self.frozen = reach, frozen
        basis = torch.randn(d_model, d_model, generator=torch.Generator().manual_seed(3))
        self.rotation = nn.Parameter(torch.linalg.qr(basis).Q)

    def embed(self, inputs: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(inputs, self.rotation.shape[0]).float()

    def initial_state(self, e: Tensor) -> Tensor:
        return torch.zeros_like(e)

    def step(self, h: Tensor, e: Tensor) -> Tensor:
        if self.frozen:
            return h
        token = e.argmax(-1)
        propagates, generates = (token == 1) | (token == 2), token == 3
        known, one = ((h @ self.rotation.T)[..., :2] > 0.5).unbind(-1)
        for _ in range(self.reach):
            known, one = ~propagates | known, generates | (propagates & known & one)
            known = torch.cat([torch.ones_like(known[:, :1]), known[:, :-1]], dim=1)
            one = torch.cat([torch.zeros_like(one[:, :1]), one[:, :-1]], dim=1)
        state = torch.zeros_like(h)
        state[..., 0], state[..., 1] = known.float(), (known & one).float()
        return state @ self.rotation

    def readout(self, h: Tensor) -> Tensor:
        return h
