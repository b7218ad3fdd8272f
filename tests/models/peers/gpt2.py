"""A looped GPT-2 without positions, as in "Looped Transformers for Length Generalization".

Source: arXiv 2409.15647 and its public code. ``h_0 = 0`` and ``h <- f(h + e)``, where f is the
whole backbone of Hugging Face, its final norm included; the readout follows the last loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import GPT2Config, GPT2Model

from loopinterp.models import LoopedTransformer, LoopedTransformerConfig

if TYPE_CHECKING:
    from torch import Tensor

PLAIN = {
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "use_cache": False,
    "bos_token_id": None,
    "eos_token_id": None,
}
"""Settings of a GPT-2 that only computes."""

NAMES = {
    "ln1": "ln_1",
    "attn.qkv": "attn.c_attn",
    "attn.out": "attn.c_proj",
    "ln2": "ln_2",
    "mlp.fc_in": "mlp.c_fc",
    "mlp.fc_out": "mlp.c_proj",
}
"""Modules of a layer, by our names; GPT-2 has their matrices transposed."""


class LoopedGPT2(nn.Module):
    """``depth`` layers of GPT-2 in a loop."""

    def __init__(self, d_vocab: int, d_out: int, *, d_model: int, n_heads: int, depth: int):
        super().__init__()
        config = GPT2Config(
            vocab_size=1,
            n_positions=512,
            n_embd=d_model,
            n_layer=depth,
            n_head=n_heads,
            **PLAIN,
        )
        self.embed = nn.Embedding(d_vocab, d_model)
        self.backbone = GPT2Model(config)
        nn.init.zeros_(self.backbone.wpe.weight)
        self.head = nn.Linear(d_model, d_out)

    def forward(self, tokens: Tensor, n_loops: int) -> Tensor:
        e = self.embed(tokens)
        h = torch.zeros_like(e)
        for _ in range(n_loops):
            h = self.backbone(inputs_embeds=h + e).last_hidden_state
        return self.head(h)


def as_ours(peer: LoopedGPT2) -> LoopedTransformer:
    """The same model, weights copied."""
    config = peer.backbone.config
    model = LoopedTransformer(
        LoopedTransformerConfig(
            d_model=config.n_embd,
            n_heads=config.n_head,
            d_vocab=peer.embed.num_embeddings,
            d_vocab_out=peer.head.out_features,
            n_layers=config.n_layer,
            act_fn="gelu_new",
            norm_eps=config.layer_norm_epsilon,
            loop_norm=True,
            injection="input",
            initial_state="zeros",
            final_norm=False,
        )
    )
    weights: dict[str, Tensor] = {"embedding.weight": peer.embed.weight}
    theirs = peer.backbone.state_dict()
    for number in range(config.n_layer):
        for ours, name in NAMES.items():
            weight = theirs[f"h.{number}.{name}.weight"]
            weights[f"block.{number}.{ours}.weight"] = weight.T if weight.dim() == 2 else weight
            weights[f"block.{number}.{ours}.bias"] = theirs[f"h.{number}.{name}.bias"]
    weights |= {"ln_loop.weight": theirs["ln_f.weight"], "ln_loop.bias": theirs["ln_f.bias"]}
    weights |= {"unembedding.weight": peer.head.weight, "unembedding.bias": peer.head.bias}
    model.load_state_dict(weights)
    return model.eval()
