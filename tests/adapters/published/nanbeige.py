"""A looped stack with the names of Nanbeige's code, tiny and random, of Llama's layers."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)


class Stack(nn.Module):
    """The layers, the norm after each loop, and angles in each layer's attention."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.n_loops = 2
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(LlamaDecoderLayer(config, k) for k in range(2))
        for layer in self.layers:
            layer.self_attn.rotary_emb = LlamaRotaryEmbedding(config)  # type: ignore[union-attr]
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.ngram_layer_fusion = nn.ModuleDict()

    def _get_num_loops(self) -> int:
        return self.n_loops

    def loops(self, h: Tensor, n_loops: int) -> Tensor:
        """The state after so many loops from another one."""
        place = torch.arange(h.shape[1])
        ahead = torch.full((len(place), len(place)), -1e9).triu(1)[None, None]
        for _ in range(n_loops):
            for layer in self.layers:
                turns = layer.self_attn.rotary_emb(h, place[None])  # type: ignore[union-attr]
                h = layer(h, attention_mask=ahead, position_embeddings=turns)
            h = self.norm(h)
        return h


class LoopedLlama(nn.Module):
    """With a head."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config, self.model = config, Stack(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.model.loops(self.model.embed_tokens(tokens), self.model.n_loops)
        return self.lm_head(h)


def tiny(seed: int = 0, **sizes: Any) -> LoopedLlama:
    """A random one; no norm or bias is at its neutral initial value."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, **sizes,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LoopedLlama(config)
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                nn.init.normal_(weight, mean=1.0 if "norm" in name else 0.0, std=0.2)
            else:
                nn.init.normal_(weight, std=1 / math.sqrt(weight.shape[1]))
    return model.eval()


def native(model: LoopedLlama, tokens: Tensor, n_loops: int) -> Tensor:
    """Logits of the model's own forward after so many loops."""
    return model.lm_head(model.model.loops(model.model.embed_tokens(tokens), n_loops))
