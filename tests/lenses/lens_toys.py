"""Looped models whose lenses are known, and small transformers of every kind that a lens meets."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from loopinterp.models import LoopedTransformer, LoopedTransformerConfig


class Affine:
    """``h_0 = e = x``, ``h_{t+1} = M h_t + c``: the state at the end is M^k h + … of any other.

    The readout has more classes than the state has dimensions, so that a softmax tells all states
    apart.
    """

    def __init__(self, width: int = 3, classes: int = 8, seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)
        turn = torch.linalg.qr(torch.randn(width, width, generator=g)).Q
        self.M = turn @ torch.diag(torch.linspace(0.8, 1.2, width)) @ turn.T
        self.c = 0.3 * torch.randn(width, generator=g)
        self.W = torch.randn(width, classes, generator=g)

    def embed(self, inputs: Tensor) -> Tensor:
        return inputs

    def initial_state(self, e: Tensor) -> Tensor:
        return e.clone()

    def step(self, h: Tensor, e: Tensor) -> Tensor:
        return h @ self.M.T + self.c

    def readout(self, h: Tensor) -> Tensor:
        return h @ self.W

    def to_the_end(self, n_left: int) -> tuple[Tensor, Tensor]:
        """A and b of ``n_left`` loops together."""
        A, b = torch.eye(len(self.M)), torch.zeros(len(self.M))
        for _ in range(n_left):
            A, b = self.M @ A, self.M @ b + self.c
        return A, b


class Scripted:
    """A looped model whose logits are given: ``[loop, example, pos, class]``.

    An input is the number of its example, at each position. The state counts loops and holds it.
    """

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits
        examples = torch.arange(logits.shape[1])[:, None]
        self.inputs = examples.expand(-1, logits.shape[2]).clone()

    def embed(self, inputs: Tensor) -> Tensor:
        return torch.stack([torch.zeros(inputs.shape), inputs.float()], dim=-1)

    def initial_state(self, e: Tensor) -> Tensor:
        return e.clone()

    def step(self, h: Tensor, e: Tensor) -> Tensor:
        return h + torch.tensor([1.0, 0.0])

    def readout(self, h: Tensor) -> Tensor:
        loop, example = (h[:, 0, k].round().long() for k in (0, 1))
        n_loops, n_examples = self.logits.shape[:2]
        return self.logits[loop.clamp(0, n_loops - 1), example.clamp(0, n_examples - 1)]


def inputs(n_examples: int = 64, n_pos: int = 2, width: int = 3, seed: int = 1) -> Tensor:
    return torch.randn(n_examples, n_pos, width, generator=torch.Generator().manual_seed(seed))


KINDS: dict[str, dict[str, Any]] = {
    "plain": {"injection": "none", "initial_state": "embedding"},
    "loop norm": {"loop_norm": True, "n_layers": 2},
    "gated": {"injection": "gated_output", "n_layers": 2},
    "gated, loop norm": {"injection": "gated_output", "loop_norm": True},
    "concat, post": {"injection": "concat", "norm": "post"},
    "no final norm": {"final_norm": False, "loop_norm": True},
    "prelude and coda": {"n_prelude": 1, "n_coda": 1, "n_layers": 2, "loop_norm": True},
}


def transformer(kind: str = "plain", **changes: Any) -> LoopedTransformer:
    settings: dict[str, Any] = {"d_model": 8, "n_heads": 2, "d_vocab": 5, "d_vocab_out": 4}
    model = LoopedTransformer(LoopedTransformerConfig(**(settings | KINDS[kind] | changes)), seed=0)
    if model.gate is not None:
        torch.nn.init.constant_(model.gate, 0.7)  # large enough to be missed
    return model


def tokens(n_examples: int = 6, n_pos: int = 4, seed: int = 0) -> Tensor:
    return torch.randint(0, 5, (n_examples, n_pos), generator=torch.Generator().manual_seed(seed))


def end_by_hook(model: Any, inputs: Tensor, x: Tensor, last: str, span: dict[str, Any]) -> Tensor:
    """The state after a loop whose last layer, with the hook ``last``, puts out x."""
    hooks = [(last, lambda residual, hook: x)]
    return model.run_with_hooks(inputs, fwd_hooks=hooks, return_type="state", **span)
