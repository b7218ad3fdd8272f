"""The explicit path: the same layer as the fast path, with every activation open to hooks.

Nothing is written in place, so a cache need not clone. Each part falls back to the fused
operation where nobody listens: attention is fused unless scores or pattern are hooked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from loopinterp.models.layers import Layer, LayerFunction, Norm
from loopinterp.models.positions import AttentionContext, rotate

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor
    from transformer_lens.hook_points import HookPoint

    from loopinterp.models.layers import Attention


class Tap:
    """What happens at the hooks of one layer, one loop, or the top of the model.

    Calling it passes an activation through the hook's functions, and records it if wanted.
    """

    def __init__(self, prefix: str, taps: Taps) -> None:
        self._prefix, self._taps = prefix, taps
        self._points: dict[str, HookPoint] = {}
        self._wanted: set[str] = set()

    def __call__(self, component: str, x: Tensor) -> Tensor:
        point = self._points.get(component)
        if point is not None:
            # Hooks of TransformerLens write in place; what they get must be nobody else's.
            x = point(x.clone())
        if component in self._wanted:
            self._taps.record(self._prefix + component, x)
        return x

    def listens(self, *components: str) -> bool:
        """Whether any of the components has a hook or is recorded."""
        return any(c in self._points or c in self._wanted for c in components)

    def edits(self, *components: str) -> bool:
        """Whether any of the components has a hook, which may change it, or needs a gradient."""
        return any(
            c in self._points or (self._taps.gradients and c in self._wanted) for c in components
        )

    def only(self, *components: str) -> bool:
        """Whether nothing but these components has a hook or is recorded."""
        return self._wanted.issubset(components) and self._points.keys() <= set(components)

    def add(self, component: str, point: HookPoint | None) -> None:
        """Fire a hook point here, or (None) record."""
        if point is None:
            self._wanted.add(component)
        else:
            self._points[component] = point


class Taps:
    """The active hooks of a run, grouped by where they stand.

    Args:
        points: The hook points of the run that carry functions, by name.
        wanted: Names to record.
        record: Called with name and activation for each name wanted.
        gradients: Whether gradients of what is recorded will be asked for.
    """

    def __init__(
        self,
        points: Mapping[str, HookPoint],
        wanted: Iterable[str] = (),
        record: Callable[[str, Tensor], None] = lambda name, x: None,
        gradients: bool = False,
    ) -> None:
        self.record, self.gradients = record, gradients
        self._taps: dict[str, Tap] = {}
        for name, point in points.items():
            self._add(name, point)
        for name in wanted:
            self._add(name, None)

    def __bool__(self) -> bool:
        return bool(self._taps)

    def _add(self, name: str, point: HookPoint | None) -> None:
        parts = name.split(".", 2)
        numbered = parts[0] in ("blocks", "loops")
        prefix, component = (f"{parts[0]}.{parts[1]}.", parts[2]) if numbered else ("", name)
        if prefix not in self._taps:
            self._taps[prefix] = Tap(prefix, self)
        self._taps[prefix].add(component, point)

    def at(self, prefix: str) -> Tap | None:
        """The tap under a prefix ("blocks.3.", "loops.1.", ""), None where nobody listens."""
        return self._taps.get(prefix)


def tapped_norm(norm: Norm, x: Tensor, tap: Tap | None, name: str) -> Tensor:
    """A norm with its scale and its normalized vector open.

    ``scale = sqrt(var(x) + eps)`` (or the root mean square) and ``normalized = centred / scale``,
    before weight and bias, as in TransformerLens.
    """
    scale_name, normalized_name = f"{name}.hook_scale", f"{name}.hook_normalized"
    if tap is None or not tap.listens(scale_name, normalized_name):
        return norm(x)
    if norm.bias is not None and not tap.edits(scale_name):
        # One fused operation gives both, as long as nobody may change the scale.
        normalized, _, inverse = torch.native_layer_norm(x, x.shape[-1:], None, None, norm.eps)
        tap(scale_name, inverse.reciprocal())
    else:
        centred = x if norm.bias is None else x - x.mean(-1, keepdim=True)
        scale = (centred.pow(2).mean(-1, keepdim=True) + norm.eps).sqrt()
        normalized = centred / tap(scale_name, scale)
    normalized = tap(normalized_name, normalized)
    if norm.bias is None:
        return normalized * norm.weight
    return torch.addcmul(norm.bias, normalized, norm.weight)


def tapped_attention(attn: Attention, x: Tensor, context: AttentionContext, tap: Tap) -> Tensor:
    """Attention with queries, keys, values, scores, pattern and head outputs open."""
    batch, n_pos, _ = x.shape
    split = F.linear(x, attn.qkv.weight, attn.qkv.bias)
    q, k, v = split.view(batch, n_pos, 3, attn.n_heads, attn.d_head).unbind(2)
    if context.qk_offset is not None:
        q, k = q + context.qk_offset, k + context.qk_offset
    q, k, v = tap("attn.hook_q", q), tap("attn.hook_k", k), tap("attn.hook_v", v)
    if context.rotation is not None:
        q = tap("attn.hook_rot_q", rotate(q, context.rotation))
        k = tap("attn.hook_rot_k", rotate(k, context.rotation))
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if tap.listens("attn.hook_attn_scores", "attn.hook_pattern"):
        scores = tap("attn.hook_attn_scores", attention_scores(q, k, context))
        pattern = tap("attn.hook_pattern", scores.softmax(-1))
        z = (pattern @ v).transpose(1, 2)
    else:
        z = F.scaled_dot_product_attention(
            q, k, v, attn_mask=context.mask, is_causal=context.is_causal
        ).transpose(1, 2)
    z = tap("attn.hook_z", z)
    return F.linear(z.reshape(batch, n_pos, -1), attn.out.weight, attn.out.bias)


def attention_scores(
    q: Float[Tensor, "batch head query d_head"],
    k: Float[Tensor, "batch head key d_head"],
    context: AttentionContext,
) -> Float[Tensor, "batch head query key"]:
    r"""``q k^T / sqrt(d_head)`` plus bias, minus infinity where attention is barred."""
    scores = (q * (1 / math.sqrt(q.shape[-1]))) @ k.transpose(-2, -1)
    if context.mask is not None:
        return scores + context.mask
    if context.is_causal:
        ahead = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).triu(1)
        return scores.masked_fill(ahead, float("-inf"))
    return scores


def tapped_layer(
    layer: Layer, h: Tensor, e: Tensor | None, context: AttentionContext, tap: Tap
) -> Tensor:
    """One layer with all its hooks; equals :meth:`Layer.function` unless a hook changes it."""
    post = layer.norm == "post"
    h = tap("hook_resid_pre", h)
    x = h if layer.ln1 is None or post else tapped_norm(layer.ln1, h, tap, "ln1")
    out = tapped_attention(layer.attn, layer.sublayer_input(x, e, 1), context, tap)
    if layer.ln1_post is not None:
        out = tapped_norm(layer.ln1_post, out, tap, "ln1_post")
    h = h + tap("hook_attn_out", out)
    if post and layer.ln1 is not None:
        h = tapped_norm(layer.ln1, h, tap, "ln1")
    h = tap("hook_resid_mid", h)
    x = h if layer.ln2 is None or post else tapped_norm(layer.ln2, h, tap, "ln2")
    mlp = layer.mlp
    pre = tap("mlp.hook_pre", mlp.fc_in(layer.sublayer_input(x, e, 2)))
    out = mlp.fc_out(tap("mlp.hook_post", mlp.act_fn(pre)))
    if layer.ln2_post is not None:
        out = tapped_norm(layer.ln2_post, out, tap, "ln2_post")
    h = h + tap("hook_mlp_out", out)
    if post and layer.ln2 is not None:
        h = tapped_norm(layer.ln2, h, tap, "ln2")
    return tap("hook_resid_post", h)


def run_layer(
    layer: nn.Module,
    function: LayerFunction | None,
    number: int,
    h: Tensor,
    e: Tensor | None,
    context: AttentionContext,
    taps: Taps | None,
) -> Tensor:
    """A layer of a run with hooks: the explicit path only where somebody listens inside.

    Args:
        layer: The layer.
        function: Its fast path, where it is at hand.
        number: TransformerLens' number of the layer.
        h: The state that enters it.
        e: The injected input; None outside the block.
        context: What the attention of every loop shares.
        taps: The hooks of the run.
    """
    assert isinstance(layer, Layer)
    tap = taps.at(f"blocks.{number}.") if taps else None
    if tap is None:
        return (function or layer.function())(h, e, context)
    if tap.only("hook_resid_pre", "hook_resid_post"):
        h = (function or layer.function())(tap("hook_resid_pre", h), e, context)
        return tap("hook_resid_post", h)
    return tapped_layer(layer, h, e, context, tap)
