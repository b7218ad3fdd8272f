"""Biases, masks and angles of attention, computed once per run."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from loopinterp.core.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from loopinterp.models.config import LoopedTransformerConfig


def grid_width(n_pos: int) -> int:
    width = math.isqrt(n_pos)
    if width**2 != n_pos:
        expected, fix = "a square number, of a grid row by row", "Pass square grids."
        raise InputError("sequence length", expected=expected, given=str(n_pos), fix=fix)
    return width


def _grid_offsets(
    query: Int[Tensor, "#block query 1"], key: Int[Tensor, "#block 1 key"], width: int
) -> tuple[Int[Tensor, "block query key"], Int[Tensor, "block query key"]]:
    """Rows down and columns right from query to key."""
    return key // width - query // width, key % width - query % width


class GridBias(nn.Module):
    """A learned bias per head and offset on a grid, in rows r and columns c.

    ``bias[h, clamp(r_k - r_q, -w, w), clamp(c_k - c_q, -w, w)]``.
    """

    def __init__(self, n_heads: int, window: int) -> None:
        super().__init__()
        self.window = window
        self.table = nn.Parameter(torch.empty(n_heads, 2 * window + 1, 2 * window + 1))

    def forward(
        self, query: Int[Tensor, "#block query 1"], key: Int[Tensor, "#block 1 key"], width: int
    ) -> Float[Tensor, "block head query key"]:
        w = self.window
        # Indices into the table: [block, query, key] of rows, and of columns.
        down, right = (x.clamp(-w, w) + w for x in _grid_offsets(query, key, width))
        return self.table[:, down, right].transpose(0, 1)


NARROW = 2  # widest window within which attention is quicker distance by distance than by blocks


@dataclass(frozen=True)
class AttentionContext:
    """The input of attention that all loops share."""

    # Added to the scores: relative bias, and minus infinity where attention is barred. One block
    # of all positions for all examples, one for each, or the blocks of a window.
    mask: Float[Tensor, "#block #head query key"] | None = None
    is_causal: bool = False  # the mask is the plain causal one, and `mask` None
    # Of so many keys, causal. The mask is that of blocks, or [distance, 1, head, pos] if narrow.
    window: int | None = None
    rotation: tuple[Tensor, Tensor] | None = None  # cosines and sines of the angles [pos, d_head]
    # The abacus embedding: added to queries and keys; or [batch, 1, pos, d_model], to their input.
    qk_offset: Float[Tensor, "#batch #head pos d"] | None = None
    added: Float[Tensor, "batch pos d_model"] | None = None  # to the embedding
    # From the keys and values of each layer in turn to all that attention reads.
    remember: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    # Another function of queries, keys and values, for any arrangement of positions.
    attend: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    surround: AttentionContext | None = None  # mask and window of prelude and coda, if others

    def after(self, start: int, n_pos: int, *, like: Tensor) -> AttentionContext:
        """The context of the queries from ``start`` on over all keys."""
        mask, rotation, offset = self.mask, self.rotation, self.qk_offset
        if self.is_causal:
            ahead = torch.full((n_pos - start, n_pos), float("-inf"), device=like.device)
            # [1, 1, query, key]: row 0 is the query at `start`, so that the diagonal moves with it.
            mask = ahead.triu(start + 1)[None, None].to(like.dtype)
        elif mask is not None:
            mask = mask[:, :, start:]
        return replace(
            self,
            mask=mask,
            is_causal=False,
            rotation=rotation and (rotation[0][start:], rotation[1][start:]),
            qk_offset=None if offset is None else offset[:, :, start:],
        )

    def to(self, device: torch.device | str | int) -> AttentionContext:
        """The context with its tensors on a device; keys stay where they are made."""

        def moved(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.to(device)

        turns, around = self.rotation, self.surround
        return replace(
            self,
            mask=moved(self.mask),
            rotation=turns and (turns[0].to(device), turns[1].to(device)),
            qk_offset=moved(self.qk_offset),
            surround=around and around.to(device),
        )

    def outside_the_loop(self) -> AttentionContext:
        if self.surround is None:
            return self
        shared = {"rotation": self.rotation, "qk_offset": self.qk_offset}
        return replace(self.surround, **shared, remember=self.remember)

    def select(self, rows: Tensor | slice) -> AttentionContext:
        mask, offset = self.mask, self.qk_offset
        if mask is not None and self.window is None and len(mask) > 1:  # one for each example
            mask = mask[rows]
        if mask is self.mask and offset is None:
            return self
        return replace(self, mask=mask, qk_offset=None if offset is None else offset[rows])


class RelativeBias(nn.Module):
    """A learned bias per head and clamped distance: ``bias[h, clamp(k - q, -w, w) + w]``."""

    def __init__(self, n_heads: int, window: int) -> None:
        super().__init__()
        self.window = window
        self.table = nn.Parameter(torch.empty(n_heads, 2 * window + 1))

    def forward(
        self, query: Int[Tensor, "#block query 1"], key: Int[Tensor, "#block 1 key"]
    ) -> Float[Tensor, "block head query key"]:
        # [block, query, key], an index into the table of distances.
        index = (key - query).clamp(-self.window, self.window) + self.window
        return self.table[:, index].transpose(0, 1)


class FireBias(nn.Module):
    r"""FIRE: a learned function of the relative distance (arXiv 2310.04418), for causal attention.

    .. math::
        b_h(q, k) = f_h\left(\frac{\psi(|q - k|)}{\psi(\max(q, L))}\right), \qquad
        \psi(x) = \log(c x + 1)

    f is a ReLU MLP of one hidden layer; c (initially 0.1) and L (initially ``threshold``) are
    learned and positive.
    """

    def __init__(self, n_heads: int, threshold: float) -> None:
        super().__init__()
        self.log_c = nn.Parameter(torch.tensor(0.1).log())
        self.log_threshold = nn.Parameter(torch.tensor(threshold).log())
        self.mlp = nn.Sequential(nn.Linear(1, 32), nn.ReLU(), nn.Linear(32, n_heads))

    def forward(
        self, query: Int[Tensor, "#block query 1"], key: Int[Tensor, "#block 1 key"]
    ) -> Float[Tensor, "block head query key"]:
        # Half precision has too few whole numbers for places.
        wide = torch.promote_types(self.log_c.dtype, torch.float32)
        c, threshold = self.log_c.to(wide).exp(), self.log_threshold.to(wide).exp()
        end = torch.maximum(query, threshold)
        # [block, query, key]: the distance as a share of the query's place, in logarithms.
        share = torch.log1p(c * (query - key).abs()) / torch.log1p(c * end)
        return self.mlp(share.to(self.log_c)[..., None]).movedim(-1, 1)


_Bias = RelativeBias | FireBias | GridBias


def attention_mask(
    config: LoopedTransformerConfig, n_pos: int, *, device: torch.device
) -> Bool[Tensor, "#head query key"]:
    """True where a query may attend: not ahead (if causal), and within the window of its head.

    Example:
        >>> from loopinterp.models import LoopedTransformerConfig
        >>> config = LoopedTransformerConfig(
        ...     d_model=8, n_heads=2, d_vocab=5, d_vocab_out=2, attention_window=1)
        >>> attention_mask(config, 3, device=torch.device("cpu")).int().tolist()
        [[[1, 0, 0], [1, 1, 0], [0, 1, 1]]]
    """
    place = torch.arange(n_pos, device=device)
    width = grid_width(n_pos) if config.positions == "grid" else None
    return _allowed(place[None, :, None], place[None, None], config, width)[0]


def _allowed(
    query: Int[Tensor, "#block query 1"],
    key: Int[Tensor, "#block 1 key"],
    config: LoopedTransformerConfig,
    width: int | None,
) -> Bool[Tensor, "#block #head query key"]:
    # [block, 1, query, key]: the axis of heads is there for heads without a window.
    distance = (key - query)[:, None]
    allowed = distance <= 0 if config.causal else torch.ones_like(distance, dtype=torch.bool)
    if config.attention_window is None:
        return allowed
    if width is not None:  # steps of a king
        down, right = _grid_offsets(query, key, width)
        distance = torch.maximum(down.abs(), right.abs())[:, None]
    near = distance.abs() <= config.attention_window
    windowed = config.windowed_heads or config.n_heads
    if windowed < config.n_heads:
        # [head, 1, 1]: the heads after the windowed ones see everything allowed.
        free = torch.arange(config.n_heads, device=distance.device) >= windowed
        near = near | free[:, None, None]
    return allowed & near


def _rotary_tables(
    n_pos: int, d_head: int, base: float, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of RoFormer (arXiv 2104.09864), for adjacent pairs."""
    # One frequency for each pair of features; angles [pos, d_head], each pair's twice.
    frequency = base ** (-torch.arange(0, d_head, 2, device=device).float() / d_head)
    angle = torch.outer(torch.arange(n_pos, device=device).float(), frequency)
    angle = angle.repeat_interleave(2, dim=-1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(
    x: Float[Tensor, "batch head pos d_head"], rotation: tuple[Tensor, Tensor]
) -> Float[Tensor, "batch head pos d_head"]:
    """Rotate adjacent pairs of features by their position's angle."""
    cos, sin = rotation
    # The pair (a, b) turned by a right angle is (-b, a).
    turned = torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)
    return x * cos + turned * sin


