"""Positions: what attention is told about where a token stands.

Everything here depends on the input alone, never on the state, so it is computed once per run
and shared by all loops.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from loopinterp.errors import InputError

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from loopinterp.models.config import LoopedTransformerConfig


@dataclass(frozen=True)
class AttentionContext:
    """What the attention of every loop shares.

    Attributes:
        mask: Added to the scores: relative bias, and minus infinity where attention is barred.
        is_causal: Whether a plain causal mask says it all (then ``mask`` is None).
        rotation: Cosines and sines of the rotary angles, each ``[pos, d_head]``.
        qk_offset: Abacus embedding added to queries and keys, ``[batch, pos, head, d_head]``.
    """

    mask: Float[Tensor, "#head query key"] | None = None
    is_causal: bool = False
    rotation: tuple[Tensor, Tensor] | None = None
    qk_offset: Float[Tensor, "batch pos head d_head"] | None = None

    def select(self, rows: Tensor | slice) -> AttentionContext:
        """The context of some examples of the batch."""
        if self.qk_offset is None:
            return self
        return replace(self, qk_offset=self.qk_offset[rows])


class RelativeBias(nn.Module):
    r"""A learned bias per head and distance, clamped: ``bias[h, clamp(k - q, -w, w) + w]``.

    Args:
        n_heads: Heads.
        window: Distance ``w`` from which on all distances share one bias.
    """

    def __init__(self, n_heads: int, window: int) -> None:
        super().__init__()
        self.window = window
        self.table = nn.Parameter(torch.empty(n_heads, 2 * window + 1))

    def forward(self, n_pos: int) -> Float[Tensor, "head query key"]:
        place = torch.arange(n_pos, device=self.table.device)
        distance = place[None, :] - place[:, None]
        index = distance.clamp(-self.window, self.window) + self.window
        return self.table[:, index]


def attention_mask(
    n_pos: int, *, causal: bool, window: int | None, device: torch.device
) -> Bool[Tensor, "query key"]:
    """True where a query may attend: not ahead (causal), at most ``window`` away.

    Example:
        >>> attention_mask(3, causal=True, window=1, device=torch.device("cpu")).int().tolist()
        [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    """
    place = torch.arange(n_pos, device=device)
    distance = place[:, None] - place[None, :]
    allowed = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    return allowed if window is None else allowed & (distance.abs() <= window)


def rotary_tables(
    n_pos: int, d_head: int, base: float, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosine and sine tables of RoFormer (arXiv 2104.09864), adjacent pairs rotated together."""
    frequency = base ** (-torch.arange(0, d_head, 2, device=device).float() / d_head)
    angle = torch.outer(torch.arange(n_pos, device=device).float(), frequency)
    angle = angle.repeat_interleave(2, dim=-1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(
    x: Float[Tensor, "batch pos head d_head"], rotation: tuple[Tensor, Tensor]
) -> Float[Tensor, "batch pos head d_head"]:
    """Turn each adjacent pair of features by the angle of its position."""
    cos, sin = (table[:, None, :] for table in rotation)
    turned = torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)
    return x * cos + turned * sin


def abacus_positions(
    tokens: Int[Tensor, "batch pos"], digit_tokens: tuple[int, ...], offset: int = 0
) -> Int[Tensor, "batch pos"]:
    """Index of each digit within its number, from 1, plus ``offset``; 0 off the digits.

    Source: arXiv 2405.17399, abacus embeddings.

    Example:
        >>> abacus_positions(torch.tensor([[1, 2, 9, 3]]), digit_tokens=(1, 2, 3)).tolist()
        [[1, 2, 0, 1]]
    """
    digits = torch.isin(tokens, torch.tensor(digit_tokens, device=tokens.device))
    count = digits.cumsum(-1)
    before_number = torch.where(digits, 0, count).cummax(-1).values
    return torch.where(digits, count - before_number + offset, 0)


def check_length(n_needed: int, n_ctx: int, what: str) -> None:
    """Raise if a learned position table is too short."""
    if n_needed > n_ctx:
        raise InputError(
            what,
            expected=f"at most n_ctx={n_ctx} learned positions",
            given=str(n_needed),
            fix="Shorten the input, or build the model with a larger n_ctx.",
        )


def attention_context(
    config: LoopedTransformerConfig,
    n_pos: int,
    *,
    bias: RelativeBias | None,
    device: torch.device,
    dtype: torch.dtype,
) -> AttentionContext:
    """The context that a sequence length alone decides."""
    rotation = None
    if config.positions == "rotary":
        rotation = rotary_tables(n_pos, config.head_width, config.rotary_base, device, dtype)
    if bias is None and config.attention_window is None:
        return AttentionContext(is_causal=config.causal, rotation=rotation)
    allowed = attention_mask(
        n_pos, causal=config.causal, window=config.attention_window, device=device
    )
    scores = (
        torch.zeros(1, n_pos, n_pos, device=device, dtype=dtype) if bias is None else bias(n_pos)
    )
    return AttentionContext(mask=scores.masked_fill(~allowed, float("-inf")), rotation=rotation)
