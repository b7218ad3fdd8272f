"""HRM and TRM in plain PyTorch: the published structures and names, written from their mathematics.

In HRM a fast stack, ``z_L <- L(z_L + z_H + e)``, runs several times, then a slow one,
``z_H <- H(z_H + z_L)``. Segments of ``H_cycles`` such cycles follow one another until a head halts.
TRM has one stack for both parts of the state; with ``mlp_t`` an MLP over positions replaces
attention.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class HRMConfig:
    batch_size: int = 2
    seq_len: int = 6
    vocab_size: int = 64
    puzzle_emb_ndim: int = 0
    num_puzzle_identifiers: int = 5
    H_cycles: int = 2
    L_cycles: int = 2
    H_layers: int = 2
    L_layers: int = 1
    hidden_size: int = 32
    expansion: float = 2.0
    num_heads: int = 2
    pos_encodings: str = "rope"
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    halt_max_steps: int = 2
    halt_exploration_prob: float = 0.1
    forward_dtype: str = "float32"


@dataclass
class InnerCarry:
    z_H: Tensor
    z_L: Tensor


@dataclass
class Carry:
    inner_carry: InnerCarry
    steps: Tensor
    halted: Tensor
    current_data: dict[str, Tensor]


def rms_norm(x: Tensor, eps: float) -> Tensor:
    """``x / rms(x)``; there is no weight."""
    return (x.float() * (x.float().square().mean(-1, keepdim=True) + eps).rsqrt()).to(x.dtype)


class CastedLinear(nn.Module):
    """A linear map whose weights are cast to the type of its input."""

    def __init__(self, n_in: int, n_out: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n_out, n_in) * 0.6 / math.sqrt(n_in))
        self.bias = nn.Parameter(torch.randn(n_out)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)


class CastedEmbedding(nn.Module):
    def __init__(self, number: int, width: int, cast_to: torch.dtype) -> None:
        super().__init__()
        self.embedding_weight = nn.Parameter(torch.randn(number, width) / math.sqrt(width))
        self.cast_to = cast_to

    def forward(self, index: Tensor) -> Tensor:
        return self.embedding_weight.to(self.cast_to)[index.long()]


class CastedSparseEmbedding(nn.Module):
    weights: Tensor

    def __init__(self, number: int, width: int, cast_to: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("weights", torch.randn(number, width))
        self.cast_to = cast_to

    def forward(self, index: Tensor) -> Tensor:
        return self.weights[index.long()].to(self.cast_to)


class RotaryEmbedding(nn.Module):
    cos_cached: Tensor
    sin_cached: Tensor

    def __init__(self, dim: int, length: int, base: float) -> None:
        super().__init__()
        angles = torch.outer(
            torch.arange(length).float(), base ** -(torch.arange(0, dim, 2).float() / dim)
        ).repeat(1, 2)
        self.register_buffer("cos_cached", angles.cos(), persistent=False)
        self.register_buffer("sin_cached", angles.sin(), persistent=False)

    def forward(self) -> tuple[Tensor, Tensor]:
        return self.cos_cached, self.sin_cached


class HRMAttention(nn.Module):
    def __init__(self, width: int, n_heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = n_heads, width // n_heads
        self.qkv_proj = CastedLinear(width, 3 * width, bias=False)
        self.o_proj = CastedLinear(width, width, bias=False)

    def forward(self, cos_sin: tuple[Tensor, Tensor] | None, hidden_states: Tensor) -> Tensor:
        qkv = self.qkv_proj(hidden_states).unflatten(-1, (3, self.num_heads, self.head_dim))
        q, k, v = qkv.unbind(2)  # each [batch, pos, head, d]
        if cos_sin is not None:
            cos, sin = (each[:, None] for each in cos_sin)
            q, k = (
                (x * cos + torch.cat([-x.chunk(2, -1)[1], x.chunk(2, -1)[0]], -1) * sin).to(x.dtype)
                for x in (q, k)
            )
        pattern = torch.einsum("bqhd,bkhd->bhqk", q, k).div(math.sqrt(self.head_dim)).softmax(-1)
        return self.o_proj(torch.einsum("bhqk,bkhd->bqhd", pattern, v).flatten(2))


class SwiGLU(nn.Module):
    """``down(silu(gate) * up)`` with ``(gate, up) = gate_up_proj(x)``."""

    def __init__(self, width: int, expansion: float) -> None:
        super().__init__()
        inner = math.ceil(round(expansion * width * 2 / 3) / 256) * 256
        self.gate_up_proj = CastedLinear(width, 2 * inner, bias=False)
        self.down_proj = CastedLinear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(F.silu(gate) * up)


class Block(nn.Module):
    """``h <- norm(h + attn(h))``, then ``norm(h + mlp(h))``."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.self_attn = HRMAttention(config.hidden_size, config.num_heads)
        self.mlp = SwiGLU(config.hidden_size, config.expansion)
        self.norm_eps = config.rms_norm_eps

    def forward(self, cos_sin: tuple[Tensor, Tensor] | None, hidden_states: Tensor) -> Tensor:
        h = rms_norm(hidden_states + self.self_attn(cos_sin, hidden_states), self.norm_eps)
        return rms_norm(h + self.mlp(h), self.norm_eps)


