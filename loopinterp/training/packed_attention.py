"""Attention among packed examples of several seeds, whose weights are stacked.

Within a narrow window it goes key by key along the rows. Else the rows are given back their square
of examples and positions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.autograd import Function

from loopinterp.models.positions import AttentionContext, score_mask
from loopinterp.training.device import send

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from loopinterp.models import Iteration, LoopedTransformer, LoopedTransformerConfig
    from loopinterp.training.packed_examples import Packing

_NARROW = 4
"""Windows up to this go key by key."""


def goes_by_key(config: LoopedTransformerConfig) -> bool:
    """Whether attention goes key by key."""
    window = config.window_of_all_heads
    return window is not None and window <= _NARROW


class PackedAttention:
    """What the attention of each loop has to know.

    Args:
        models: Of one configuration, one for each row.
        bound: Each bound to its batch.
        packing: Where the positions of these stand.
    """

    def __init__(
        self, models: Sequence[LoopedTransformer], bound: Sequence[Iteration], packing: Packing
    ) -> None:
        self.packing, self.device, config = packing, bound[0].e.device, models[0].config
        self.offset = self.rotation = self.bias = None
        if bound[0].context.qk_offset is not None:
            offsets = [it.context.qk_offset.transpose(1, 2) for it in bound]
            self.offset = packing.pack(offsets).transpose(1, 2)
        if bound[0].context.rotation is not None:
            widest = max(bound, key=lambda it: it.e.shape[1]).context.rotation
            at = send(packing.pos, self.device)
            self.rotation = tuple(table[at][:, None] for table in widest)
        self.by_key = goes_by_key(config)
        place = torch.arange(packing.n_pos, device=self.device)
        if self.by_key:
            query = place[:, None, None]
            keys = query - torch.arange(config.attention_window + 1, device=self.device)
            at = send(packing.pos, self.device)
            masks = [_mask(model, query, keys)[at[seed], :, 0] for seed, model in enumerate(models)]
            # [distance, seed, place, head]
            self.bias = torch.stack(masks).movedim(-1, 0).expand(-1, -1, -1, config.n_heads)
        elif models[0].relative_bias is not None or config.attention_window is not None:
            square = place[None, :, None], place[None, None, :]
            # [seed, 1, #head, query, key]
            self.bias = torch.stack([_mask(model, *square) for model in models])

    def of_loop(self, loop: int) -> AttentionContext:
        """The context of a loop, counted from 0, whose rows are those that run in it."""
        examples, places = self.packing.running[loop]
        n = max(places)
        rotation = self.rotation and tuple(table[:, :, :n] for table in self.rotation)
        offset = None if self.offset is None else self.offset[:, :, :n]
        if self.by_key:
            bias = self.bias[:, :, :n]
            attend = lambda q, k, v: _KeyByKey.apply(q, k, v, bias)
        else:
            squares = _Squares(self.packing, loop, self.device)
            attend = lambda q, k, v: squares.attend(q, k, v, self.bias)
        return AttentionContext(rotation=rotation, qk_offset=offset, attend=attend)


def _mask(model: LoopedTransformer, query: Tensor, key: Tensor) -> Tensor:
    return score_mask(model.config, query, key, bias=model.relative_bias, dtype=model.dtype)


class _Squares:
    """The square of examples and positions of a loop, and the way back to its rows."""

    def __init__(self, packing: Packing, loop: int, device: torch.device) -> None:
        examples, places = packing.running[loop]
        n_examples, n_places, self.n_pos = max(examples), max(places), packing.n_pos
        self.n_seeds, self.there = len(examples), None
        if packing.is_square:
            return
        seed = torch.arange(self.n_seeds)[:, None, None]
        pos = torch.arange(self.n_pos)
        lengths, starts = packing.lengths[:, :n_examples], packing.starts[:, :n_examples]
        idle = (pos >= lengths[..., None]) | (
            torch.arange(n_examples) >= torch.tensor(examples)[:, None]
        )[..., None]
        there = (seed * n_places + starts[..., None] + pos).masked_fill(idle, 0)
        example, pos = packing.example[:, :n_places], packing.pos[:, :n_places]
        behind = torch.arange(n_places) >= torch.tensor(places)[:, None]
        back = ((seed[..., 0] * n_examples + example) * self.n_pos + pos).masked_fill(behind, 0)
        self.there, self.idle, self.back, self.behind = (
            send(x.flatten(), device) for x in (there, idle, back, behind)
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        """Attention over all pairs of positions of each example."""
        n_places = q.shape[2]
        q, k, v = map(self._whole, (q, k, v))
        if bias is None:
            z = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            q, k, v = (x.unflatten(0, (self.n_seeds, -1)) for x in (q, k, v))
            scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1) + bias
            z = (scores.softmax(-1).to(v) @ v).flatten(0, 1)
        z = z.transpose(1, 2).flatten(0, 1)  # [place, head, d_head]
        if self.there is not None:
            z = _Move.apply(z, self.back, self.there, self.idle)
        return z.view(self.n_seeds, n_places, *z.shape[1:]).transpose(1, 2)

    def _whole(self, x: Tensor) -> Tensor:
        """``[example, head, pos, d_head]`` of all seeds from ``[seed, head, place, d_head]``."""
        x = x.transpose(1, 2).flatten(0, 1)
        if self.there is not None:
            x = _Move.apply(x, self.there, self.back, self.behind)
        return x.unflatten(0, (-1, self.n_pos)).transpose(1, 2)


class _Move(Function):
    """Rows at other places: ``x[there]``. Where each came from is known, so gradients move alike."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Tensor, back: Tensor, unread: Tensor) -> Tensor:
        ctx.save_for_backward(back, unread)
        return x.index_select(0, there)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
        back, unread = ctx.saved_tensors
        return g.index_select(0, back).masked_fill_(unread[:, None, None], 0), None, None, None


