"""Huginn and Ouro in plain PyTorch: the published structure and names, from their mathematics.

Ouro's ``model.norm`` follows every pass; the next pass, the head and the exit gate read its output.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class RavenConfig:
    model_type: str = "huginn_raven"
    n_embd: int = 32
    n_heads: int = 2
    block_size: int = 64
    vocab_size: int = 64
    intermediate_size: int = 48
    n_layers_in_prelude: int = 2
    n_layers_in_recurrent_block: int = 4
    n_layers_in_coda: int = 2
    mean_recurrence: int = 4
    norm_eps: float = 1e-6
    rope_base: float = 50_000
    qk_bias: bool = True
    bias: bool = False
    tie_embeddings: bool = True
    test_time_noise: float = 0
    nonlin_name: str = "SiLU"
    injection_type: str = "linear"
    state_init: str = "like-init"

    def __post_init__(self) -> None:
        self.padded_vocab_size = self.vocab_size
        self.num_attention_heads = self.num_key_value_heads = self.n_heads
        self.head_dim = self.n_embd // self.n_heads
        self.init_values = {"std": math.sqrt(2 / (5 * self.n_embd))}


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        scale = (x.float().square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return (x.float() * scale).to(x.dtype) * self.weight


def _turned(x: Tensor, turns: Tensor) -> Tensor:
    """``x`` of ``[batch, pos, head, d]``: neighbours are complex numbers, and turned."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turns).flatten(3)


class CausalSelfAttention(nn.Module):
    def __init__(self, config: RavenConfig) -> None:
        super().__init__()
        self.config = config
        self.n_head, self.head_dim = config.n_heads, config.head_dim
        self.Wqkv = nn.Linear(config.n_embd, 3 * config.n_embd, bias=False)
        if config.qk_bias:
            self.qk_bias = nn.Parameter(torch.zeros(2, 1, self.n_head, self.head_dim))
        self.proj = nn.Linear(config.n_embd, config.n_embd, bias=False)

    def forward(self, x: Tensor, freqs_cis: Tensor) -> Tensor:
        qkv = self.Wqkv(x).unflatten(-1, (3, self.n_head, self.head_dim))
        q, k, v = qkv.unbind(2)  # each [batch, pos, head, d]
        if self.config.qk_bias:
            q, k = q + self.qk_bias[0], k + self.qk_bias[1]
        turns = torch.view_as_complex(freqs_cis.contiguous())  # [1, pos, 1, d / 2]
        q, k = (_turned(each.float(), turns) for each in (q, k))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(self.head_dim)
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        pattern = scores.masked_fill(ahead, -torch.inf).softmax(-1).to(x.dtype)
        return self.proj(torch.einsum("bhqk,bkhd->bqhd", pattern, v).flatten(2))


class GatedMLP(nn.Module):
    """``proj(silu(a) * b)`` with ``(a, b) = fc(x)``."""

    def __init__(self, config: RavenConfig) -> None:
        super().__init__()
        self.fc = nn.Linear(config.n_embd, 2 * config.intermediate_size, bias=False)
        self.proj = nn.Linear(config.intermediate_size, config.n_embd, bias=False)
        self.nonlin = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.fc(x).chunk(2, -1)
        return self.proj(self.nonlin(gate) * up)


class SandwichBlock(nn.Module):
    """``x = n2(x + attn(n1(x)))``, then ``n4(x + mlp(n3(x)))``: the sum itself is normed."""

    def __init__(self, config: RavenConfig) -> None:
        super().__init__()
        self.attn, self.mlp = CausalSelfAttention(config), GatedMLP(config)
        self.norm_1 = RMSNorm(config.n_embd, config.norm_eps)
        self.norm_2 = RMSNorm(config.n_embd, config.norm_eps)
        self.norm_3 = RMSNorm(config.n_embd, config.norm_eps)
        self.norm_4 = RMSNorm(config.n_embd, config.norm_eps)

    def forward(self, x: Tensor, freqs_cis: Tensor) -> Tensor:
        x = self.norm_2(x + self.attn(self.norm_1(x), freqs_cis))
        return self.norm_4(x + self.mlp(self.norm_3(x)))


class RavenForCausalLM(nn.Module):
    freqs_cis: Tensor

    def __init__(self, config: RavenConfig) -> None:
        super().__init__()
        self.config = config

        def layers(number: int) -> nn.ModuleList:
            return nn.ModuleList(SandwichBlock(config) for _ in range(number))

        width = config.n_embd
        embedding = nn.Embedding(config.vocab_size, width)
        self.transformer = nn.ModuleDict(
            {
                "wte": embedding,
                "prelude": layers(config.n_layers_in_prelude),
                "adapter": nn.Linear(2 * width, width, bias=config.bias),
                "core_block": layers(config.n_layers_in_recurrent_block),
                "coda": layers(config.n_layers_in_coda),
                "ln_f": RMSNorm(width, config.norm_eps),
            }
        )
        self.lm_head = nn.Linear(width, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = embedding.weight
        inverse = config.rope_base ** -(torch.arange(0, config.head_dim, 2) / config.head_dim)
        angles = torch.outer(torch.arange(config.block_size).float(), inverse)
        turns = torch.stack([angles.cos(), angles.sin()], -1)
        self.register_buffer("freqs_cis", turns[None, :, None], persistent=True)

    @property
    def emb_scale(self) -> float:
        return math.sqrt(self.config.n_embd)

    def initialize_state(self, input_embeds: Tensor, scale: float = 1.0) -> Tensor:
        std = self.config.init_values["std"] * scale
        x = torch.empty_like(input_embeds)
        return nn.init.trunc_normal_(x, std=std, a=-3 * std, b=3 * std) * self.emb_scale

    def embed_inputs(self, input_ids: Tensor) -> Tensor:
        e = self.transformer["wte"](input_ids) * self.emb_scale
        return self._through("prelude", e)

    def core_block_forward(self, x: Tensor, e: Tensor) -> Tensor:
        return self._through("core_block", self.transformer["adapter"](torch.cat([x, e], -1)))

    def predict_from_latents(self, latents: Tensor) -> Tensor:
        norm = self.transformer["ln_f"]
        return self.lm_head(norm(self._through("coda", norm(latents)))).float()

    def _through(self, stack: str, x: Tensor) -> Tensor:
        for block in self.transformer[stack]:  # type: ignore[union-attr]
            x = block(x, self.freqs_cis[:, : x.shape[1]])
        return x

    def forward(
        self, input_ids: Tensor, input_states: Tensor | None = None, num_steps: int | None = None
    ) -> SimpleNamespace:
        e = self.embed_inputs(input_ids)
        x = self.initialize_state(e) if input_states is None else input_states
        with torch.no_grad():
            for _ in range(self.config.mean_recurrence if num_steps is None else int(num_steps)):
                x = self.core_block_forward(x, e)
        return SimpleNamespace(logits=self.predict_from_latents(x), latent_states=x)


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
