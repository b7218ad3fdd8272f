"""Ouro in plain PyTorch: the published structure and names, written from its mathematics.

``model.norm`` follows every pass; the next pass, the head and the exit gate read its output.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class OuroConfig:
    model_type: str = "ouro"
    vocab_size: int = 64
    hidden_size: int = 32
    intermediate_size: int = 48
    num_hidden_layers: int = 2
    num_attention_heads: int = 2
    num_key_value_heads: int = 2
    max_position_embeddings: int = 64
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6
    total_ut_steps: int = 4
    early_exit_threshold: float | None = None
    sliding_window: int | None = None
    layer_types: list[str] = field(default_factory=list)
    use_cache: bool = True
    attention_dropout: float = 0.0
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        self.head_dim = self.hidden_size // self.num_attention_heads
        self.layer_types = self.layer_types or ["full_attention"] * self.num_hidden_layers


class OuroRMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        scale = (x.float().square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()
        return self.weight * (x.float() * scale).to(x.dtype)


class OuroRotaryEmbedding(nn.Module):
    inv_freq: Tensor

    def __init__(self, config: OuroConfig) -> None:
        super().__init__()
        exponents = torch.arange(0, config.head_dim, 2).float() / config.head_dim
        self.register_buffer("inv_freq", config.rope_theta**-exponents, persistent=False)
        self.attention_scaling = 1.0

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None].float() * self.inv_freq
        angles = torch.cat([angles, angles], -1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x`` of ``[batch, head, pos, d]``, the pairs ``(i, i + d / 2)`` turned by their angles."""
    first, second = x.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return x * cos + torch.cat([-second, first], -1) * sin


class OuroAttention(nn.Module):
    def __init__(self, config: OuroConfig) -> None:
        super().__init__()
        self.config, width = config, config.hidden_size
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        kv = config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(width, config.num_attention_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(width, kv, bias=False)
        self.v_proj = nn.Linear(width, kv, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * self.head_dim, width, bias=False)

    def forward(self, x: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> Tensor:
        heads = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k, v = heads
        q, k = (_rotated(each, *position_embeddings) for each in (q, k))
        k, v = (each.repeat_interleave(self.num_key_value_groups, 1) for each in (k, v))
        scores = q @ k.mT * self.scaling
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        pattern = scores.masked_fill(ahead, -torch.inf).softmax(-1)
        return self.o_proj((pattern @ v).transpose(1, 2).flatten(2))


class OuroMLP(nn.Module):
    """``down(silu(gate x) * up x)``."""

    def __init__(self, config: OuroConfig) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class OuroDecoderLayer(nn.Module):
    """``h + n2(attn(n1(h)))``, then ``h + n4(mlp(n3(h)))``."""

    def __init__(self, config: OuroConfig) -> None:
        super().__init__()
        self.self_attn, self.mlp = OuroAttention(config), OuroMLP(config)
        width, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = OuroRMSNorm(width, eps)
        self.input_layernorm_2 = OuroRMSNorm(width, eps)
        self.post_attention_layernorm = OuroRMSNorm(width, eps)
        self.post_attention_layernorm_2 = OuroRMSNorm(width, eps)

    def forward(self, h: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> Tensor:
        attended = self.self_attn(self.input_layernorm(h), position_embeddings)
        h = h + self.input_layernorm_2(attended)
        written = self.mlp(self.post_attention_layernorm(h))
        return h + self.post_attention_layernorm_2(written)


class OuroModel(nn.Module):
    def __init__(self, config: OuroConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            OuroDecoderLayer(config) for _ in range(config.num_hidden_layers)
        )
        self.norm = OuroRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = OuroRotaryEmbedding(config)
        self.early_exit_gate = nn.Linear(config.hidden_size, 1)
        self.total_ut_steps = config.total_ut_steps

    def forward(self, input_ids: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """States after each pass, and the exit gate's logits there ``[batch, pos, 1]``."""
        h = self.embed_tokens(input_ids)
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        turned = self.rotary_emb(h, positions)
        states: list[Tensor] = []
        for _ in range(self.total_ut_steps):
            for layer in self.layers:
                h = layer(h, turned)
            h = self.norm(h)
            states.append(h)
        return states, [self.early_exit_gate(state) for state in states]


class OuroForCausalLM(nn.Module):
    def __init__(self, config: OuroConfig) -> None:
        super().__init__()
        self.config = config
        self.model = OuroModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> SimpleNamespace:
        states, gates = self.model(input_ids)
        stop = torch.cat(gates, -1).sigmoid()  # [batch, pos, loop]
        left = F.pad((1 - stop).cumprod(-1), (1, 0), value=1.0)
        exits = torch.cat([stop[..., :-1] * left[..., :-2], left[..., -2:-1]], -1)
        return SimpleNamespace(logits=self.lm_head(states[-1]), exits=exits, states=states)
