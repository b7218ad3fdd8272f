"""A looped decoder with abacus positions, as a public reproduction of arXiv 2405.17399 builds it.

The embedding of a digit's place within its number is added to queries and keys, at every layer.
The token embedding is added to what each sublayer reads, after its norm. There is no final norm.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from loopinterp.models import LoopedTransformer, LoopedTransformerConfig

if TYPE_CHECKING:
    from torch import Tensor

ALPHABET = "0123456789-+*=$"


def encode(texts: list[str]) -> Tensor:
    """Token indices; all texts must be equally long."""
    return torch.tensor([[ALPHABET.index(symbol) for symbol in text] for text in texts])


def places(tokens: Tensor, offset: int) -> Tensor:
    """1, 2, 3, … along each run of digits, plus the offset; 0 elsewhere."""
    rows = []
    for row in tokens.tolist():
        text, place = "".join(ALPHABET[token] for token in row), [0] * len(row)
        for number in re.finditer(r"[0-9]+", text):
            for digit in range(*number.span()):
                place[digit] = offset + 1 + digit - number.start()
        rows.append(place)
    return torch.tensor(rows)


class DecoderLayer(nn.Module):
    def __init__(self, d_model: int, n_heads: int, d_mlp: int):
        super().__init__()
        self.n_heads = n_heads
        self.qkv, self.out = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)
        self.norm1 = nn.LayerNorm(d_model, eps=1e-12)
        self.norm2 = nn.LayerNorm(d_model, eps=1e-12)
        self.up, self.down = nn.Linear(d_model, d_mlp), nn.Linear(d_mlp, d_model)

    def forward(self, h: Tensor, e: Tensor, place: Tensor) -> Tensor:
        batch, n_pos, d_model = h.shape
        q, k, v = self.qkv(self.norm1(h) + e).chunk(3, dim=-1)
        q, k = q + place, k + place
        q, k, v = (x.view(batch, n_pos, self.n_heads, -1).permute(0, 2, 1, 3) for x in (q, k, v))
        scores = q @ k.mT / (d_model / self.n_heads) ** 0.5
        barred = torch.ones(n_pos, n_pos, dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(barred, -torch.inf).softmax(-1) @ v
        h = h + self.out(mixed.permute(0, 2, 1, 3).reshape(batch, n_pos, d_model))
        return h + self.down(F.gelu(self.up(self.norm2(h) + e)))


class AbacusDecoder(nn.Module):
    """A block of ``depth`` layers, looped; a linear head with a bias."""

    def __init__(self, *, d_model: int, n_heads: int, d_mlp: int, depth: int, n_places: int = 512):
        super().__init__()
        self.embed = nn.Embedding(len(ALPHABET), d_model)
        self.place = nn.Embedding(n_places, d_model)
        self.layers = nn.ModuleList(DecoderLayer(d_model, n_heads, d_mlp) for _ in range(depth))
        self.head = nn.Linear(d_model, len(ALPHABET))

    def forward(self, tokens: Tensor, n_loops: int, offset: int = 0) -> Tensor:
        e, place = self.embed(tokens), self.place(places(tokens, offset))
        h = e
        for _ in range(n_loops):
            for layer in self.layers:
                h = layer(h, e, place)
        return self.head(h)


def as_ours(peer: AbacusDecoder) -> LoopedTransformer:
    """The same model, weights copied."""
    layers = [layer for layer in peer.layers if isinstance(layer, DecoderLayer)]
    model = LoopedTransformer(
        LoopedTransformerConfig(
            d_model=peer.head.in_features,
            n_heads=layers[0].n_heads,
            d_vocab=len(ALPHABET),
            d_vocab_out=len(ALPHABET),
            n_layers=len(layers),
            d_mlp=layers[0].up.out_features,
            act_fn="gelu",
            positions="abacus",
            abacus_target="qk",
            n_ctx=peer.place.num_embeddings,
            digit_tokens=tuple(range(10)),
            norm_eps=1e-12,
            injection="sublayer",
            final_norm=False,
        )
    )
    weights: dict[str, Tensor] = {
        "embedding.weight": peer.embed.weight,
        "position_embedding.weight": peer.place.weight,
        "unembedding.weight": peer.head.weight,
        "unembedding.bias": peer.head.bias,
    }
    for number, layer in enumerate(layers):
        for ours, module in (
            ("ln1", layer.norm1),
            ("attn.qkv", layer.qkv),
            ("attn.out", layer.out),
            ("ln2", layer.norm2),
            ("mlp.fc_in", layer.up),
            ("mlp.fc_out", layer.down),
        ):
            weights[f"block.{number}.{ours}.weight"] = module.weight
            weights[f"block.{number}.{ours}.bias"] = module.bias
    model.load_state_dict(weights)
    return model.eval()
