"""Muon: momentum with orthogonalised steps, for matrices."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jaxtyping import Bool, Float
    from torch import Tensor, nn

_MOMENTUM = 0.95
_RMS = 0.2  # root mean square of an entry of AdamW's steps, which those of Muon get too
# X <- a X + b (X X^T) X + c (X X^T)^2 X brings all singular values from 0.003 on near 1 in 5 steps.
_A, _B, _C, _ITERATIONS = 3.4445, -4.7750, 2.0315, 5


def matrices_of_layers(model: nn.Module) -> dict[str, nn.Parameter]:
    """The matrices of attention and MLPs, without embeddings and readout."""
    layers = "prelude.", "block.", "coda."
    named = model.named_parameters()
    return {name: p for name, p in named if name.startswith(layers) and p.dim() == 2}


class Muon(torch.optim.Optimizer):
    """Momentum whose steps are orthogonalised.

    ``M <- .95 M + .05 G``, ``W <- (1 - lr weight_decay) W - lr 0.2 sqrt(max(rows, columns)) O``,
    where ``O`` is ``.95 M + .05 G`` with all singular values near 1. Packed queries, keys and
    values are three matrices. Unlike ``torch.optim.Muon`` it orthogonalises all matrices of a shape
    at once, in their own precision, and takes :attr:`found_inf`: where 1, a step changes nothing.

    Source: K. Jordan et al. (2024), Muon; scale of the steps from arXiv 2502.16982.
    """

    found_inf: Float[Tensor, ""] | None = None

    def __init__(
        self, matrices: Mapping[str, nn.Parameter], *, lr: float, weight_decay: float
    ) -> None:
        super().__init__(matrices.values(), {"lr": lr, "weight_decay": weight_decay})
        packed = ".qkv.weight"
        self._n_parts = {p: 3 if name.endswith(packed) else 1 for name, p in matrices.items()}
        for matrix in matrices.values():
            self.state[matrix] = {"momentum": torch.zeros_like(matrix)}

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        lr, decay = group["lr"], group["weight_decay"]
        matrices = [p for p in group["params"] if p.grad is not None]
        spoiled = None if self.found_inf is None else self.found_inf > 0
        steps = []  # of each matrix: its gradient with the momentum, orthogonalised below
        for matrix in matrices:
            momentum = self.state[matrix]["momentum"]
            new = momentum.lerp(matrix.grad, 1 - _MOMENTUM)
            _set(momentum, new, unless=spoiled)
            steps.append(matrix.grad.lerp(new, _MOMENTUM))
        # Parts of the steps by shape, so that those of one shape are one batch
        by_shape = defaultdict(list)
        for matrix, step in zip(matrices, steps):
            for part in step.chunk(self._n_parts[matrix]):
                by_shape[part.shape].append(part)
        for shape, parts in by_shape.items():
            scale = _RMS * math.sqrt(max(shape))  # the size of a step of AdamW
            for part, turned in zip(parts, scale * orthogonalise(torch.stack(parts))):
                part.copy_(turned)
        for matrix, step in zip(matrices, steps):
            _set(matrix, matrix * (1 - lr * decay) - lr * step, unless=spoiled)


def _set(old: Tensor, new: Tensor, *, unless: Bool[Tensor, ""] | None) -> None:
    # A choice on the device, without waiting to learn whether the step was finite.
    old.copy_(new if unless is None else torch.where(unless, old, new))


def orthogonalise(
    matrices: Float[Tensor, "*batch rows columns"],
) -> Float[Tensor, "*batch rows columns"]:
    """``U V^T`` of each matrix ``U S V^T``, with singular values between about 0.7 and 1.2.

    Newton-Schulz iteration of degree 5. Singular values below about 0.003 of the matrix's norm stay
    smaller.
    """
    rows, columns = matrices.shape[-2:]
    x = matrices.mT if rows > columns else matrices  # the smaller Gram matrix
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = _A * x + (_B * gram + _C * gram @ gram) @ x
    return x.mT if rows > columns else x
