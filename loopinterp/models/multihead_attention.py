"""Multi-head attention: its weights under TransformerLens' names, and what it computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import nn

from loopinterp.models.plain_layers import change_of, weights_of, with_weights
from loopinterp.models.positions import AttentionContext, rotate
from loopinterp.models.stacked_weights import Linear
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
            stacked = getattr(with_weights(self.qkv), kind)
            return rearrange(stacked, axes, qkv=3, head=self.n_heads)[which]

        return property(part, doc=f"{name} {kind} of each head ``{shape}``.")

    return of("weight", "[head, d_model, d_head]"), of("bias", "[head, d_head]")


class Attention(nn.Module):
    """Multi-head attention. Queries, keys and values are one matrix product."""

    def __init__(self, config: LoopedTransformerConfig) -> None:
        super().__init__()
        self.n_heads, self.d_head = config.n_heads, config.head_width
        width = self.n_heads * self.d_head
        self.qkv = Linear(config.d_model, 3 * width)
        self.out = Linear(width, config.d_model)

    W_Q, b_Q = _of_each_head(0, "Query")
    W_K, b_K = _of_each_head(1, "Key")
    W_V, b_V = _of_each_head(2, "Value")

    @property
    def W_O(self) -> Float[Tensor, "head d_head d_model"]:
        """Output weights of each head."""
        axes = "d_model (head d_head) -> head d_head d_model"
        return rearrange(with_weights(self.out).weight, axes, head=self.n_heads)

    b_O = weights_of("out", "bias", "Output bias ``[d_model]``.")

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
        split = self.qkv(x).view(batch, n_pos, 3, self.n_heads, self.d_head)
        q, k, v = (part.transpose(1, 2) for part in split.unbind(2))
        if forks:
            q, k, v = (self._fork(x, forks[i], i) for i, x in enumerate((q, k, v)))
        if context.qk_offset is not None:
            q, k = q + context.qk_offset, k + context.qk_offset
        z = attend(q, k, v, context, tap).transpose(1, 2)
        if tap.listens("attn.hook_result"):
            out = with_weights(self.out, uncalled=True)  # no call gives what each head writes
            heads = torch.einsum("bphd,hdm->bphm", z, self.W_O)
            return tap("attn.hook_result", heads).sum(2) + out.bias
        return self.out(z.reshape(batch, n_pos, -1))

    def _fork(
        self, x: Float[Tensor, "batch head pos d_head"], fork: Tensor | None, which: int
    ) -> Float[Tensor, "batch head pos d_head"]:
        """Queries, keys or values (0, 1, 2) of what each head reads by itself."""
        if fork is None:
            return x
        if change_of(self.qkv) is not None:  # called for all heads; each takes its own part
            parts = self.qkv(fork).unflatten(-1, (3, self.n_heads, self.d_head))
            return parts[..., which, :, :].diagonal(dim1=2, dim2=3).permute(0, 3, 1, 2)
        name = "QKV"[which]
        weight, bias = getattr(self, f"W_{name}"), getattr(self, f"b_{name}")
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
