"""The parts of a looped transformer: its weights, and what a run makes of them, piece by piece."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from einops import rearrange
from torch import nn

from loopinterp.errors import check_seed
from loopinterp.models.component_sites import site_map_of
from loopinterp.models.grid_positions import GridBias
from loopinterp.models.model_config import LoopedTransformerConfig
from loopinterp.models.positions import (
    AttentionContext,
    FireBias,
    RelativeBias,
    abacus_positions,
    attention_context,
    attention_mask,
    check_length,
    score_mask,
)
from loopinterp.models.run_inputs import check_inputs
from loopinterp.models.state_code import StateCode
from loopinterp.models.strict_hooks import LoopHooks
from loopinterp.models.taps import NO_TAPS, SILENT, Tap, Taps
from loopinterp.models.transformer_layer import Layer, Norm, Recall

if TYPE_CHECKING:
    from jaxtyping import Bool, Int
    from torch import Tensor

    from loopinterp.models.site_map import SiteMap
    from loopinterp.models.way_back import WayBack


class LoopedNetwork(LoopHooks):
    """The weights, the embedding of an input, one loop, and the readout, each with its hooks."""

    def __init__(self, config: LoopedTransformerConfig, *, seed: int = 0) -> None:
        super().__init__(config.n_loops)
        self.config = config
        d_model = config.d_model
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(check_seed(seed))
            self.embedding: nn.Module = (
                nn.Linear(config.d_features or 0, d_model)
                if config.d_vocab is None
                else nn.Embedding(config.d_vocab, d_model)
            )
            # The configuration has these two where its positions need them, and nowhere else.
            n_ctx, window = config.n_ctx, config.relative_window
            self.position_embedding = None if n_ctx is None else nn.Embedding(n_ctx, d_model)
            kind = GridBias if config.positions == "grid" else RelativeBias
            self.relative_bias = None if window is None else kind(config.n_heads, window)
            if config.positions == "fire":
                self.relative_bias = FireBias(config.n_heads, config.fire_threshold)
            self.prelude = nn.ModuleList(Layer(config, tied=False) for _ in range(config.n_prelude))
            self.block = nn.ModuleList(Layer(config, tied=True) for _ in range(config.n_layers))
            self.coda = nn.ModuleList(Layer(config, tied=False) for _ in range(config.n_coda))
            self.ln_loop = Norm(config) if config.loop_norm else None
            bits = config.state_code
            self.code = None if bits is None else StateCode(d_model, bits)
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
    def site_map(self) -> SiteMap:
        """The sites of the model, and their sizes."""
        return site_map_of(self.config, self._flags)

    def visible(self, n_pos: int) -> Bool[Tensor, "#head query key"]:
        """True where a query may attend, of so many positions."""
        return attention_mask(self.config, n_pos, device=self.device)

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        return next(self.unembedding.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights."""
        return next(self.unembedding.parameters()).dtype

    @property
    def reach(self) -> int | None:
        """Positions to the left that one loop reads, with a hard causal window; None: no bound."""
        window = self.config.window_of_all_heads
        if window is None or not self.config.causal or self.config.n_coda:
            return None
        return self.config.n_layers * window

    @property
    def reach_before(self) -> int | None:
        """Positions to its left that a position's injected input has come from; None: no bound."""
        if not self.config.n_prelude:
            return 0
        window = self.config.window_of_all_heads
        if window is None or not self.config.windowed_surround:
            return None
        return self.config.n_prelude * window

    @property
    def local_step(self) -> bool:
        """Whether a step of a part is that of the whole: it asks neither for places nor tokens."""
        kind = self.config.positions
        abacus = (kind, self.config.abacus_target) == ("abacus", "qk")
        return not abacus and kind not in ("fire", "grid")

    def _init_weights(self) -> None:
        std = self.config.init_std
        if isinstance(self.relative_bias, (RelativeBias, GridBias)):
            nn.init.xavier_uniform_(self.relative_bias.table)
        if self.position_embedding is not None:
            nn.init.normal_(self.position_embedding.weight, std=0.1 if std is None else std)
        if std is not None:
            for module in self.modules():
                if isinstance(module, (nn.Linear, nn.Embedding)):
                    nn.init.normal_(module.weight, std=std)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    nn.init.zeros_(module.bias)
        if self.code is not None:
            self.code.init_weights()

    # The input

    def _context(
        self,
        inputs: Tensor,
        offset: int | Tensor,
        taps: Taps = NO_TAPS,
        *,
        look: bool = True,
        whole: bool = False,
    ) -> AttentionContext:
        check_inputs(inputs, self.config, self.device, offset, look=look)
        context = self._length_context(inputs.shape[1], taps, whole=whole)
        return replace(context, qk_offset=self._qk_offset(inputs, offset, look=look))

    def _qk_offset(
        self, inputs: Tensor, offset: int | Tensor, *, look: bool = True
    ) -> Tensor | None:
        if self.config.positions != "abacus" or self.config.abacus_target != "qk":
            return None
        axes = "batch pos (head d_head) -> batch head pos d_head"
        return rearrange(self._abacus(inputs, offset, look), axes, head=self.config.n_heads)

    def _length_context(
        self, n_pos: int, taps: Taps = NO_TAPS, *, whole: bool = False
    ) -> AttentionContext:
        return attention_context(
            self.config,
            n_pos,
            bias=self.relative_bias,
            device=self.device,
            dtype=self.dtype,
            whole=whole or taps.listen("attn.hook_attn_scores", "attn.hook_pattern"),
        )

    def _embed(
        self,
        inputs: Tensor,
        context: AttentionContext,
        positions: Tensor | None,
        taps: Taps = NO_TAPS,
    ) -> Tensor:
        top = taps.at("top")
        # PyTorch looks up int32 and int64 only; floats are features, and stay as they are.
        e = top("hook_embed", self.embedding(inputs.long() if self.config.token_input else inputs))
        if positions is not None:
            e = e + top("hook_pos_embed", positions)
        context = context.outside_the_loop()
        for k, layer in enumerate(self.prelude):
            e = layer(e, None, context, taps.at("prelude", None, k))
        return e

    def _added_positions(
        self, inputs: Tensor, offset: int | Tensor, *, look: bool = True
    ) -> Tensor | None:
        if self.position_embedding is None:
            return None
        if self.config.positions == "absolute":
            places = torch.arange(inputs.shape[1], device=inputs.device)
            embedding = self.position_embedding(places)
            return embedding.expand(inputs.shape[0], -1, -1)
        if self.config.abacus_target == "input":
            return self._abacus(inputs, offset, look)
        return None

    def _abacus(self, tokens: Tensor, offset: int | Tensor, look: bool) -> Tensor:
        assert self.position_embedding is not None
        return self.position_embedding(self._abacus_index(tokens, offset, look))

    def _abacus_index(self, tokens: Tensor, offset: int | Tensor, look: bool = True) -> Tensor:
        assert self.config.n_ctx is not None
        index = abacus_positions(tokens.long(), self.config.digit_tokens, offset)
        if look:
            check_length(int(index.max()) + 1, self.config.n_ctx, "abacus positions")
        return index

    def _mask_at(
        self, query: Int[Tensor, "#block query 1"], key: Int[Tensor, "#block 1 key"]
    ) -> tuple[Tensor, Tensor]:
        """What is added to scores of queries and keys at some places: in the loop, and around."""
        how = {"bias": self.relative_bias, "dtype": self.dtype}
        mask = score_mask(self.config, query, key, **how)
        if self.config.windowed_surround:
            return mask, mask
        return mask, score_mask(self.config.without_window(), query, key, **how)

    # The loop

    def _loop(
        self, h: Tensor, e: Tensor, context: AttentionContext, taps: Taps = NO_TAPS, loop: int = 0
    ) -> Tensor:
        tap, injection = taps.at("block", loop), self.config.injection
        h = tap("hook_state_pre", h)
        if injection == "input":
            h = h + tap("hook_injection", e)
        elif self.recall is not None:
            h = self.recall.state(h) + tap("hook_injection", self.recall.input(e))
        elif injection in ("sublayer", "internal"):
            e = tap("hook_injection", e)
        for k, layer in enumerate(self.block):
            h = layer(h, e, context, taps.at("block", loop, k))
        return tap("hook_state_post", self.end_loop(h, e, tap))

    def end_loop(self, h: Tensor, e: Tensor, tap: Tap = SILENT) -> Tensor:
        """What a loop makes of its last layer's output: injection after it, loop norm, code."""
        if self.gate is not None:
            h = h + tap("hook_injection", self.gate * e)
        if self.ln_loop is not None:
            h = self.ln_loop(h, tap, "ln_loop")
        if self.code is not None:
            h = self.code(h, tap)
        return h

    def _loop_back(self, way: WayBack, loop: int) -> None:
        """A logit's direction from after a loop to before it."""
        injection = self.config.injection
        way.stand(loop=loop)
        if self.code is not None:
            self.code.back(way)
        if self.ln_loop is not None:
            way.through_norm("ln_loop", self.ln_loop.weight, self.ln_loop.bias, name="loop norm")
        if injection == "gated_output":
            way.write("injection", way.read("hook_injection"))
        for k in reversed(range(len(self.block))):
            way.stand(loop=loop, layer=k)
            self.block[k].back(way)  # type: ignore[operator]
        way.stand(loop=loop)
        # Injected into sublayers, the input reaches the stream through what they write alone.
        if injection in ("input", "concat"):
            way.write("injection", way.read("hook_injection"))
        if self.recall is not None:
            way.through_linear(self.recall.state.weight)

    # The readout

    def _readout(
        self, h: Tensor, taps: Taps = NO_TAPS, context: AttentionContext | None = None
    ) -> Tensor:
        if self.coda:
            context = (context or self._length_context(h.shape[1], taps)).outside_the_loop()
            for k, layer in enumerate(self.coda):
                h = layer(h, None, context, taps.at("coda", None, k))
        if self.ln_final is not None:
            h = self.ln_final(h, taps.at("top"), "ln_final")
        return self.unembedding(h)

    def _readout_back(self, way: WayBack) -> None:
        """A logit's direction from the logits to the state that they are read from."""
        way.through_unembedding(self.unembedding.weight, self.unembedding.bias)
        if self.ln_final is not None:
            way.through_norm(
                "ln_final", self.ln_final.weight, self.ln_final.bias, name="final norm"
            )
        for k in reversed(range(len(self.coda))):
            way.stand(layer=k)
            self.coda[k].back(way)  # type: ignore[operator]
