"""The two models of a public notebook on length generalisation, on PyTorch's own layers.

Both read pairs of bits as vectors of two numbers. One is an ordinary encoder with learned
absolute positions. The other applies a single causal layer again and again, with a relative bias
clamped to a window, and adds a little of the embedding after each loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from loopinterp.models import LoopedTransformer, LoopedTransformerConfig

if TYPE_CHECKING:
    from torch import Tensor

D_FEATURES, D_OUT, DROPOUT = 2, 2, 0.1


class Standard(nn.Module):
    """Four untied layers, ``dim_feedforward`` left at PyTorch's 2048, no mask, no final norm."""

    def __init__(self, d_model: int = 64, n_heads: int = 4, n_layers: int = 4, n_ctx: int = 100):
        super().__init__()
        self.embed = nn.Linear(D_FEATURES, d_model)
        self.place = nn.Parameter(torch.randn(1, n_ctx, d_model) * 0.1)
        layer = nn.TransformerEncoderLayer(
            d_model, n_heads, dropout=DROPOUT, batch_first=True, norm_first=True
        )
        self.stack = nn.TransformerEncoder(layer, n_layers, enable_nested_tensor=False)
        self.head = nn.Linear(d_model, D_OUT)

    def forward(self, bits: Tensor) -> Tensor:
        return self.head(self.stack(self.embed(bits) + self.place[:, : bits.shape[1]]))


class Looped(nn.Module):
    """One tied layer; ``h <- layer(h) + gate * e``, starting from ``e``."""

    def __init__(self, d_model: int = 64, n_heads: int = 4, window: int = 4):
        super().__init__()
        self.window = window
        self.embed = nn.Linear(D_FEATURES, d_model)
        self.bias = nn.Parameter(torch.empty(1, n_heads, 2 * window + 1))
        nn.init.xavier_uniform_(self.bias)
        self.layer = nn.TransformerEncoderLayer(
            d_model,
            n_heads,
            dim_feedforward=4 * d_model,
            dropout=DROPOUT,
            batch_first=True,
            norm_first=True,
        )
        self.head = nn.Linear(d_model, D_OUT)
        self.gate = nn.Parameter(torch.tensor(0.1))

    def mask(self, n_pos: int) -> Tensor:
        """``[head, query, key]``: the bias of each distance, minus infinity ahead."""
        place = torch.arange(n_pos, device=self.bias.device)
        key_minus_query = place.unsqueeze(0) - place.unsqueeze(1)
        column = self.window + key_minus_query.clamp(-self.window, self.window)
        return self.bias[0][:, column].masked_fill(key_minus_query > 0, -torch.inf)

    def forward(self, bits: Tensor, n_loops: int) -> Tensor:
        e = self.embed(bits)
        # PyTorch wants one mask per example and head, examples outermost.
        mask = self.mask(bits.shape[1]).repeat(len(bits), 1, 1)
        h = e
        for _ in range(n_loops):
            h = self.layer(h, src_mask=mask) + self.gate * e
        return self.head(h)


def encoder_layer_weights(layer: nn.TransformerEncoderLayer, prefix: str) -> dict[str, Tensor]:
    """The weights of PyTorch's layer under the names of ours."""
    attn = layer.self_attn
    assert attn.in_proj_weight is not None and attn.in_proj_bias is not None
    modules = {
        "ln1": layer.norm1,
        "attn.out": attn.out_proj,
        "ln2": layer.norm2,
        "mlp.fc_in": layer.linear1,
        "mlp.fc_out": layer.linear2,
    }
    weights: dict[str, Tensor] = {
        f"{prefix}.attn.qkv.weight": attn.in_proj_weight,
        f"{prefix}.attn.qkv.bias": attn.in_proj_bias,
    }
    for name, module in modules.items():
        weights[f"{prefix}.{name}.weight"] = module.weight
        weights[f"{prefix}.{name}.bias"] = module.bias
    return weights


def _linear(module: nn.Linear, name: str) -> dict[str, Tensor]:
    return {f"{name}.weight": module.weight, f"{name}.bias": module.bias}


def standard_as_ours(peer: Standard) -> LoopedTransformer:
    """A standard transformer is a looped one that loops once."""
    first = peer.stack.layers[0]
    assert isinstance(first, nn.TransformerEncoderLayer)
    model = LoopedTransformer(
        LoopedTransformerConfig(
            d_model=first.linear1.in_features,
            n_heads=first.self_attn.num_heads,
            d_features=D_FEATURES,
            d_vocab_out=D_OUT,
            n_loops=1,
            n_layers=len(peer.stack.layers),
            d_mlp=first.linear1.out_features,
            act_fn="relu",
            causal=False,
            positions="absolute",
            n_ctx=peer.place.shape[1],
            final_norm=False,
        )
    )
    weights = _linear(peer.embed, "embedding") | _linear(peer.head, "unembedding")
    weights["position_embedding.weight"] = peer.place[0]
    for number, layer in enumerate(peer.stack.layers):
        assert isinstance(layer, nn.TransformerEncoderLayer)
        weights |= encoder_layer_weights(layer, f"block.{number}")
    model.load_state_dict(weights)
    return model.eval()


def looped_as_ours(peer: Looped) -> LoopedTransformer:
    """The looped model, with its weights copied."""
    model = LoopedTransformer(
        LoopedTransformerConfig(
            d_model=peer.head.in_features,
            n_heads=peer.layer.self_attn.num_heads,
            d_features=D_FEATURES,
            d_vocab_out=D_OUT,
            n_loops=12,
            act_fn="relu",
            positions="relative",
            relative_window=peer.window,
            injection="gated_output",
            final_norm=False,
        )
    )
    weights = _linear(peer.embed, "embedding") | _linear(peer.head, "unembedding")
    weights |= encoder_layer_weights(peer.layer, "block.0")
    weights |= {"relative_bias.table": peer.bias[0], "gate": peer.gate}
    model.load_state_dict(weights)
    return model.eval()
