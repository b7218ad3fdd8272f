"""Multi-head attention: fused, with visible scores, or within a window alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import nn

from loopinterp.models.placement import LinearMap, change_of, weights_of, with_weights
from loopinterp.models.positions import NARROW, AttentionContext, rotate
from loopinterp.models.taps import SILENT, Tap

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from loopinterp.models.config import LoopedTransformerConfig


def _of_each_head(which: int, name: str, kind: str) -> property:
    def part(self: Attention) -> Tensor:
        axes = "(qkv head d_head) ... -> qkv head ... d_head"
        stacked = getattr(with_weights(self.qkv), kind)
        return rearrange(stacked, axes, qkv=3, head=self.n_heads)[which]

    shape = "[head, d_model, d_head]" if kind == "weight" else "[head, d_head]"
    return property(part, doc=f"{name} {kind} of each head ``{shape}``.")


class Attention(nn.Module):
    def __init__(self, config: LoopedTransformerConfig) -> None:
        super().__init__()
        self.n_heads, self.d_head = config.n_heads, config.head_width
        width = self.n_heads * self.d_head
        self.qkv = LinearMap(config.d_model, 3 * width)
        self.out = LinearMap(width, config.d_model)
        self.projects_positions = config.abacus_target == "attention"

    W_Q, b_Q = _of_each_head(0, "Query", "weight"), _of_each_head(0, "Query", "bias")
    W_K, b_K = _of_each_head(1, "Key", "weight"), _of_each_head(1, "Key", "bias")
    W_V, b_V = _of_each_head(2, "Value", "weight"), _of_each_head(2, "Value", "bias")

    @property
    def W_O(self) -> Float[Tensor, "head d_head d_model"]:
        axes = "d_model (head d_head) -> head d_head d_model"
        return rearrange(with_weights(self.out).weight, axes, head=self.n_heads)

    b_O = weights_of("out", "bias", "Output bias ``[d_model]``.")

    def forward(
        self,
        x: Float[Tensor, "batch pos d_model"],
        context: AttentionContext,
        tap: Tap = SILENT,
        forks: Sequence[Float[Tensor, "batch pos head d_model"] | None] = (None, None, None),
    ) -> Float[Tensor, "batch pos d_model"]:
        """``sum_h softmax(q_h k_h^T / sqrt(d_head) + mask) v_h W_O[h] + b_O``.

        ``forks`` replace ``x`` as input of queries, keys and values, per head.
        """
        batch, n_pos, _ = x.shape
        # [batch, pos, qkv, head, d_head], then each part [batch, head, pos, d_head].
        split = self.qkv(x).view(batch, n_pos, 3, self.n_heads, self.d_head)
        parts = [part.transpose(1, 2) for part in split.unbind(2)]
        for which, fork in enumerate(forks):
            if fork is None:
                continue
            if change_of(self.qkv) is None:
                name = "QKV"[which]
                weight, bias = getattr(self, f"W_{name}"), getattr(self, f"b_{name}")
                # [batch, head, pos, d_head]: each head reads an input of its own.
                parts[which] = torch.einsum("bphm,hmd->bhpd", fork, weight) + bias[:, None]
            else:
                # Called for all heads: of the parts of each head's input, its own are the diagonal
                # of [batch, pos, head, head, d_head].
                every = self.qkv(fork).unflatten(-1, (3, self.n_heads, self.d_head))
                every = every[..., which, :, :].diagonal(dim1=2, dim2=3)
                parts[which] = every.permute(0, 3, 1, 2)
        q, k, v = parts
        if context.qk_offset is not None:
            to_q = to_k = context.qk_offset
            if self.projects_positions:  # from [batch, 1, pos, d_model]
                at = context.qk_offset[:, 0]
                to_q, to_k = (
                    torch.einsum("bpm,hmd->bhpd", at, weight) for weight in (self.W_Q, self.W_K)
                )
            q, k = q + to_q, k + to_k
        z = attend(q, k, v, context, tap).transpose(1, 2)
        if tap.listens("attn.hook_result"):
            out = with_weights(self.out, uncalled=True)  # no call gives what each head writes
            # The output of each head: [batch, pos, head, d_model].
            heads = torch.einsum("bphd,hdm->bphm", z, self.W_O)
            return tap("attn.hook_result", heads).sum(2) + out.bias
        return self.out(z.reshape(batch, n_pos, -1))


def attend(
    q: Float[Tensor, "batch head pos d_head"],
    k: Float[Tensor, "batch kv_head pos d_head"],
    v: Float[Tensor, "batch kv_head pos d_head"],
    context: AttentionContext,
    tap: Tap = SILENT,
    *,
    turn: Callable[[Tensor, tuple[Tensor, Tensor]], Tensor] = rotate,
) -> Float[Tensor, "row head pos d_head"]:
    """``softmax(q k^T / sqrt(d_head) + mask) v`` for each head, with its hooks.

    Fused, or within a window alone, unless scores or pattern are hooked. Consecutive query
    heads may share a key head. ``turn`` applies rotary angles. A tap may return more rows than it
    receives.
    """
    q, k, v = _show(tap, "hook_q", q), _show(tap, "hook_k", k), _show(tap, "hook_v", v)
    if context.rotation is not None:
        q = _show(tap, "hook_rot_q", turn(q, context.rotation))
        k = _show(tap, "hook_rot_k", turn(k, context.rotation))
    if context.remember is not None:
        k, v = context.remember(k, v)
    if k.shape[1] < q.shape[1]:
        # Grouped heads: each of the keys' serves several of the queries'.
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    if tap.listens("attn.hook_attn_scores", "attn.hook_pattern"):
        # [batch, head, query, key]; q is scaled first, which is fewer products than scaling scores.
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
        if context.mask is not None:
            scores = scores + context.mask
        elif context.is_causal:
            # [query, key]: True above the diagonal, where a key lies ahead.
            ahead = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(ahead, float("-inf"))
        scores = tap("attn.hook_attn_scores", scores)
        z = tap("attn.hook_pattern", scores.softmax(-1)) @ v
    elif context.attend is not None:
        z = context.attend(q, k, v)
    elif context.window is not None:
        assert context.mask is not None
        z = _windowed_attention(q, k, v, mask=context.mask, window=context.window)
    else:
        z = F.scaled_dot_product_attention(
            q, k, v, attn_mask=context.mask, is_causal=context.is_causal
        )
    return _show(tap, "hook_z", z)


def _show(
    tap: Tap, name: str, x: Float[Tensor, "batch head pos d_head"]
) -> Float[Tensor, "row head pos d_head"]:
    """Pass hooks in TransformerLens' order of axes: batch, pos, head, d_head."""
    return x if tap is SILENT else tap(f"attn.{name}", x.transpose(1, 2)).transpose(1, 2)


