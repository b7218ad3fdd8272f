"""What stands in the place of an ablated activation: zeros, means, another example's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, get_args

import torch

from loopinterp.errors import InputError, check_choice

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from loopinterp.circuits.ablated_parts import Site

MeanOver = Literal["position", "token", "all"]


def reference_values(
    kept: Mapping[Site, Float[Tensor, "loop batch pos ..."]],
    inputs: Tensor,
    kinds: Sequence[str],
    mean_over: MeanOver,
    generator: torch.Generator,
) -> dict[str, dict[Site, Float[Tensor, "loop batch pos ..."]]]:
    """For each kind of ablation and site, what is put in.

    Each example is given another one's activation by one cycle through all of them, in an order
    drawn at random, so that none is given its own.

    Args:
        kept: Activations of the undisturbed run.
        inputs: What it read, ``[batch, pos]``.
        kinds: Kinds of ablation.
        mean_over: What a mean is over.
        generator: Draws the order.

    Raises:
        InputError: an unknown ``mean_over``, or ``token`` of inputs that are none.
    """
    check_choice("mean_over", mean_over, get_args(MeanOver))
    if mean_over == "token" and inputs.is_floating_point():
        raise InputError(
            "mean_over",
            expected="position or all, as the model reads no tokens",
            given="'token'",
            fix="Leave it out.",
        )
    order = torch.randperm(len(inputs), generator=generator)
    other = torch.empty_like(order)
    other[order] = order.roll(1)
    made = {
        "zero": torch.zeros_like,
        "mean": lambda x: _mean(x, inputs, mean_over),
        "resample": lambda x: x[:, other.to(x.device)],
    }
    return {kind: {site: made[kind](x) for site, x in kept.items()} for kind in kinds}


def _mean(
    x: Float[Tensor, "loop batch pos ..."], inputs: Tensor, over: MeanOver
) -> Float[Tensor, "loop batch pos ..."]:
    if over != "token":
        return x.mean((1,) if over == "position" else (1, 2), keepdim=True).expand_as(x)
    tokens, number = inputs.unique(return_inverse=True)
    flat, number = x.flatten(1, 2), number.flatten()
    sums = flat.new_zeros(len(flat), len(tokens), *flat.shape[2:]).index_add(1, number, flat)
    counts = number.bincount(minlength=len(tokens)).view(1, -1, *[1] * (flat.ndim - 2))
    return (sums / counts)[:, number].view_as(x)
