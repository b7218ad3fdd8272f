"""The yardstick: a looped transformer written by hand, fused attention, nothing to look at.

:func:`plain_loop` is the leanest form; :class:`PlainLoop` holds its weights, and is the same as
modules. PyTorch is all that is imported, so it also runs in the environment of another library.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


@dataclass(frozen=True)
class Size:
    """A size at which things are timed."""

    d_model: int
    n_heads: int
    batch: int
    n_pos: int
    n_loops: int = 16
    d_vocab: int = 64

    def tokens(self) -> Tensor:
        """One batch of random tokens."""
        generator = torch.Generator().manual_seed(0)
        return torch.randint(0, self.d_vocab, (self.batch, self.n_pos), generator=generator)


SIZES = {
    "A": Size(d_model=128, n_heads=4, batch=64, n_pos=32),
    "B": Size(d_model=512, n_heads=8, batch=8, n_pos=128),
    "C": Size(d_model=128, n_heads=4, batch=1, n_pos=16),
}


class Layer(nn.Module):
    """A pre-norm layer; its parts have the names of a layer of loopinterp."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        d_model = size.d_model
        self.n_heads = size.n_heads
        self.ln1, self.ln2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.attn = nn.ModuleDict(
            {"qkv": nn.Linear(d_model, 3 * d_model), "out": nn.Linear(d_model, d_model)}
        )
        self.mlp = nn.ModuleDict(
            {"fc_in": nn.Linear(d_model, 4 * d_model), "fc_out": nn.Linear(4 * d_model, d_model)}
        )

    def forward(self, h: Tensor) -> Tensor:
        batch, n_pos, d_model = h.shape
        qkv = self.attn["qkv"](self.ln1(h)).view(batch, n_pos, 3, self.n_heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        z = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + self.attn["out"](z.transpose(1, 2).reshape(batch, n_pos, d_model))
        return h + self.mlp["fc_out"](F.gelu(self.mlp["fc_in"](self.ln2(h))))


class PlainLoop(nn.Module):
    """Embedding, learned positions, one layer applied ``n_loops`` times, final norm, readout."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.n_loops = size.n_loops
        self.embedding = nn.Embedding(size.d_vocab, size.d_model)
        self.position_embedding = nn.Embedding(size.n_pos, size.d_model)
        self.block = nn.ModuleList([Layer(size)])
        self.ln_final = nn.LayerNorm(size.d_model)
        self.unembedding = nn.Linear(size.d_model, size.d_vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens) + self.position_embedding.weight[: tokens.shape[1]]
        for _ in range(self.n_loops):
            h = self.block[0](h)
        return self.unembedding(self.ln_final(h))


def plain_loop(model: PlainLoop) -> Callable[[Tensor], Tensor]:
    """The model as one function: no modules inside the loop, every weight looked up beforehand."""
    layer = model.block[0]
    assert isinstance(layer, Layer)
    n_heads, n_loops, width = layer.n_heads, model.n_loops, (layer.ln1.weight.shape[0],)
    held = dict(layer.named_parameters())
    names = ("ln1", "attn.qkv", "attn.out", "ln2", "mlp.fc_in", "mlp.fc_out")
    (ln1, b1), (qkv, b2), (out, b3), (ln2, b4), (up, b5), (down, b6) = (
        (held[f"{name}.weight"], held[f"{name}.bias"]) for name in names
    )

    def run(tokens: Tensor) -> Tensor:
        batch, n_pos = tokens.shape
        h = model.embedding(tokens) + model.position_embedding.weight[:n_pos]
        for _ in range(n_loops):
            x = F.linear(F.layer_norm(h, width, ln1, b1), qkv, b2)
            q, k, v = x.view(batch, n_pos, 3, n_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
            z = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            h = h + F.linear(z.transpose(1, 2).reshape(batch, n_pos, -1), out, b3)
            x = F.linear(F.layer_norm(h, width, ln2, b4), up, b5)
            h = h + F.linear(F.gelu(x), down, b6)
        return model.unembedding(model.ln_final(h))

    return run
