"""Cyclic fixed points: whether each layer of the block has a limit of its own."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from loopinterp.dynamics.measures import share_of_size
from loopinterp.errors import InputError, check_integer
from loopinterp.models.looped_model import need_hooks
from loopinterp.short_repr import ShortRepr

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

    from loopinterp.models.hooked_run import HookedRun


@dataclass(frozen=True, repr=False)
class LayerLimits(ShortRepr):
    r"""The states :math:`s_l` after each layer of the block, as they are in the last loop.

    Attributes:
        residual: :math:`\|s_l^t - s_l^{t-1}\| / \|s_l^t\|` at every loop, over the positions of an
            example; NaN at loop 0.
        cosine: :math:`\cos(s_l, s_m)` of each pair of layers at the last loop.
        distance: :math:`\|s_l - s_m\|`, over the mean of the two norms: the cosine of states that
            share a large part is near 1 however far they are apart, against what still moves.
    """

    residual: Float[Tensor, "loop layer batch"]
    cosine: Float[Tensor, "layer other batch pos"]
    distance: Float[Tensor, "layer other batch pos"]


@torch.no_grad()
def layer_limits(
    model: HookedRun,
    inputs: Tensor,
    *,
    n_loops: int,
    counted: Bool[Tensor, "batch pos"] | None = None,
) -> LayerLimits:
    """Follow the state after every layer of the block, of which only the last loop's is kept.

    Where residuals vanish and distances do not, the block goes round a cycle of distinct points;
    where distances vanish too, its layers have collapsed to one. States are those of
    ``hook_resid_post``, before the loop norm.

    Args:
        model: A hooked looped model with at least two layers in its block.
        inputs: Tokens or features.
        n_loops: Loops of the run, at least 2.
        counted: Positions that residuals are over; all by default.

    Raises:
        InputError: If the model has no hooks, or one layer; or there are too few loops.

    Source: arXiv 2604.11791.
    """
    if why := why_no_layers(model):
        need_hooks(model)
        raise InputError(
            "model",
            expected="a block of several layers, whose limits are compared",
            given=why,
            fix="Use convergence_study, which follows the state between loops.",
        )
    check_integer("n_loops", n_loops, least=2)
    n_layers = model.site_map.n_layers
    held: deque[Tensor] = deque(maxlen=n_layers)
    residuals: list[Tensor] = []

    def follow(state: Tensor, hook: object) -> None:
        kept = state if counted is None else torch.where(counted[..., None], state, 0)
        if len(held) == n_layers:  # the first is the state after this layer, a loop ago
            before = held[0] if counted is None else torch.where(counted[..., None], held[0], 0)
            moved = (kept - before).flatten(1).norm(dim=1)
            residuals.append(share_of_size(moved, kept.flatten(1).norm(dim=1)).float())
        held.append(state)

    every = slice(None)
    names = model.site("resid_post", loop=every, layer=every, n_loops=n_loops)
    hooks = [(name, follow) for name in names]
    model.run_with_hooks(inputs, n_loops=n_loops, return_type="state", fwd_hooks=hooks)
    residual = torch.stack(residuals).unflatten(0, (-1, n_layers))
    missing = torch.full_like(residual[:1], float("nan"))
    last = torch.stack([*held])
    cosine = torch.cosine_similarity(last[:, None], last[None], dim=-1)
    size = last.norm(dim=-1)
    apart = torch.stack([(last - state).norm(dim=-1) for state in last])
    distance = share_of_size(apart, (size[:, None] + size[None]) / 2)
    return LayerLimits(torch.cat([missing, residual]), cosine.float(), distance.float())


def why_no_layers(model: Any) -> str:
    """Why the layers of a block cannot be told apart, as a clause; "" if they can."""
    if not hasattr(model, "run_with_hooks") or not hasattr(model, "site"):
        return f"{type(model).__name__} has no hooks inside its loop"
    return "" if model.site_map.n_layers > 1 else "the block has one layer"