def abacus_positions(
    tokens: Int[Tensor, "batch pos"],
    digit_tokens: tuple[int, ...],
    offset: int | Int[Tensor, " batch"] = 0,
    *,
    signs: bool = False,
) -> Int[Tensor, "batch pos"]:
    """Index of each digit within its number, from 1, plus ``offset``; else 0.

    With ``signs``, other tokens have the offset. Source: arXiv 2405.17399 (without ``signs``).
    """
    known = torch.tensor(digit_tokens).to(tokens.device, non_blocking=True)
    digits = torch.isin(tokens, known)  # [batch, pos]: whether each token is a digit
    # Digits so far, less those before the number began, is the index within the number.
    count = digits.cumsum(-1)
    before_number = torch.where(digits, 0, count).cummax(-1).values
    offset = offset[:, None] if isinstance(offset, torch.Tensor) else offset
    # Off the digits, all digits so far lie before the number: the index there is 0.
    index = count - before_number + offset
    return index if signs else torch.where(digits, index, 0)


def check_length(n_needed: int, n_ctx: int, what: str) -> None:
    if n_needed > n_ctx:
        expected, fix = f"at most n_ctx={n_ctx} learned positions", "Shorten the input."
        raise InputError(what, expected=expected, given=str(n_needed), fix=fix)