class _KeyByKey(Function):
    """``sum_d p_d v_{i-d}`` with ``p = softmax_d(q_i k_{i-d} / sqrt(d_head) + bias_d)``.

    A few products of whole rows for each distance d, and nothing of the size of a square.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Float[Tensor, "seed head place d_head"],
        k: Float[Tensor, "seed head place d_head"],
        v: Float[Tensor, "seed head place d_head"],
        bias: Float[Tensor, "distance seed place head"],
    ) -> Float[Tensor, "seed head place d_head"]:
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
        scale, n = q.shape[-1] ** -0.5, q.shape[1]
        scores = bias.clone()
        for d in range(min(len(bias), n)):
            scores[d, :, d:].add_((q[:, d:] * k[:, : n - d]).sum(-1), alpha=scale)
        p = scores.softmax(0).to(q)
        ctx.save_for_backward(q, k, v, p)
        ctx.scale = scale
        return _mixed(p, v).transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, ...]:
        q, k, v, p = ctx.saved_tensors
        g, n = g.transpose(1, 2).contiguous(), q.shape[1]
        dp = torch.zeros_like(p)
        for d in range(min(len(p), n)):
            dp[d, :, d:] = (g[:, d:] * v[:, : n - d]).sum(-1)
        ds = p * (dp - (p * dp).sum(0))
        scaled = ds * ctx.scale
        found = _mixed(scaled, k), _mixed(scaled, q, back=True), _mixed(p, g, back=True)
        return *(x.transpose(1, 2) for x in found), ds


def _mixed(
    p: Float[Tensor, "distance seed place head"],
    x: Float[Tensor, "seed place head d_head"],
    *,
    back: bool = False,
) -> Float[Tensor, "seed place head d_head"]:
    """``sum_d p_{d,i} x_{i-d}``; ``back``: ``sum_d p_{d,i+d} x_{i+d}``, the transposed of it."""
    n, shares = x.shape[1], p[..., None]
    mixed = shares[0] * x
    for d in range(1, min(len(p), n)):
        if back:
            mixed[:, : n - d].addcmul_(shares[d, :, d:], x[:, d:])
        else:
            mixed[:, d:].addcmul_(shares[d, :, d:], x[:, : n - d])
    return mixed
