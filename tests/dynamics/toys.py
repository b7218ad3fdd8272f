"""Looped models whose fixed points, rates and answers are known exactly."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from loopinterp.models import Iteration, LoopedTransformer, LoopedTransformerConfig, bind
from loopinterp.tasks import IGNORE, Batch


class LinearModel:
    """``step(h, e) = A h + e`` from zeros: the limit is ``(I - A)^-1 e``, the Jacobian is ``A``.

    The first feature of ``e`` is the token, the rest are ones. The readout gives class 1 as soon
    as the first feature of the state exceeds ``threshold``.
    """

    def __init__(self, matrix: Tensor, threshold: float = 0.0) -> None:
        self.matrix, self.threshold = matrix, threshold

    def embed(self, inputs: Tensor) -> Tensor:
        e = torch.ones(*inputs.shape, len(self.matrix), dtype=self.matrix.dtype)
        e[..., 0] = inputs.to(e)
        return e

    def initial_state(self, e: Tensor) -> Tensor:
        return torch.zeros_like(e)

    def step(self, h: Tensor, e: Tensor) -> Tensor:
        return h @ self.matrix.T + e

    def readout(self, h: Tensor) -> Tensor:
        return torch.stack([torch.full_like(h[..., 0], self.threshold), h[..., 0]], dim=-1)

    def limit(self, inputs: Tensor) -> Tensor:
        identity = torch.eye(len(self.matrix), dtype=self.matrix.dtype)
        return torch.linalg.solve(identity - self.matrix, self.embed(inputs)[..., None])[..., 0]


class MapModel(LinearModel):
    """Any map of the state and the input in place of the linear one."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], d_model: int = 2) -> None:
        super().__init__(torch.zeros(d_model, d_model))
        self.function = function

    def step(self, h: Tensor, e: Tensor) -> Tensor:
        return self.function(h, e)


def rotation(angle: float, scale: float = 1.0) -> Tensor:
    """A rotation of the plane, scaled."""
    c, s = scale * math.cos(angle), scale * math.sin(angle)
    return torch.tensor([[c, -s], [s, c]])


def batch_of_ones(n_examples: int = 2, n_pos: int = 3, *, ignored: int = 1) -> Batch:
    """Tokens and targets 1; nothing is asked at the first ``ignored`` positions; T(n) is 4."""
    targets = torch.ones(n_examples, n_pos, dtype=torch.int64)
    targets[:, :ignored] = IGNORE
    each = torch.full((n_examples,), n_pos)
    return Batch(torch.ones(n_examples, n_pos, dtype=torch.int64), targets, each, each * 0 + 4)


TRANSFORMERS: list[dict[str, object]] = [
    {"loop_norm": True},
    {"causal": False, "norm": "sandwich", "norm_type": "rmsnorm"},
    {"positions": "relative", "relative_window": 1, "attention_window": 1},
    {"positions": "rotary", "act_fn": "relu", "n_layers": 2},
]
"""Small models whose dense Jacobians are quick."""


def small_transformer(**options: object) -> Iteration:
    """An untrained one in float64, bound to three inputs of four tokens; width 8."""
    config = LoopedTransformerConfig(
        d_model=8,
        n_heads=2,
        d_vocab=5,
        d_vocab_out=2,
        injection="input",
        initial_state="zeros",
        **options,  # pyright: ignore[reportArgumentType]
    )
    model = LoopedTransformer(config, seed=1).double()
    return bind(model, torch.tensor([[0, 1, 2, 3], [4, 3, 2, 1], [1, 1, 4, 0]]))


def random_state(*shape: int) -> Tensor:
    """Normal numbers in float64, the same each time."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def linear(matrix: Tensor) -> Callable[[Tensor], Tensor]:
    """``h -> A h`` on the state of each example as one vector, whatever its axes."""
    return lambda h: (h.flatten(1) @ matrix.T).reshape(h.shape)
