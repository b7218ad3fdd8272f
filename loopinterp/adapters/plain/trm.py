"""TRM in plain PyTorch: the published structure and names, written from its mathematics.

As HRM, with one stack for both parts of the state; with ``mlp_t`` an MLP over positions replaces
attention.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from loopinterp.adapters.plain.hrm import (
    ACTWrapper,
    Block,
    HRMConfig,
    InnerBase,
    ReasoningModule,
    SwiGLU,
    rms_norm,
)


@dataclass
class TRMConfig(HRMConfig):
    H_cycles: int = 2
    L_cycles: int = 3
    H_layers: int = 0  # read by nobody
    L_layers: int = 2
    mlp_t: bool = False
    puzzle_emb_len: int = 0  # 0: as many as the puzzle's vector fills
    no_ACT_continue: bool = True

    @property
    def n_puzzle_positions(self) -> int:
        return self.puzzle_emb_len or math.ceil(self.puzzle_emb_ndim / self.hidden_size)


class MixingBlock(nn.Module):
    """A layer whose positions are mixed by an MLP; the first norm is over positions too."""

    def __init__(self, config: TRMConfig) -> None:
        super().__init__()
        length = config.seq_len + config.n_puzzle_positions
        self.mlp_t = SwiGLU(length, config.expansion)
        self.mlp = SwiGLU(config.hidden_size, config.expansion)
        self.config, self.norm_eps = config, config.rms_norm_eps

    def forward(self, cos_sin: tuple[Tensor, Tensor] | None, hidden_states: Tensor) -> Tensor:
        h = hidden_states.mT
        h = rms_norm(h + self.mlp_t(h), self.norm_eps).mT
        return rms_norm(h + self.mlp(h), self.norm_eps)


class TinyRecursiveReasoningModel_ACTV1_Inner(InnerBase):
    """One stack; only the last slow cycle has a gradient."""

    def __init__(self, config: TRMConfig) -> None:
        super().__init__(config, config.n_puzzle_positions)
        layer = MixingBlock if config.mlp_t else Block
        self.L_level = ReasoningModule([layer(config) for _ in range(config.L_layers)])

    def cycles(self, z_H: Tensor, z_L: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
        turns, n_slow = self._turns(), self.config.H_cycles
        for slow in range(n_slow):
            with torch.set_grad_enabled(torch.is_grad_enabled() and slow == n_slow - 1):
                for _ in range(self.config.L_cycles):
                    z_L = self.L_level(z_L, z_H + e, turns)
                z_H = self.L_level(z_H, z_L, turns)
        return z_H, z_L


class TinyRecursiveReasoningModel_ACTV1(ACTWrapper):
    def __init__(self, config_dict: dict[str, Any]) -> None:
        config = TRMConfig(**config_dict)
        super().__init__(config, TinyRecursiveReasoningModel_ACTV1_Inner(config))
