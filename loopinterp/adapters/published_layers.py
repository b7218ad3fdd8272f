"""Parts of the layers of published models, with taps: norms, gated MLPs, heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from loopinterp.models.site_map import norm_sites
from loopinterp.models.taps import SILENT, Tap

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from loopinterp.models.site_map import Sites

KV = "kv_head"


def layer_sites(
    *,
    before: bool,
    after: bool,
    rotary: bool = True,
    grouped: bool = False,
    gate: str | None = None,
) -> Sites:
    """Components of a layer with a gated MLP, in the order they fire.

    Args:
        before: Whether a norm stands before attention and before the MLP (``ln1``, ``ln2``).
        after: Whether one stands after them (``ln1_post``, ``ln2_post``), on their output or on
            its sum with the stream.
        rotary: Whether queries and keys are turned.
        grouped: Whether keys and values have fewer heads than queries.
        gate: The kind of the gate on what heads read, where there is one (``attn.hook_gate``).
    """
    kv = KV if grouped else "head"
    return {
        "hook_resid_pre": "residual",
        **norm_sites("ln1", present=before),
        "attn.hook_q": "head",
        "attn.hook_k": kv,
        "attn.hook_v": kv,
        **({"attn.hook_rot_q": "head", "attn.hook_rot_k": kv} if rotary else {}),
        "attn.hook_attn_scores": "pattern",
        "attn.hook_pattern": "pattern",
        "attn.hook_z": "head",
        **({} if gate is None else {"attn.hook_gate": gate}),
        **norm_sites("ln1_post", present=after),
        "hook_attn_out": "residual",
        "hook_resid_mid": "residual",
        **norm_sites("ln2", present=before),
        "mlp.hook_pre": "neuron",
        "mlp.hook_pre_linear": "neuron",
        "mlp.hook_post": "neuron",
        **norm_sites("ln2_post", present=after),
        "hook_mlp_out": "residual",
        "hook_resid_post": "residual",
    }


def rms_norm(
    x: Float[Tensor, "*place d_model"],
    weight: Float[Tensor, " d_model"] | None,
    eps: float,
    tap: Tap = SILENT,
    name: str = "",
) -> Float[Tensor, "*place d_model"]:
    r"""``x / sqrt(mean(x^2) + eps) * weight``, the quotient in float32; hooks see it, and the root.

    Example:
        >>> rms_norm(torch.tensor([[3.0, 4.0]]), None, 0.0)
        tensor([[0.8485, 1.1314]])
    """
    wide, scale_name = x.float(), f"{name}.hook_scale"
    power = wide.square().mean(-1, keepdim=True) + eps
    if tap.edits(scale_name):
        wide = wide / tap(scale_name, power.sqrt().to(x.dtype)).float()
    else:  # the root that is recorded may be rounded, the quotient's is not
        wide = wide * power.rsqrt()
        if tap.listens(scale_name):
            tap(scale_name, power.sqrt().to(x.dtype))
    normalized = tap(f"{name}.hook_normalized", wide.to(x.dtype))
    return normalized if weight is None else normalized * weight


def split_heads(
    x: Float[Tensor, "batch pos width"], d_head: int
) -> Float[Tensor, "batch head pos d_head"]:
    """The features of each head."""
    return x.unflatten(-1, (-1, d_head)).transpose(1, 2)


def join_heads(z: Float[Tensor, "batch head pos d_head"]) -> Float[Tensor, "batch pos width"]:
    """The features of all heads, side by side."""
    return z.transpose(1, 2).flatten(2)


def gated(
    pre: Float[Tensor, "batch pos d_mlp"],
    linear: Float[Tensor, "batch pos d_mlp"],
    act_fn: Callable[[Tensor], Tensor],
    tap: Tap = SILENT,
) -> Float[Tensor, "batch pos d_mlp"]:
    """``act(pre) * linear``: the neurons of a gated MLP."""
    pre, linear = tap("mlp.hook_pre", pre), tap("mlp.hook_pre_linear", linear)
    return tap("mlp.hook_post", act_fn(pre) * linear)


def rotate_halves(
    x: Float[Tensor, "batch head pos d_head"], rotation: tuple[Tensor, Tensor]
) -> Float[Tensor, "batch head pos d_head"]:
    """Turn the pairs ``(i, i + d_head / 2)`` by the angle of their position."""
    cos, sin = rotation
    first, second = x.chunk(2, -1)
    return (x * cos + torch.cat((-second, first), -1) * sin).to(x.dtype)
