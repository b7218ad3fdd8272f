"""A looped transformer written out naively, loop by loop and head by head: an oracle for hooks.

It takes its weights from ours and shares no code with it. TransformerLens has no looped models, so
this stands where the untied bridge cannot: with injection, a loop norm, and relative positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from transformer_lens.ActivationCache import ActivationCache

if TYPE_CHECKING:
    from torch import Tensor

    from loopinterp.models import LoopedTransformer

Edit = Callable[[str, "Tensor"], "Tensor"]


class NaiveLooped:
    """Runs with hooks, as TransformerLens' tools ask it to; weights and ``cfg`` come from ours."""

    def __init__(self, looped: LoopedTransformer, n_loops: int) -> None:
        config = looped.config
        assert (config.injection, config.norm, config.act_fn) == ("input", "pre", "gelu")
        assert config.loop_norm and config.final_norm and config.initial_state == "zeros"
        assert config.positions == "relative" and config.norm_type == "layernorm"
        self.n_loops, self._config = n_loops, config
        self._weights = looped.state_dict(keep_vars=True)
        self._unrolled = looped.unroll(n_loops)
        self._forward: dict[str, Any] = {}
        self._backward: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._unrolled, name)

    def __call__(self, tokens: Tensor) -> Tensor:
        return self._run(tokens, self._fire)

    @contextmanager
    def hooks(self, fwd_hooks: Any = (), bwd_hooks: Any = ()) -> Iterator[NaiveLooped]:
        self._forward, self._backward = dict(fwd_hooks), dict(bwd_hooks)
        yield self
        self._forward, self._backward = {}, {}

    def run_with_hooks(self, tokens: Tensor, fwd_hooks: Any = ()) -> Tensor:
        with self.hooks(fwd_hooks):
            return self(tokens)

    def _fire(self, name: str, x: Tensor) -> Tensor:
        point = SimpleNamespace(name=name)
        if name in self._forward:
            x = x.clone()
            edited = self._forward[name](x, hook=point)
            x = x if edited is None else edited
        if name in self._backward:
            x.requires_grad_(True)
            x.register_hook(lambda gradient: self._backward[name](gradient, hook=point))
        return x

    def run_with_cache(self, tokens: Tensor) -> tuple[Tensor, ActivationCache]:
        recorded: dict[str, Tensor] = {}

        def keep(name: str, x: Tensor) -> Tensor:
            recorded[name] = x.clone()
            return x

        return self._run(tokens, keep), ActivationCache(recorded, self)

    def _run(self, tokens: Tensor, edit: Edit) -> Tensor:
        weights = self._weights
        e = edit("hook_embed", weights["embedding.weight"][tokens])
        h, number = torch.zeros_like(e), 0
        for loop in range(self.n_loops):
            h = edit(f"loops.{loop}.hook_state_pre", h)
            h = h + edit(f"loops.{loop}.hook_injection", e)
            for layer in range(self._config.n_layers):
                h = self._layer(h, f"block.{layer}", f"blocks.{number}", edit)
                number += 1
            h = self._norm(h, "ln_loop", f"loops.{loop}.ln_loop", edit)
            h = edit(f"loops.{loop}.hook_state_post", h)
        h = self._norm(h, "ln_final", "ln_final", edit)
        return h @ weights["unembedding.weight"].T + weights["unembedding.bias"]

    def _layer(self, h: Tensor, ours: str, name: str, edit: Edit) -> Tensor:
        h = edit(f"{name}.hook_resid_pre", h)
        read = [h] * 3
        if self._unrolled.cfg.use_split_qkv_input:
            heads = h[:, :, None].repeat(1, 1, self._config.n_heads, 1)
            read = [edit(f"{name}.attn.hook_{part}_input", heads) for part in "qkv"]
            read = [self._norm(x, f"{ours}.ln1", "", lambda _, x: x) for x in read]
        x = self._norm(h, f"{ours}.ln1", f"{name}.ln1", edit)
        read = [x] * 3 if read[0] is h else read
        h = h + edit(f"{name}.hook_attn_out", self._attention(read, ours, name, edit))
        h = edit(f"{name}.hook_resid_mid", h)
        x = edit(f"{name}.hook_mlp_in", h) if self._unrolled.cfg.use_hook_mlp_in else h
        x = self._norm(x, f"{ours}.ln2", f"{name}.ln2", edit)
        pre = edit(f"{name}.mlp.hook_pre", self._linear(x, f"{ours}.mlp.fc_in"))
        post = edit(f"{name}.mlp.hook_post", torch.nn.functional.gelu(pre))
        h = h + edit(f"{name}.hook_mlp_out", self._linear(post, f"{ours}.mlp.fc_out"))
        return edit(f"{name}.hook_resid_post", h)

    def _attention(self, read: list[Tensor], ours: str, name: str, edit: Edit) -> Tensor:
        heads, width = self._config.n_heads, self._config.head_width
        parts = []
        for number, (part, x) in enumerate(zip("qkv", read)):
            x = self._linear(x, f"{ours}.attn.qkv").chunk(3, dim=-1)[number]
            x = x.unflatten(-1, (heads, width))
            if read[0].dim() == 4:  # each head reads by itself: of its own copy, its own part
                x = torch.stack([x[:, :, head, head] for head in range(heads)], dim=2)
            parts.append(edit(f"{name}.attn.hook_{part}", x))
        q, k, v = parts
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / width**0.5 + self._bias(x.shape[1])
        scores = edit(f"{name}.attn.hook_attn_scores", scores)
        pattern = edit(f"{name}.attn.hook_pattern", scores.softmax(-1))
        z = edit(f"{name}.attn.hook_z", torch.einsum("bhqk,bkhd->bqhd", pattern, v))
        if not self._unrolled.cfg.use_attn_result:
            return self._linear(z.flatten(2), f"{ours}.attn.out")
        out = self._weights[f"{ours}.attn.out.weight"].unflatten(1, (heads, width))
        written = [z[:, :, head] @ out[:, head].T for head in range(heads)]
        result = edit(f"{name}.attn.hook_result", torch.stack(written, dim=2))
        return result.sum(2) + self._weights[f"{ours}.attn.out.bias"]

    def _bias(self, n_pos: int) -> Tensor:
        """``[head, query, key]``, cell by cell."""
        config, table = self._config, self._weights["relative_bias.table"]
        reach = config.relative_window or 0
        bias = torch.full((config.n_heads, n_pos, n_pos), -torch.inf)
        for query in range(n_pos):
            for key in range(n_pos):
                near = config.attention_window is None or query - key <= config.attention_window
                free = 0 if near else config.windowed_heads or config.n_heads
                if key <= query:
                    bias[free:, query, key] = table[free:, max(key - query, -reach) + reach]
        return bias

    def _norm(self, x: Tensor, ours: str, name: str, edit: Edit) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        scale = (x.square().mean(-1, keepdim=True) + self._config.norm_eps).sqrt()
        x = edit(f"{name}.hook_normalized", x / edit(f"{name}.hook_scale", scale))
        return x * self._weights[f"{ours}.weight"] + self._weights[f"{ours}.bias"]

    def _linear(self, x: Tensor, ours: str) -> Tensor:
        return x @ self._weights[f"{ours}.weight"].T + self._weights[f"{ours}.bias"]