class ReasoningModule(nn.Module):
    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(
        self,
        hidden_states: Tensor,
        input_injection: Tensor,
        cos_sin: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        h = hidden_states + input_injection
        for layer in self.layers:
            h = layer(cos_sin, h)
        return h


class InnerBase(nn.Module):
    """Embeddings, heads, initial state and readout of HRM and TRM."""

    H_init: Tensor
    L_init: Tensor

    def __init__(self, config: Any, puzzle_emb_len: int) -> None:
        super().__init__()
        self.config = config
        self.forward_dtype = dtype = getattr(torch, config.forward_dtype)
        width, self.puzzle_emb_len = config.hidden_size, puzzle_emb_len
        self.embed_scale, length = math.sqrt(width), config.seq_len + puzzle_emb_len
        self.embed_tokens = CastedEmbedding(config.vocab_size, width, dtype)
        self.lm_head = CastedLinear(width, config.vocab_size, bias=False)
        self.q_head = CastedLinear(width, 2, bias=True)
        if config.puzzle_emb_ndim > 0:
            number = config.num_puzzle_identifiers
            self.puzzle_emb = CastedSparseEmbedding(number, config.puzzle_emb_ndim, dtype)
        if config.pos_encodings == "rope":
            head = width // config.num_heads
            self.rotary_emb = RotaryEmbedding(head, length, config.rope_theta)
        elif config.pos_encodings == "learned":
            self.embed_pos = CastedEmbedding(length, width, dtype)
        self.register_buffer("H_init", torch.randn(width, dtype=dtype))
        self.register_buffer("L_init", torch.randn(width, dtype=dtype))

    def _input_embeddings(self, tokens: Tensor, puzzle_identifiers: Tensor) -> Tensor:
        e = self.embed_tokens(tokens)
        if self.config.puzzle_emb_ndim > 0:
            puzzle = self.puzzle_emb(puzzle_identifiers)
            room = self.puzzle_emb_len * self.config.hidden_size
            puzzle = F.pad(puzzle, (0, room - puzzle.shape[-1]))
            e = torch.cat([puzzle.unflatten(-1, (-1, self.config.hidden_size)), e], 1)
        if self.config.pos_encodings == "learned":
            e = (e + self.embed_pos.embedding_weight.to(e.dtype)) * math.sqrt(0.5)
        return e * self.embed_scale

    def cycles(self, z_H: Tensor, z_L: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def forward(
        self, carry: InnerCarry, batch: dict[str, Tensor]
    ) -> tuple[InnerCarry, Tensor, tuple[Tensor, Tensor]]:
        e = self._input_embeddings(batch["inputs"], batch["puzzle_identifiers"])
        z_H, z_L = self.cycles(carry.z_H, carry.z_L, e)
        halt = self.q_head(z_H[:, 0]).float()
        logits = self.lm_head(z_H)[:, self.puzzle_emb_len :]
        return InnerCarry(z_H.detach(), z_L.detach()), logits, (halt[..., 0], halt[..., 1])

    def _turns(self) -> tuple[Tensor, Tensor] | None:
        return self.rotary_emb() if self.config.pos_encodings == "rope" else None


class HierarchicalReasoningModel_ACTV1_Inner(InnerBase):
    """Both stacks; only the last application of each has a gradient."""

    def __init__(self, config: HRMConfig) -> None:
        super().__init__(config, math.ceil(config.puzzle_emb_ndim / config.hidden_size))
        self.H_level = ReasoningModule([Block(config) for _ in range(config.H_layers)])
        self.L_level = ReasoningModule([Block(config) for _ in range(config.L_layers)])

    def cycles(self, z_H: Tensor, z_L: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
        turns, n_slow, n_fast = self._turns(), self.config.H_cycles, self.config.L_cycles
        for slow in range(n_slow):
            for fast in range(n_fast):
                last = (slow, fast) == (n_slow - 1, n_fast - 1)
                with torch.set_grad_enabled(torch.is_grad_enabled() and last):
                    z_L = self.L_level(z_L, z_H + e, turns)
            with torch.set_grad_enabled(torch.is_grad_enabled() and slow == n_slow - 1):
                z_H = self.H_level(z_H, z_L, turns)
        return z_H, z_L


class ACTWrapper(nn.Module):
    """Segments, one a call; in evaluation every example runs ``halt_max_steps`` of them."""

    inner: Any

    def __init__(self, config: Any, inner: nn.Module) -> None:
        super().__init__()
        self.config, self.inner = config, inner

    def initial_carry(self, batch: dict[str, Tensor]) -> Carry:
        inputs = batch["inputs"]
        shape = len(inputs), inputs.shape[1] + self.inner.puzzle_emb_len, self.config.hidden_size
        empty = torch.empty(shape, dtype=self.inner.forward_dtype)
        steps = torch.zeros(len(inputs), dtype=torch.int32)
        return Carry(InnerCarry(empty, empty), steps, torch.ones(len(inputs)).bool(), dict(batch))

    def forward(self, carry: Carry, batch: dict[str, Tensor]) -> tuple[Carry, dict[str, Tensor]]:
        anew = carry.halted[:, None, None]
        state = InnerCarry(
            torch.where(anew, self.inner.H_init, carry.inner_carry.z_H),
            torch.where(anew, self.inner.L_init, carry.inner_carry.z_L),
        )
        state, logits, (stop, go_on) = self.inner(state, batch)
        steps = torch.where(carry.halted, 0, carry.steps) + 1
        outputs = {"logits": logits, "q_halt_logits": stop, "q_continue_logits": go_on}
        return Carry(state, steps, steps >= self.config.halt_max_steps, batch), outputs


class HierarchicalReasoningModel_ACTV1(ACTWrapper):
    def __init__(self, config_dict: dict[str, Any]) -> None:
        config = HRMConfig(**config_dict)
        super().__init__(config, HierarchicalReasoningModel_ACTV1_Inner(config))


@dataclass
class TRMConfig(HRMConfig):
    H_cycles: int = 2
    L_cycles: int = 3
    H_layers: int = 0  # read by nobody
    L_layers: int = 2
    mlp_t: bool = False
    puzzle_emb_len: int = 0  # 0: as many as the puzzle's vector fills
    no_ACT_continue: bool = True

    @property
    def n_puzzle_positions(self) -> int:
        return self.puzzle_emb_len or math.ceil(self.puzzle_emb_ndim / self.hidden_size)


class MixingBlock(nn.Module):
    """A layer whose positions are mixed by an MLP; the first norm is over positions too."""

    def __init__(self, config: TRMConfig) -> None:
        super().__init__()
        length = config.seq_len + config.n_puzzle_positions
        self.mlp_t = SwiGLU(length, config.expansion)
        self.mlp = SwiGLU(config.hidden_size, config.expansion)
        self.config, self.norm_eps = config, config.rms_norm_eps

    def forward(self, cos_sin: tuple[Tensor, Tensor] | None, hidden_states: Tensor) -> Tensor:
        h = hidden_states.mT
        h = rms_norm(h + self.mlp_t(h), self.norm_eps).mT
        return rms_norm(h + self.mlp(h), self.norm_eps)


class TinyRecursiveReasoningModel_ACTV1_Inner(InnerBase):
    """One stack; only the last slow cycle has a gradient."""

    def __init__(self, config: TRMConfig) -> None:
        super().__init__(config, config.n_puzzle_positions)
        layer = MixingBlock if config.mlp_t else Block
        self.L_level = ReasoningModule([layer(config) for _ in range(config.L_layers)])

    def cycles(self, z_H: Tensor, z_L: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
        turns, n_slow = self._turns(), self.config.H_cycles
        for slow in range(n_slow):
            with torch.set_grad_enabled(torch.is_grad_enabled() and slow == n_slow - 1):
                for _ in range(self.config.L_cycles):
                    z_L = self.L_level(z_L, z_H + e, turns)
                z_H = self.L_level(z_H, z_L, turns)
        return z_H, z_L


class TinyRecursiveReasoningModel_ACTV1(ACTWrapper):
    def __init__(self, config_dict: dict[str, Any]) -> None:
        config = TRMConfig(**config_dict)
        super().__init__(config, TinyRecursiveReasoningModel_ACTV1_Inner(config))
