"""Linear maps and norms of one model, or of several at once whose weights are stacked.

The weights of several models of one configuration have an axis more, ``[model, ...]``, and are
given ``[model, row, feature]``: the rows of each model meet its own weights, in one operation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


def linear(
    x: Float[Tensor, "*row d_in"],
    weight: Float[Tensor, "*model d_out d_in"],
    bias: Float[Tensor, "*model d_out"] | None = None,
) -> Float[Tensor, "*row d_out"]:
    """``x W^T + b``; with weights ``[model, d_out, d_in]``, of each model.

    Example:
        >>> x, weight = torch.ones(2, 3, 4), torch.stack([torch.eye(4), 2 * torch.eye(4)])
        >>> linear(x, weight, torch.zeros(2, 4))[:, 0, 0].tolist()
        [1.0, 2.0]
    """
    if weight.dim() == 2:
        return F.linear(x, weight, bias)
    if bias is None:
        return torch.bmm(x, weight.transpose(1, 2))
    return torch.baddbmm(bias[:, None], x, weight.transpose(1, 2))


class Linear(nn.Linear):
    """``x W^T + b`` of one model or of several; as a module, so that it is called.

    Whatever others put in its place or around it (an adapter, a hook, a parametrisation) is then
    part of what the model computes.
    """

    def forward(self, input: Float[Tensor, "*row d_in"]) -> Float[Tensor, "*row d_out"]:
        weight = self.weight
        if weight.dim() == 2:  # of one model, as linear() does, with a call less
            return F.linear(input, weight, self.bias)
        return linear(input, weight, self.bias)


def norm(
    x: Float[Tensor, "*row d_model"],
    weight: Float[Tensor, "*model d_model"],
    bias: Float[Tensor, "*model d_model"] | None,
    eps: float,
) -> Float[Tensor, "*row d_model"]:
    """LayerNorm, or RMSNorm where there is no bias; with weights ``[model, d_model]``, of each."""
    width = weight.shape[-1:]
    if weight.dim() == 1:
        if bias is None:
            return F.rms_norm(x, width, weight, eps)
        return F.layer_norm(x, width, weight, bias, eps)
    if bias is None:
        return F.rms_norm(x, width, None, eps) * weight[:, None]
    ones = torch.ones_like(weight[0])  # on a CPU quicker than none at all
    return torch.addcmul(bias[:, None], F.layer_norm(x, width, ones, None, eps), weight[:, None])