def _windowed_attention(
    q: Float[Tensor, "batch head pos d_head"],
    k: Float[Tensor, "batch head pos d_head"],
    v: Float[Tensor, "batch head pos d_head"],
    *,
    mask: Float[Tensor, "#block #head query key"] | Float[Tensor, "distance 1 #head pos"],
    window: int,
) -> Float[Tensor, "batch head pos d_head"]:
    """Attention within a window: distance by distance if it is narrow, else block by block.

    The ``mask`` of each distance or block is a bias that bars padding too.
    """
    if window <= NARROW:
        k, v = (F.pad(x, (0, 0, window, 0)) for x in (k, v))
        return attend_near(q, k, v, mask)
    n_pos, (n_blocks, _, length, _) = q.shape[2], mask.shape
    behind = n_blocks * length - n_pos

    def blocks(x: Tensor, before: int) -> Tensor:  # [batch, block, head, before + length, d_head]
        padded = F.pad(x, (0, 0, before, behind))
        return padded.unfold(2, before + length, length).permute(0, 2, 1, 4, 3)

    q, k, v = blocks(q * q.shape[-1] ** -0.5, 0), blocks(k, window), blocks(v, window)
    # Scores [batch, block, head, length, before + length].
    pattern = (q @ k.transpose(-2, -1) + mask).softmax(-1)
    return (pattern @ v).transpose(1, 2).flatten(2, 3)[:, :, :n_pos]


NEAR = 8  # widest window for which attend_near is quicker in a light cone


def attend_near(
    q: Float[Tensor, "batch head pos d_head"],
    k: Float[Tensor, "batch head key d_head"],
    v: Float[Tensor, "batch head key d_head"],
    bias: Float[Tensor, "#distance #batch #head #pos"],
) -> Float[Tensor, "batch head pos d_head"]:
    """Attention within a narrow causal window, distance by distance.

    Args:
        k: Keys of as many positions before the first query as the window is wide, and of the
            queries' positions.
        bias: Added to the scores of each distance 0 .. window; minus infinity where barred.
    """
    n_pos, window, q = q.shape[2], len(bias) - 1, q * q.shape[-1] ** -0.5
    # The keys at each distance back, for all queries at once.
    shifts = [slice(window - back, window - back + n_pos) for back in range(window + 1)]
    scores = torch.stack([(q * k[:, :, shift]).sum(-1) for shift in shifts]) + bias
    pattern = scores.softmax(0)[..., None]  # [distance, batch, head, pos, 1]
    # The mean of the values, distance by distance: [batch, head, pos, d_head].
    z = pattern[0] * v[:, :, shifts[0]]
    for weight, shift in zip(pattern[1:], shifts[1:]):
        z = torch.addcmul(z, weight, v[:, :, shift])
    return z
