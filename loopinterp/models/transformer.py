"""The looped transformer: one weight-tied block, applied again and again."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from einops import rearrange
from torch import nn

from loopinterp.core.errors import check_integer, check_seed
from loopinterp.core.text import MOST, as_table
from loopinterp.models.checkpoints import PretrainedMixin
from loopinterp.models.config import LoopedTransformerConfig, site_map_of
from loopinterp.models.layers import Layer, Norm, Recall, StateCode
from loopinterp.models.positions import (
    AttentionContext,
    FireBias,
    GridBias,
    RelativeBias,
    abacus_positions,
    attention_context,
    attention_mask,
    check_length,
    grid_width,
    score_mask,
)
from loopinterp.models.protocol import check_each, check_features, check_tokens, refuse
from loopinterp.models.taps import NO_TAPS, SILENT, Tap, Taps
from loopinterp.models.transformer_lens_names import TransformerLensNames
from loopinterp.models.weights import seeded

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from loopinterp.models.addresses import SiteMap
    from loopinterp.models.attribution import AttributionPass


class LoopedTransformer(PretrainedMixin, TransformerLensNames):
    """A transformer :class:`~loopinterp.models.LoopedModel`, hooked at every loop.

    A run of T loops over a block of L layers shows T * L hooked views of one set of weights, under
    TransformerLens' names (see :mod:`loopinterp.models.addresses`). ``seed`` draws the weights.

    Example:
        >>> import torch
        >>> from loopinterp.models import LoopedTransformerConfig
        >>> config = LoopedTransformerConfig(d_model=16, n_heads=2, d_vocab=5, d_vocab_out=2)
        >>> model = LoopedTransformer(config, seed=0)
        >>> logits, cache = model.run_with_cache(torch.tensor([[0, 1, 2]]), n_loops=4)
        >>> cache.stack("attn.hook_pattern").shape
        torch.Size([4, 1, 2, 3, 3])
    """

    def __init__(self, config: LoopedTransformerConfig, *, seed: int = 0) -> None:
        super().__init__(config.n_loops)
        self.config = config
        d_model = config.d_model
        with seeded(check_seed(seed)):
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
        # There is no dropout, and TransformerLens needs eval mode.
        self.eval()

    def __repr__(self) -> str:
        weights = sum(weight.numel() for weight in self.parameters())
        return f"LoopedTransformer({weights:,} weights, {self.config!r})"[: MOST - 1]

    def _repr_html_(self) -> str:
        return as_table(repr(self), self.config.to_dict().items(), fold="All settings")

    def plain_twin(self) -> LoopedTransformer:
        """A model of the same configuration without numbers, to compare this one with."""
        return _without_numbers(self.config)

    @property
    def site_map(self) -> SiteMap:
        return site_map_of(self.config, self._flags)

    def visible(self, n_pos: int) -> Bool[Tensor, "#head query key"]:
        return attention_mask(self.config, n_pos, device=self.device)

    @property
    def reach(self) -> int | None:
        """Positions to the left that one loop reads; None: no bound."""
        window = self.config.window_of_all_heads
        if window is None or not self.config.causal or self.config.n_coda:
            return None
        return self.config.n_layers * window

    @property
    def reach_before(self) -> int | None:
        """The same of the injected input."""
        if not self.config.n_prelude:
            return 0
        window = self.config.window_of_all_heads
        if window is None or not self.config.windowed_surround:
            return None
        return self.config.n_prelude * window

    @property
    def starts_by_place(self) -> bool:
        """Whether the initial state depends on a token's place alone."""
        return self.config.initial_state != "embedding"

    @property
    def local_step(self) -> bool:
        """Whether a step of some positions needs neither places nor tokens."""
        return not self.reads_tokens and self.config.positions not in ("fire", "grid")

    @property
    def reads_tokens(self) -> bool:  # type: ignore[override]
        """Whether abacus positions enter the scores of attention."""
        on_scores = self.config.abacus_target != "input" or self.config.abacus_window is not None
        return self.config.positions == "abacus" and on_scores

    def _init_weights(self) -> None:
        std = self.config.init_std
        if isinstance(self.relative_bias, (RelativeBias, GridBias)):
            nn.init.xavier_uniform_(self.relative_bias.table)
        if self.position_embedding is not None:
            nn.init.normal_(self.position_embedding.weight, std=0.1)
        if std is not None:
            for module in self.modules():
                if isinstance(module, (nn.Linear, nn.Embedding)):
                    nn.init.normal_(module.weight, std=std)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    nn.init.zeros_(module.bias)
        if self.position_embedding is not None and self.config.position_std is not None:
            nn.init.normal_(self.position_embedding.weight, std=self.config.position_std)
        if self.code is not None:
            self.code.init_weights()

    # The input

    def check_inputs(
        self, inputs: Tensor, *, position_offset: int | Int[Tensor, " batch"] = 0
    ) -> None:
        config, offset = self.config, position_offset
        if config.d_vocab is None:
            check_features(inputs, config.d_features)
        else:
            check_tokens(inputs, config.d_vocab)
        if config.positions == "absolute":
            check_length(inputs.shape[1], config.n_ctx or 0, "sequence length")
        if config.positions == "grid":
            grid_width(inputs.shape[1])
        each = isinstance(offset, torch.Tensor)
        if config.positions != "abacus":
            got = {"position_offset": offset if each or offset else None}
            refuse(got, "0 without abacus positions", "Leave it out.")
            return
        if each:
            check_each("position_offset", offset, inputs)
        check_integer("position_offset", int(offset.min()) if each else offset, least=0)
        index = self._abacus_index(inputs, offset)
        check_length(int(index.max()) + 1, config.n_ctx or 0, "abacus positions")

    def length_context(self, n_pos: int, *, all_pairs: bool = False) -> AttentionContext:
        how = {"bias": self.relative_bias, "device": self.device, "dtype": self.dtype}
        return attention_context(self.config, n_pos, all_pairs=all_pairs, **how)

    def added_positions(self, inputs: Tensor, offset: int | Tensor) -> Tensor | None:
        if self.position_embedding is None:
            return None
        if self.config.positions == "absolute":
            # [batch, pos, d_model], the same for every example.
            places = torch.arange(inputs.shape[1], device=inputs.device)
            embedding = self.position_embedding(places)
            return embedding.expand(inputs.shape[0], -1, -1)
        if self.config.abacus_target == "input":
            return self.position_embedding(self._abacus_index(inputs, offset))
        return None

    def qk_offset(self, inputs: Tensor, offset: int | Tensor) -> Tensor | None:
        if self.config.positions != "abacus" or self.config.abacus_target == "input":
            return None
        assert self.position_embedding is not None
        embedding = self.position_embedding(self._abacus_index(inputs, offset))
        if self.config.abacus_target == "attention":
            return embedding[:, None]
        axes = "batch pos (head d_head) -> batch head pos d_head"
        return rearrange(embedding, axes, head=self.config.n_heads)

    def input_bar(self, inputs: Tensor) -> Float[Tensor, "batch 1 query key"] | None:
        window = self.config.abacus_window
        if window is None:
            return None
        # Digits more than the window of abacus positions away are barred: [batch, query, key].
        index = abacus_positions(inputs.long(), self.config.digit_tokens)
        query, key = index[:, :, None], index[:, None, :]
        far = (key > 0) & ((query - key).abs() > window)
        return torch.zeros_like(far, dtype=self.dtype).masked_fill(far, float("-inf"))[:, None]

    def _abacus_index(self, tokens: Tensor, offset: int | Tensor) -> Tensor:
        digits, signs = self.config.digit_tokens, self.config.abacus_signs
        return abacus_positions(tokens.long(), digits, offset, signs=signs)

    def mask_at(
        self, query: Int[Tensor, "#block query 1"], key: Int[Tensor, "#block 1 key"]
    ) -> tuple[Tensor, Tensor]:
        how = {"bias": self.relative_bias, "dtype": self.dtype}
        mask = score_mask(self.config, query, key, **how)
        if self.config.windowed_surround:
            return mask, mask
        return mask, score_mask(self.config.without_window(), query, key, **how)

    def run_embedding(self, inputs: Tensor, context: AttentionContext, taps: Taps) -> Tensor:
        top = taps.at("top")
        # PyTorch looks up int32 and int64 only; floats are features, and stay as they are.
        e = top("hook_embed", self.embedding(inputs.long() if self.config.token_input else inputs))
        if context.added is not None:
            e = e + top("hook_pos_embed", context.added)
        context = context.outside_the_loop()
        for k, layer in enumerate(self.prelude):
            e = layer(e, None, context, taps.at("prelude", None, k))
        return e

    # The loop

    def initial_state(
        self, e: Float[Tensor, "batch pos d_model"]
    ) -> Float[Tensor, "batch pos d_model"]:
        """The state before the first loop: embedding, zeros, seeded noise, or a code's."""
        if self.config.initial_state == "embedding":
            return e
        if self.config.initial_state == "zeros":
            return torch.zeros_like(e)
        if self.code is not None:
            start = self.code.state(-torch.ones(self.code.n_bits, device=e.device, dtype=e.dtype))
            return start.expand_as(e)
        generator = torch.Generator().manual_seed(self.config.noise_seed)
        # [pos, d_model], the same for every example.
        noise = torch.randn(e.shape[1:], generator=generator, dtype=torch.float32)
        return (noise * self.config.noise_std).to(e).expand_as(e)

    def run_loop(
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
        """The state from the last layer's output: injection after it, loop norm, code."""
        if self.gate is not None:
            h = h + tap("hook_injection", self.gate * e)
        if self.ln_loop is not None:
            h = self.ln_loop(h, tap, "ln_loop")
        if self.code is not None:
            h = self.code(h, tap)
        return h

    def attribute_loop(self, backward: AttributionPass, loop: int) -> None:
        injection, norm = self.config.injection, self.ln_loop
        backward.at(loop=loop)
        if self.code is not None:
            self.code.attribute(backward)
        if norm is not None:
            backward.through_norm("ln_loop", norm.weight, norm.bias, name="loop norm")
        if injection == "gated_output":
            backward.write("injection", backward.read("hook_injection"))
        for layer in backward.backwards(self.block, loop=loop):
            layer.attribute(backward)
        # Injected into sublayers, the input reaches the stream through what they write alone.
        if injection in ("input", "concat"):
            backward.write("injection", backward.read("hook_injection"))
        if self.recall is not None:
            backward.through_linear(self.recall.state.weight)

    # The readout

    def run_readout(
        self, h: Tensor, taps: Taps = NO_TAPS, context: AttentionContext | None = None
    ) -> Tensor:
        if self.coda:
            context = context or self.length_context(h.shape[1], all_pairs=taps.see_scores())
            context = context.outside_the_loop()
            for k, layer in enumerate(self.coda):
                h = layer(h, None, context, taps.at("coda", None, k))
        if self.ln_final is not None:
            h = self.ln_final(h, taps.at("top"), "ln_final")
        return self.unembedding(h)  # [batch, pos, d_vocab_out]

    def attribute_readout(self, backward: AttributionPass) -> None:
        backward.through_unembedding(self.unembedding.weight, self.unembedding.bias)
        if self.ln_final is not None:
            norm = self.ln_final
            backward.through_norm("ln_final", norm.weight, norm.bias, name="final norm")
        for layer in backward.backwards(self.coda):
            layer.attribute(backward)


@lru_cache(maxsize=8)
def _without_numbers(config: LoopedTransformerConfig) -> LoopedTransformer:
    with torch.device("meta"):
        return LoopedTransformer(config)
