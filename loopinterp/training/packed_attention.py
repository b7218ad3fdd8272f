"""Attention among packed examples of several seeds, whose weights are stacked.

Within a narrow window it goes key by key along the rows. Else the rows are given back their square
of examples and positions.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.autograd import Function

from loopinterp.models.positions import AttentionContext, score_mask
from loopinterp.training.device import send

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxtyping import Float
    from torch import Tensor

    from loopinterp.models import Iteration, LoopedTransformer, LoopedTransformerConfig
    from loopinterp.training.packed_examples import Packing

_NARROW = 4
"""Windows up to this go key by key."""


_LANES = 16
"""Keys of a square are made a multiple of this, which a softmax takes at a stride."""


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
        self.packing, self.device = packing, bound[0].e.device
        at, widest = send(packing.pos, self.device), max(bound, key=lambda it: it.e.shape[1])
        self.offset = self.rotation = None
        if widest.context.qk_offset is not None:
            offsets = [it.context.qk_offset.transpose(1, 2) for it in bound]
            self.offset = packing.pack(offsets).transpose(1, 2)
        if widest.context.rotation is not None:
            self.rotation = [table[at][:, None] for table in widest.context.rotation]
        self.by_key = goes_by_key(models[0].config)
        place = torch.arange(packing.n_pos, device=self.device)
        self.bias = _by_key(models, place, at) if self.by_key else _of_squares(models, place)

    def of_loop(self, loop: int) -> AttentionContext:
        """The context of a loop, counted from 0, whose rows are those that run in it."""
        _, places = self.packing.running[loop]
        n, bias = max(places), self.bias
        if self.by_key:
            assert bias is not None
            attend = partial(_attend_by_key, bias=bias[:, :, :n])
        else:
            squares = _Squares(self.packing, loop, self.device)
            attend = partial(squares.attend, bias=bias)
        rotation = None
        if self.rotation is not None:
            cos, sin = (table[:, :, :n] for table in self.rotation)
            rotation = cos, sin
        offset = None if self.offset is None else self.offset[:, :, :n]
        return AttentionContext(rotation=rotation, qk_offset=offset, attend=attend)


def _by_key(
    models: Sequence[LoopedTransformer], place: Tensor, at: Tensor
) -> Float[Tensor, "distance seed place head"]:
    """What is added to the score of each place of a row and the key so far before it."""
    config = models[0].config
    assert config.attention_window is not None
    query = place[:, None, None]
    key = query - torch.arange(config.attention_window + 1, device=place.device)
    masks = [_mask(model, query, key)[own, :, 0] for model, own in zip(models, at)]
    return torch.stack(masks).movedim(-1, 0).expand(-1, -1, -1, config.n_heads)


def _of_squares(
    models: Sequence[LoopedTransformer], place: Tensor
) -> Float[Tensor, "#seed 1 #head query key"] | None:
    """What is added to the scores of all pairs; None where attention is causal, and no more."""
    model, query, key = models[0], place[None, :, None], place[None, None]
    if model.relative_bias is not None:
        bias = torch.stack([_mask(one, query, key) for one in models])
    # On a CPU causal attention that is fused is the slower, of rows as short as these.
    elif model.config.attention_window is not None or place.device.type == "cpu":
        bias = _mask(model, query, key)[None]
    else:
        return None
    return F.pad(bias, (0, -len(place) % _LANES), value=-torch.inf)


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
        ended = torch.arange(n_examples) >= torch.tensor(examples)[:, None]
        idle = (pos >= lengths[..., None]) | ended[..., None]
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
            z = self._explicit(q, k, v, bias)
        z = z.transpose(1, 2).flatten(0, 1)  # [place, head, d_head]
        if self.there is not None:
            z = _Move.apply(z, self.back, self.there, self.idle)
        return z.view(self.n_seeds, n_places, *z.shape[1:]).transpose(1, 2)

    def _explicit(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        """Products of matrices, one for each example and head; keys as many as the bias has."""
        shape, more = q.shape, bias.shape[-1] - k.shape[2]
        k, v = (F.pad(x, (0, 0, 0, more)).flatten(0, 1) for x in (k, v))
        if bias.shape[:3].numel() > 1:
            bias = bias.expand(self.n_seeds, shape[0] // self.n_seeds, shape[1], -1, -1)
        q, bias = q.flatten(0, 1), bias.flatten(0, 2)
        scores = torch.baddbmm(bias, q, k.transpose(1, 2), alpha=shape[-1] ** -0.5)
        return (scores.softmax(-1).to(v) @ v).view(shape)

    def _whole(self, x: Tensor) -> Tensor:
        """``[example, head, pos, d_head]`` of all seeds from ``[seed, head, place, d_head]``."""
        x = x.transpose(1, 2).flatten(0, 1)
        if self.there is not None:
            x = _Move.apply(x, self.there, self.back, self.behind)
        return x.unflatten(0, (-1, self.n_pos)).transpose(1, 2)


class _Move(Function):
    """Rows at other places, ``x[there]``; ``back`` says where each has gone, but for the unread."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Tensor, back: Tensor, unread: Tensor) -> Tensor:
        ctx.save_for_backward(back, unread)
        return x.index_select(0, there)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
        back, unread = ctx.saved_tensors
        return g.index_select(0, back).masked_fill_(unread[:, None, None], 0), None, None, None


def _attend_by_key(q: Tensor, k: Tensor, v: Tensor, *, bias: Tensor) -> Tensor:
    return _KeyByKey.apply(q, k, v, bias)  # which takes no arguments by name


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
