"""Multi-head attention: its weights under TransformerLens' names, and what it computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import nn

from loopinterp.models.positions import AttentionContext, rotate
from loopinterp.models.stacked_weights import linear
from loopinterp.models.taps import SILENT, Tap
from loopinterp.models.windowed_attention import windowed_attention

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from loopinterp.models.model_config import LoopedTransformerConfig


def _of_each_head(which: int, name: str) -> tuple[property, property]:
    """Weights and biases of queries, keys or values, as TransformerLens has them."""

    def of(kind: str, shape: str) -> property:
        def part(self: Attention) -> Tensor:
            axes = "(qkv head d_head) ... -> qkv head ... d_head"
            return rearrange(getattr(self.qkv, kind), axes, qkv=3, head=self.n_heads)[which]

        return property(part, doc=f"{name} {kind} of each head ``{shape}``.")

    return of("weight", "[head, d_model, d_head]"), of("bias", "[head, d_head]")


class Attention(nn.Module):
    """Multi-head attention. Queries, keys and values are one matrix product."""

    def __init__(self, config: LoopedTransformerConfig) -> None:
        super().__init__()
        self.n_heads, self.d_head = config.n_heads, config.head_width
        width = self.n_heads * self.d_head
        self.qkv = nn.Linear(config.d_model, 3 * width)
        self.out = nn.Linear(width, config.d_model)

    W_Q, b_Q = _of_each_head(0, "Query")
    W_K, b_K = _of_each_head(1, "Key")
    W_V, b_V = _of_each_head(2, "Value")

    @property
    def W_O(self) -> Float[Tensor, "head d_head d_model"]:
        """Output weights of each head."""
        axes = "d_model (head d_head) -> head d_head d_model"
        return rearrange(self.out.weight, axes, head=self.n_heads)

    b_O = property(attrgetter("out.bias"), doc="Output bias ``[d_model]``.")

    def forward(
        self,
        x: Float[Tensor, "batch pos d_model"],
        context: AttentionContext,
        tap: Tap = SILENT,
        forks: Sequence[Float[Tensor, "batch pos head d_model"] | None] = (),
    ) -> Float[Tensor, "batch pos d_model"]:
        """``sum_h softmax(q_h k_h^T / sqrt(d_head) + mask) v_h W_O[h] + b_O``.

        Args:
            x: What all heads read.
            context: What the attention of every loop shares.
            tap: Who listens inside the layer.
            forks: What queries, keys and values read instead, head by head; None for ``x``.
        """
        batch, n_pos, _ = x.shape
        qkv, out = self.qkv, self.out
        split = linear(x, qkv.weight, qkv.bias).view(batch, n_pos, 3, self.n_heads, self.d_head)
        q, k, v = (part.transpose(1, 2) for part in split.unbind(2))
        if forks:
            q, k, v = (self._own(*one) for one in zip((q, k, v), forks, "QKV"))
        if context.qk_offset is not None:
            q, k = q + context.qk_offset, k + context.qk_offset
        z = attend(q, k, v, context, tap).transpose(1, 2)
        if tap.listens("attn.hook_result"):
            heads = torch.einsum("bphd,hdm->bphm", z, self.W_O)
            return tap("attn.hook_result", heads).sum(2) + out.bias
        return linear(z.reshape(batch, n_pos, -1), out.weight, out.bias)

    def _own(
        self, x: Float[Tensor, "batch head pos d_head"], fork: Tensor | None, which: str
    ) -> Float[Tensor, "batch head pos d_head"]:
        """Queries, keys or values of what each head reads by itself."""
        if fork is None:
            return x
        weight, bias = getattr(self, f"W_{which}"), getattr(self, f"b_{which}")
        return torch.einsum("bphm,hmd->bhpd", fork, weight) + bias[:, None]


def attend(
    q: Float[Tensor, "batch head pos d_head"],
    k: Float[Tensor, "batch kv_head pos d_head"],
    v: Float[Tensor, "batch kv_head pos d_head"],
    context: AttentionContext,
    tap: Tap = SILENT,
    *,
    turn: Callable[[Tensor, tuple[Tensor, Tensor]], Tensor] = rotate,
) -> Float[Tensor, "batch head pos d_head"]:
    """What each head reads: ``softmax(q k^T / sqrt(d_head) + mask) v``, past the hooks there.

    Fused, or block by block within a window, unless somebody listens to scores or pattern.

    Args:
        q: Queries.
        k: Keys; of fewer heads, each of which serves several of the queries' in a row.
        v: Values, of as many heads as the keys.
        context: What the attention of every loop shares.
        tap: Who listens inside the layer.
        turn: How queries and keys are turned by the angles of their positions.
    """
    q, k, v = _show(tap, "hook_q", q), _show(tap, "hook_k", k), _show(tap, "hook_v", v)
    if context.rotation is not None:
        q = _show(tap, "hook_rot_q", turn(q, context.rotation))
        k = _show(tap, "hook_rot_k", turn(k, context.rotation))
    if context.remember is not None:
        k, v = context.remember(k, v)
    if k.shape[1] < q.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    if tap.listens("attn.hook_attn_scores", "attn.hook_pattern"):
        scores = tap("attn.hook_attn_scores", _scores(q, k, context))
        z = tap("attn.hook_pattern", scores.softmax(-1)) @ v
    elif context.attend is not None:
        z = context.attend(q, k, v)
    elif context.window is not None:
        assert context.mask is not None
        z = windowed_attention(q, k, v, mask=context.mask, window=context.window)
    else:
        z = F.scaled_dot_product_attention(
            q, k, v, attn_mask=context.mask, is_causal=context.is_causal
        )
    return _show(tap, "hook_z", z)


def _show(
    tap: Tap, name: str, x: Float[Tensor, "batch head pos d_head"]
) -> Float[Tensor, "batch head pos d_head"]:
    """Let hooks at it, in TransformerLens' order of axes: batch, pos, head, d_head."""
    return x if tap is SILENT else tap(f"attn.{name}", x.transpose(1, 2)).transpose(1, 2)


def _scores(
    q: Float[Tensor, "batch head query d_head"],
    k: Float[Tensor, "batch head key d_head"],
    context: AttentionContext,
) -> Float[Tensor, "batch head query key"]:
    r"""``q k^T / sqrt(d_head)`` plus bias, minus infinity where attention is barred."""
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
    if context.mask is not None:
        return scores + context.mask
    if context.is_causal:
        ahead = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).triu(1)
        return scores.masked_fill(ahead, float("-inf"))
    return scores
