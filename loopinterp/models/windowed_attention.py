"""Attention within a hard causal window, block by block: a window of w costs w keys, not n.

The positions are cut into blocks of ``c = max(16, w)``. The queries of a block see the keys of
their own block and the w before it, so that scores are ``[n / c, c, c + w]`` instead of ``[n, n]``,
and still products of matrices. Equal to attention under the whole mask, to rounding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

# Of 8, 16 and 32 the quickest on a CPU for windows from 1 to 16, heads of 16 and of 64.
_LEAST_BLOCK = 16


def _block_length(window: int) -> int:
    return max(_LEAST_BLOCK, window)


def pays(n_pos: int, window: int) -> bool:
    """Whether going block by block is quicker than one fused operation over all pairs."""
    return n_pos > 4 * (_block_length(window) + window)


def block_places(
    n_pos: int, window: int, *, device: torch.device
) -> tuple[Int[Tensor, "block query 1"], Int[Tensor, "block 1 key"]]:
    """Positions of the queries and keys of each block; negative ones are padding.

    Example:
        >>> query, key = block_places(20, 1, device=torch.device("cpu"))
        >>> query[1, :3, 0].tolist(), key[0, 0, :3].tolist(), key[1, 0, :3].tolist()
        ([16, 17, 18], [-1, 0, 1], [15, 16, 17])
    """
    length = _block_length(window)
    first = torch.arange(0, n_pos, length, device=device)[:, None]
    query = first + torch.arange(length, device=device)
    key = first + torch.arange(-window, length, device=device)
    return query[:, :, None], key[:, None, :]


def windowed_attention(
    q: Float[Tensor, "batch head pos d_head"],
    k: Float[Tensor, "batch head pos d_head"],
    v: Float[Tensor, "batch head pos d_head"],
    *,
    mask: Float[Tensor, "#block #head query key"],
    window: int,
) -> Float[Tensor, "batch head pos d_head"]:
    """``softmax(q k^T / sqrt(d_head) + mask) v`` over the keys of each block.

    The mask is a bias at :func:`block_places`, minus infinity outside the window, of so many keys
    before a query, and on padding.
    """
    n_pos, (n_blocks, _, length, _) = q.shape[2], mask.shape
    behind = n_blocks * length - n_pos

    def blocks(x: Tensor, before: int) -> Tensor:  # [batch, block, head, before + length, d_head]
        padded = F.pad(x, (0, 0, before, behind))
        return padded.unfold(2, before + length, length).permute(0, 2, 1, 4, 3)

    q, k, v = blocks(q * q.shape[-1] ** -0.5, 0), blocks(k, window), blocks(v, window)
    pattern = (q @ k.transpose(-2, -1) + mask).softmax(-1)
    return (pattern @ v).transpose(1, 2).flatten(2, 3)[:, :, :n_pos]


NEAR = 8
"""A window up to which :func:`attend_near` is quicker in the few positions of a cone."""


def attend_near(
    q: Float[Tensor, "batch head pos d_head"],
    k: Float[Tensor, "batch head key d_head"],
    v: Float[Tensor, "batch head key d_head"],
    *,
    window: int,
    bias: Float[Tensor, "#head distance"] | None,
    first: Int[Tensor, " batch"],
) -> Float[Tensor, "batch head pos d_head"]:
    """Attention of few positions within a narrow causal window, distance by distance.

    A product of matrices for each head of each example costs more than what is in it, where
    these are of two keys.

    Args:
        q: Queries.
        k: Keys of ``window`` positions before the first query, and of those of the queries.
        v: Their values.
        window: How far a query looks back.
        bias: Added to the scores of each distance 0 .. window.
        first: The position of the first query of each example; keys before 0 are barred.
    """
    n_pos, q = q.shape[2], q * q.shape[-1] ** -0.5
    shifts = [slice(window - back, window - back + n_pos) for back in range(window + 1)]
    scores = torch.stack([(q * k[:, :, shift]).sum(-1) for shift in shifts])
    if bias is not None:
        scores = scores + bias.T[:, None, :, None]
    if bool((first < window).any()):
        place = first[:, None] + torch.arange(n_pos, device=q.device)
        back = torch.arange(window + 1, device=q.device)[:, None, None]
        scores = scores.masked_fill((place < back)[:, :, None], float("-inf"))
    pattern = scores.softmax(0)[..., None]
    z = pattern[0] * v[:, :, shifts[0]]
    for weight, shift in zip(pattern[1:], shifts[1:]):
        z = torch.addcmul(z, weight, v[:, :, shift])
    return z
