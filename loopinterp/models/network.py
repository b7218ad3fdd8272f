"""The parts of a looped transformer: its weights, and what a run makes of them, piece by piece."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from loopinterp.models.config import LoopedTransformerConfig
from loopinterp.models.hooked import Tap, Taps, run_layer, tapped_norm
from loopinterp.models.inputs import check_inputs
from loopinterp.models.layers import Layer, LayerFunction, Norm, Recall, layer_functions
from loopinterp.models.positions import (
    AttentionContext,
    RelativeBias,
    abacus_positions,
    attention_context,
    check_length,
)
from loopinterp.models.strict_hooks import LoopHooks

if TYPE_CHECKING:
    from torch import Tensor


class LoopedNetwork(LoopHooks):
    """The weights, the embedding of an input, one loop, and the readout: plain, and with hooks.

    Args:
        config: The architecture.
        seed: Seed of the initial weights.
    """

    def __init__(self, config: LoopedTransformerConfig, *, seed: int = 0) -> None:
        super().__init__(config)
        d_model = config.d_model
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            if config.token_input:
                assert config.d_vocab is not None
                self.embedding: nn.Module = nn.Embedding(config.d_vocab, d_model)
            else:
                assert config.d_features is not None
                self.embedding = nn.Linear(config.d_features, d_model)
            learned = config.positions in ("absolute", "abacus")
            self.position_embedding = nn.Embedding(config.n_ctx or 0, d_model) if learned else None
            self.relative_bias = (
                RelativeBias(config.n_heads, config.relative_window)
                if config.positions == "relative" and config.relative_window is not None
                else None
            )
            self.prelude = nn.ModuleList(Layer(config, tied=False) for _ in range(config.n_prelude))
            self.block = nn.ModuleList(Layer(config, tied=True) for _ in range(config.n_layers))
            self.coda = nn.ModuleList(Layer(config, tied=False) for _ in range(config.n_coda))
            self.ln_loop = Norm(config) if config.loop_norm else None
            gated = config.injection == "gated_output"
            self.gate = nn.Parameter(torch.tensor(config.injection_gate)) if gated else None
            self.recall = Recall(d_model) if config.injection == "concat" else None
            self.ln_final = Norm(config) if config.final_norm else None
            self.unembedding = nn.Linear(d_model, config.d_vocab_out, bias=config.unembed_bias)
            self._init_weights()
        if config.tie_unembed:
            self.unembedding.weight = self.embedding.weight
        # There is no dropout: nothing differs in training, and TransformerLens asks for eval mode.
        self.eval()

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        return self.unembedding.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights."""
        return self.unembedding.weight.dtype

    @property
    def reach(self) -> int | None:
        """Positions to the left that one loop reads, with a hard causal window; None: no bound."""
        window = self.config.attention_window
        if window is None or not self.config.causal or self.config.n_coda:
            return None
        return self.config.n_layers * window

    def _init_weights(self) -> None:
        std = self.config.init_std
        if self.relative_bias is not None:
            nn.init.xavier_uniform_(self.relative_bias.table)
        if self.position_embedding is not None:
            nn.init.normal_(self.position_embedding.weight, std=0.1 if std is None else std)
        if std is None:
            return
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    # The input

    def _context(self, inputs: Tensor, offset: int) -> AttentionContext:
        check_inputs(inputs, self.config, self.device, offset)
        context = self._length_context(inputs.shape[1])
        if self.config.positions == "abacus" and self.config.abacus_target == "qk":
            embedding = self._abacus(inputs, offset)
            heads = embedding.view(*inputs.shape, self.config.n_heads, self.config.head_width)
            return AttentionContext(context.mask, context.is_causal, context.rotation, heads)
        return context

    def _length_context(self, n_pos: int) -> AttentionContext:
        return attention_context(
            self.config, n_pos, bias=self.relative_bias, device=self.device, dtype=self.dtype
        )

    def _embed(
        self, inputs: Tensor, context: AttentionContext, offset: int, taps: Taps | None
    ) -> Tensor:
        top = taps.at("") if taps else None
        e = self.embedding(inputs)
        e = e if top is None else top("hook_embed", e)
        positions = self._added_positions(inputs, offset)
        if positions is not None:
            e = e + (positions if top is None else top("hook_pos_embed", positions))
        for number, layer in enumerate(self.prelude):
            e = run_layer(layer, None, number, e, None, context, taps)
        return e

    def _added_positions(self, inputs: Tensor, offset: int) -> Tensor | None:
        if self.position_embedding is None:
            return None
        if self.config.positions == "absolute":
            embedding = self.position_embedding.weight[: inputs.shape[1]]
            return embedding.expand(inputs.shape[0], -1, -1)
        if self.config.abacus_target == "input":
            return self._abacus(inputs, offset)
        return None

    def _abacus(self, tokens: Tensor, offset: int) -> Tensor:
        assert self.position_embedding is not None and self.config.n_ctx is not None
        index = abacus_positions(tokens, self.config.digit_tokens, offset)
        check_length(int(index.max()) + 1, self.config.n_ctx, "abacus positions")
        return self.position_embedding(index)

    # The loop

    def _loop_function(
        self, functions: list[LayerFunction] | None = None
    ) -> Callable[[Tensor, Tensor, AttentionContext], Tensor]:
        """One loop as a plain function, weights and branches resolved once per run."""
        layers = functions or layer_functions(self.block)
        injection, recall, gate = self.config.injection, self.recall, self.gate
        norm = None if self.ln_loop is None else self.ln_loop.function()

        def loop(h: Tensor, e: Tensor, context: AttentionContext) -> Tensor:
            if injection == "input":
                h = h + e
            elif recall is not None:
                h = recall(h, e)
            for layer in layers:
                h = layer(h, e, context)
            if gate is not None:
                h = h + gate * e
            return h if norm is None else norm(h)

        return loop

    def _block_numbers(self, loop: int) -> range:
        first = self._pool.book(self._n_loops).block(loop, 0)
        return range(first, first + self.config.n_layers)

    def _tapped_loop(
        self,
        loop: int,
        h: Tensor,
        e: Tensor,
        context: AttentionContext,
        taps: Taps,
        functions: list[LayerFunction],
    ) -> Tensor:
        """One loop with hooks."""
        numbers = self._block_numbers(loop)
        tap = taps.at(f"loops.{loop}.") or Tap("", taps)
        h = tap("hook_state_pre", h)
        injection = self.config.injection
        if injection == "input":
            h = h + tap("hook_injection", e)
        elif self.recall is not None:
            h = self.recall.state(h) + tap("hook_injection", self.recall.input(e))
        elif injection in ("sublayer", "internal"):
            e = tap("hook_injection", e)
        for number, layer, function in zip(numbers, self.block, functions):
            h = run_layer(layer, function, number, h, e, context, taps)
        if self.gate is not None:
            h = h + tap("hook_injection", self.gate * e)
        if self.ln_loop is not None:
            h = tapped_norm(self.ln_loop, h, tap, "ln_loop")
        return tap("hook_state_post", h)

    # The readout

    def _tapped_readout(self, h: Tensor, taps: Taps) -> Tensor:
        """The readout with hooks."""
        first = self.config.n_prelude + self._n_loops * self.config.n_layers
        if self.coda:
            context = self._length_context(h.shape[1])
            for number, layer in enumerate(self.coda, start=first):
                h = run_layer(layer, None, number, h, None, context, taps)
        if self.ln_final is not None:
            h = tapped_norm(self.ln_final, h, taps.at(""), "ln_final")
        return self.unembedding(h)
