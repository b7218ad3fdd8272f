"""A loop with the names of the retrofitted models' code, tiny and random: layers as Llama's."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from loopinterp.adapters.plain.language_models import GatedMLP, RavenConfig, RMSNorm
from tests.adapters.published.huginn import native

__all__ = ["native", "tiny"]


class Attention(nn.Module):
    """Causal attention; several queries share a key and a value."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.width, self.d_head = config.n_embd, config.head_dim
        self.kv = config.num_key_value_heads * config.head_dim
        self.Wqkv = nn.Linear(config.n_embd, config.n_embd + 2 * self.kv, bias=False)
        self.proj = nn.Linear(config.n_embd, config.n_embd, bias=False)

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        parts = self.Wqkv(x).split((self.width, self.kv, self.kv), -1)
        q, k, v = (part.unflatten(-1, (-1, self.d_head)).transpose(1, 2) for part in parts)
        q, k = apply_rotary_pos_emb(q, k, *turns)
        k, v = (y.repeat_interleave(self.width // self.kv, 1) for y in (k, v))
        ahead = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        pattern = (q @ k.mT / math.sqrt(self.d_head)).masked_fill(ahead, -torch.inf).softmax(-1)
        return self.proj((pattern @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """``x = x + attn(n1(x))``, then ``x + mlp(n2(x))``."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.attn, self.mlp = Attention(config), GatedMLP(config)
        self.norm_1 = RMSNorm(config.n_embd, config.norm_eps)
        self.norm_2 = RMSNorm(config.n_embd, config.norm_eps)

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attn(self.norm_1(x), turns)
        return x + self.mlp(self.norm_2(x))


class RetrofittedLlama(nn.Module):
    """Prelude, core and coda."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.emb_scale, width = config, 1.0, config.n_embd

        def layers(number: int) -> nn.ModuleList:
            return nn.ModuleList(Block(config) for _ in range(number))

        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, width),
                "prelude": layers(config.n_layers_in_prelude),
                "adapter": nn.Linear(2 * width, width, bias=False),
                "core_block": layers(config.n_layers_in_recurrent_block),
                "coda": layers(config.n_layers_in_coda),
                "ln_f": RMSNorm(width, config.norm_eps),
            }
        )
        self.lm_head = nn.Linear(width, config.vocab_size, bias=False)
        sizes = LlamaConfig(hidden_size=width, num_attention_heads=config.n_heads)
        self.rotary_emb = LlamaRotaryEmbedding(sizes)

    def core_block_forward(self, x: Tensor, e: Tensor) -> Tensor:
        """One loop."""
        return self._through("core_block", self.transformer["adapter"](torch.cat([x, e], -1)))

    def predict_from_latents(self, latents: Tensor) -> Tensor:
        """The readout."""
        return self.lm_head(self.transformer["ln_f"](self._through("coda", latents)))

    def _through(self, stack: str, x: Tensor) -> Tensor:
        turns = self.rotary_emb(x, torch.arange(x.shape[1])[None])
        for block in self.transformer[stack]:  # type: ignore[union-attr]
            x = block(x, turns)
        return x

    def forward(self, input_ids: Tensor, input_states: Tensor, num_steps: int) -> SimpleNamespace:
        e = self._through("prelude", self.transformer["wte"](input_ids))
        x = input_states
        for _ in range(num_steps):
            x = self.core_block_forward(x, e)
        return SimpleNamespace(logits=self.predict_from_latents(x), latent_states=x)


def tiny(seed: int = 0) -> RetrofittedLlama:
    """A random one; no norm is at its neutral initial value."""
    config: Any = RavenConfig(n_heads=4, n_layers_in_recurrent_block=2, n_layers_in_prelude=1)
    config.num_key_value_heads = 2
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = RetrofittedLlama(config)
        for weight in model.parameters():
            if weight.dim() == 1:
                nn.init.normal_(weight, mean=1.0, std=0.2)
            else:
                nn.init.normal_(weight, std=0.5 / math.sqrt(weight.shape[1]))
    return model.eval()