def attention_context(
    config: LoopedTransformerConfig,
    n_pos: int,
    *,
    bias: _Bias | None,
    device: torch.device,
    dtype: torch.dtype,
    all_pairs: bool = False,
) -> AttentionContext:
    """The context of a sequence length; ``all_pairs``: not in blocks."""
    rotation, window, surround = None, config.window_of_all_heads, None
    if not config.windowed_surround:
        about = {"bias": bias, "device": device, "dtype": dtype, "all_pairs": all_pairs}
        surround = attention_context(config.without_window(), n_pos, **about)
        rotation = surround.rotation
    elif config.positions == "rotary":
        rotation = _rotary_tables(n_pos, config.head_width, config.rotary_base, device, dtype)
    if bias is None and config.attention_window is None:
        return AttentionContext(is_causal=config.causal, rotation=rotation)
    # Blocks of 16 are the quickest on a CPU for windows from 1 to 16, heads of 16 and of 64; in
    # shorter sequences, attention over all pairs is quicker.
    length = max(16, window or 0)
    if all_pairs or not config.causal or window is None or n_pos <= 4 * (length + window):
        # One block. Its axis counts: under a mask of three axes PyTorch does not fuse.
        place, window = torch.arange(n_pos, device=device), None
        query, key = place[None, :, None], place[None, None, :]
    else:
        # Block b holds the queries b * length … and the keys from window before them on; negative
        # positions are padding.
        first = torch.arange(0, n_pos, length, device=device)[:, None]
        query = (first + torch.arange(length, device=device))[:, :, None]  # [block, query, 1]
        key = (first + torch.arange(-window, length, device=device))[:, None, :]  # [block, 1, key]
    width = grid_width(n_pos) if config.positions == "grid" else None
    mask = score_mask(config, query, key, bias=bias, dtype=dtype, width=width)
    if window is not None and window <= NARROW:
        # Key j of a block lies i + window - j before query i: [distance, block, head, length].
        near = torch.stack([mask.diagonal(window - back, -2, -1) for back in range(window + 1)])
        mask = near.transpose(1, 2).flatten(2)[:, None, :, :n_pos]  # [distance, 1, head, pos]
    return AttentionContext(mask=mask, window=window, rotation=rotation, surround=surround)


def score_mask(
    config: LoopedTransformerConfig,
    query: Int[Tensor, "#block query 1"],
    key: Int[Tensor, "#block 1 key"],
    *,
    bias: _Bias | None,
    dtype: torch.dtype,
    width: int | None = None,
) -> Float[Tensor, "#block #head query key"]:
    """The bias on scores at given places (row by row on a grid); negative keys are barred."""
    # [block, head, query, key]; one head where all see the same.
    allowed = _allowed(query, key, config, width) & (key >= 0)[:, None]
    if bias is None:
        scores = torch.zeros_like(allowed, dtype=dtype)
    elif isinstance(bias, GridBias):
        assert width is not None
        scores = bias(query, key, width)
    else:
        scores = bias(query, key)
    return scores.masked_fill(~allowed, float("-inf"))
