"""The configuration of a looped transformer, and its hooks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from loopinterp.core.errors import MOST_LOOPS, ConfigError
from loopinterp.core.settings import OnlyWith, Seed, Settings, settings
from loopinterp.models.addresses import SiteMap, norm_sites

Norm = Literal["none", "pre", "post", "sandwich", "gated"]
NormType = Literal["layernorm", "rmsnorm"]
Injection = Literal["none", "input", "gated_output", "sublayer", "concat", "internal"]
_LayerCount = Annotated[int, Field(ge=0, le=1000)]


@settings
class LoopedTransformerConfig(Settings):
    """Configuration of a :class:`~loopinterp.models.LoopedTransformer`.

    An ordinary transformer has ``n_loops=1`` and absolute positions.

    Attributes:
        d_vocab_out: Output classes per position.
        d_vocab: Input tokens; set either this or ``d_features``.
        d_features: Width of input feature vectors, embedded by a linear map.
        n_loops: Default number of loops.
        n_layers: Layers of the tied block.
        n_prelude: Untied layers before the loop.
        n_coda: Untied layers after the loop, run once per readout.
        d_head: ``d_model // n_heads`` if None.
        d_mlp: Neurons per MLP; ``4 * d_model`` if None.
        act_fn: Activation of the MLP (``gelu_new`` is GPT-2's tanh form).
        attention_window: Largest distance from query to key (king's steps on a ``grid``), if any.
        windowed_heads: Heads per layer, from the first, with the window; all if None.
        windowed_surround: Whether prelude and coda have the window too.
        positions: ``none`` (NoPE), ``absolute`` (learned), ``relative`` (a bias per head and
            distance), ``abacus`` (index of a digit within its number), ``rotary``, ``fire`` (an
            MLP's bias from the distance as a share of the query's position), or ``grid`` (square
            grids, row by row: a bias per head and offset in rows and columns; not causal).
        n_ctx: Length of the learned position table (``absolute``, ``abacus``).
        relative_window: Clamps distances and offsets (``relative``, ``grid``).
        abacus_target: Where abacus positions are added: the model's ``input``; the input of queries
            and keys (``attention``; arXiv 2012.15832); or, equally, queries and keys themselves
            (``qk``), which leaves the scores of the next and the previous position equal.
        abacus_max_offset: Largest random offset in training.
        abacus_window: Largest distance, in abacus positions, to an attended digit; other tokens
            are always seen, at position 0. None: any.
        abacus_signs: Whether other tokens have the position before a number's first digit (the
            offset) instead of 0.
        digit_tokens: Tokens that count as digits for abacus positions.
        fire_threshold: Initial L of ``fire``: queries before L divide distances by L.
        norm: Place of each sublayer's norm. ``sandwich`` (peri): its input and output. ``gated``:
            its input, with its output scaled by sigmoid(W h + b) of the stream (the output gate of
            arXiv 1910.06764).
        norm_eps: Added to the variance.
        loop_norm: Whether the state is normed at the end of each loop (outer norm).
        state_code: Sign bits to which each loop rounds its state, after the loop norm; None: no
            rounding.
        injection: Where the embedding e enters each loop. ``input``: f(h + e). ``gated_output``:
            f(h) + gate * e, with a learned scalar. ``sublayer``: added to each sublayer's normed
            input. ``concat``: f(W_h h + W_e e), external recall. ``internal``: sublayers read W_h
            norm(h) + W_e e, internal recall.
        injection_gate: Initial gate of ``gated_output``.
        initial_state: ``embedding`` (h_0 = e), ``zeros``, seeded ``noise`` (the same for the same
            shape), or ``code``: all bits -1, with a ``state_code``.
        noise_std: Standard deviation of the ``noise``.
        final_norm: Whether the readout norms the state first.
        tie_unembed: Whether the unembedding is the transposed token embedding.
        init_std: Standard deviation of initial weights; PyTorch's initialisation if None.
        position_std: That of learned positions; if None, ``init_std``, or else 0.1.

    Example:
        >>> config = LoopedTransformerConfig(d_model=64, n_heads=4, d_vocab=6, d_vocab_out=2)
        >>> config.head_width, config.mlp_width
        (16, 256)
    """

    d_model: PositiveInt
    n_heads: PositiveInt
    d_vocab_out: PositiveInt
    d_vocab: PositiveInt | None = None
    d_features: PositiveInt | None = None
    n_loops: Annotated[int, Field(ge=1, le=MOST_LOOPS)] = 1
    n_layers: Annotated[_LayerCount, Field(ge=1)] = 1
    n_prelude: _LayerCount = 0
    n_coda: _LayerCount = 0
    d_head: PositiveInt | None = None
    d_mlp: PositiveInt | None = None
    act_fn: Literal["relu", "gelu", "gelu_new", "silu"] = "gelu"
    causal: bool = True
    attention_window: NonNegativeInt | None = None
    windowed_heads: PositiveInt | None = None
    windowed_surround: bool = True
    positions: Literal["none", "absolute", "relative", "grid", "abacus", "rotary", "fire"] = "none"
    n_ctx: Annotated[
        PositiveInt | None, OnlyWith("positions", "absolute", "abacus", needed=True)
    ] = None
    relative_window: Annotated[
        NonNegativeInt | None, OnlyWith("positions", "relative", "grid", needed=True)
    ] = None
    abacus_target: Annotated[
        Literal["input", "attention", "qk"], OnlyWith("positions", "abacus")
    ] = "input"
    abacus_max_offset: Annotated[NonNegativeInt, OnlyWith("positions", "abacus")] = 99
    abacus_window: Annotated[NonNegativeInt | None, OnlyWith("positions", "abacus")] = None
    abacus_signs: Annotated[bool, OnlyWith("positions", "abacus")] = False
    digit_tokens: Annotated[
        tuple[NonNegativeInt, ...], OnlyWith("positions", "abacus", needed=True)
    ] = ()
    rotary_base: Annotated[PositiveFloat, OnlyWith("positions", "rotary")] = 10_000.0
    fire_threshold: Annotated[PositiveFloat, OnlyWith("positions", "fire")] = 512.0
    norm: Norm = "pre"
    norm_type: NormType = "layernorm"
    norm_eps: PositiveFloat = 1e-5
    loop_norm: bool = False
    state_code: Annotated[int, Field(ge=1, le=16)] | None = None
    injection: Injection = "none"
    injection_gate: Annotated[float, OnlyWith("injection", "gated_output")] = 0.1
    initial_state: Literal["embedding", "zeros", "noise", "code"] = "embedding"
    noise_std: Annotated[PositiveFloat, OnlyWith("initial_state", "noise")] = 1.0
    noise_seed: Annotated[Seed, OnlyWith("initial_state", "noise")] = 0
    final_norm: bool = True
    tie_unembed: bool = False
    unembed_bias: bool = True
    init_std: NonNegativeFloat | None = None
    position_std: Annotated[
        NonNegativeFloat | None, OnlyWith("positions", "absolute", "abacus")
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, holds, expected in self._rules():
            if not holds:
                got = repr(getattr(self, name))
                raise ConfigError(name, expected=expected, given=got, fix=f"Change {name}.")

    def _rules(self) -> Iterator[tuple[str, bool, str]]:
        window, heads = self.attention_window, self.n_heads
        one_input = (self.d_vocab is None) != (self.d_features is None)
        yield "d_vocab", one_input, "exactly one of d_vocab and d_features"
        tied = self.d_vocab == self.d_vocab_out and not self.unembed_bias
        expected = "false, unless d_vocab = d_vocab_out and unembed_bias=False"
        yield "tie_unembed", not self.tie_unembed or tied, expected
        divides = self.d_head is not None or self.d_model % heads == 0
        yield "n_heads", divides, f"a divisor of d_model={self.d_model}, or d_head set"
        fits = self.windowed_heads is None or (window is not None and self.windowed_heads <= heads)
        yield "windowed_heads", fits, f"at most n_heads={heads}, and an attention_window"
        around = window is not None and self.n_prelude + self.n_coda > 0
        expected = "true without an attention_window and n_prelude or n_coda"
        yield "windowed_surround", self.windowed_surround or around, expected
        # More weights are taken for a slip: 64 GiB in float32, several of the largest models.
        sizes = ("d_model", "n_heads", "d_head", "d_mlp", "d_vocab", "d_features", "n_ctx")
        largest = max((*sizes, "d_vocab_out"), key=lambda name: getattr(self, name) or 0)
        yield largest, self.about_weights <= 2**34, f"at most {2**34:,} weights in all"
        even = self.positions != "rotary" or self.head_width % 2 == 0
        yield "d_head", even, "an even number with positions='rotary'"
        unordered = self.positions != "grid" or not self.causal
        yield "causal", unordered, "false with positions='grid', which has no order"
        reads = self.positions != "abacus" or self.token_input
        yield "positions", reads, "d_vocab in place of d_features with 'abacus'"
        fits = self.abacus_target != "qk" or heads * self.head_width == self.d_model
        yield "abacus_target", fits, "'input' unless n_heads * d_head = d_model"
        coded = (self.state_code is None) == (self.initial_state != "code")
        yield "initial_state", coded, "'code' with a state_code, and only with one"
        enters = self.injection != "none" or self.initial_state == "embedding"
        expected = f"one with initial_state={self.initial_state!r}, or the input never enters"
        yield "injection", enters, expected

    @property
    def head_width(self) -> int:
        """``d_head``, or ``d_model // n_heads``."""
        return self.d_model // self.n_heads if self.d_head is None else self.d_head

    @property
    def mlp_width(self) -> int:
        """``d_mlp``, or ``4 * d_model``."""
        return 4 * self.d_model if self.d_mlp is None else self.d_mlp

    @property
    def window_of_all_heads(self) -> int | None:
        """``attention_window`` along the sequence; None if some head sees beyond it."""
        bounded = self.windowed_heads in (None, self.n_heads) and self.positions != "grid"
        return self.attention_window if bounded else None

    def without_window(self) -> LoopedTransformerConfig:
        return self.replace(attention_window=None, windowed_heads=None, windowed_surround=True)

    @property
    def token_input(self) -> bool:
        """Whether the input is tokens, not feature vectors."""
        return self.d_vocab is not None

    def layers_total(self, n_loops: int) -> int:
        return self.n_prelude + n_loops * self.n_layers + self.n_coda

    @property
    def about_weights(self) -> int:
        """Number of weights without biases and norms."""
        layer = 4 * self.n_heads * self.head_width + 2 * self.mlp_width
        rows = sum(n or 0 for n in (self.d_vocab, self.d_features, self.n_ctx, self.d_vocab_out))
        return self.d_model * (self.layers_total(1) * layer + rows)


# Each head's own copy of the stream, as input of queries, keys and values.
FORKS = ("attn.hook_q_input", "attn.hook_k_input", "attn.hook_v_input")

# Sites that exist only while a TransformerLens flag is on.
OPTIONAL_SITES = {
    "use_split_qkv_input": FORKS,
    "use_attn_result": ("attn.hook_result",),
    "use_hook_mlp_in": ("hook_mlp_in",),
}


@lru_cache(maxsize=256)
def site_map_of(config: LoopedTransformerConfig, flags: frozenset[str] = frozenset()) -> SiteMap:
    """The sites of a ``LoopedTransformer``, with some TransformerLens flags on."""
    layer = _layer_sites(config, flags)
    opening, closing = {"hook_state_pre": "residual"}, {}
    if config.injection != "none":
        injected = closing if config.injection == "gated_output" else opening
        injected["hook_injection"] = "residual"
    closing |= norm_sites("ln_loop", present=config.loop_norm)
    if config.state_code is not None:
        closing |= {"hook_code_pre": "code", "hook_code": "code"}
    embedding = {"hook_embed": "residual"}
    abacus_input = config.positions == "abacus" and config.abacus_target == "input"
    if config.positions == "absolute" or abacus_input:
        embedding["hook_pos_embed"] = "residual"
    return SiteMap(
        d_model=config.d_model,
        n_heads=config.n_heads,
        d_head=config.head_width,
        d_mlp=config.mlp_width,
        embedding=embedding,
        prelude=(layer,) * config.n_prelude,
        opening=opening,
        block=(layer,) * config.n_layers,
        closing={**closing, "hook_state_post": "residual"},
        coda=(layer,) * config.n_coda,
        final=norm_sites("ln_final", present=config.final_norm),
        optional=OPTIONAL_SITES,
        more_axes={} if config.state_code is None else {"code": ("pos", config.state_code)},
    )


def _layer_sites(config: LoopedTransformerConfig, flags: frozenset[str]) -> dict[str, str]:
    before = config.norm in ("pre", "sandwich", "gated")
    sandwich, after = config.norm == "sandwich", config.norm == "post"
    gated, rotary = config.norm == "gated", config.positions == "rotary"
    sites = {
        "hook_resid_pre": "residual",
        **dict.fromkeys(FORKS, "fork"),
        **norm_sites("ln1", present=before),
        **dict.fromkeys(("attn.hook_q", "attn.hook_k", "attn.hook_v"), "head"),
        **({"attn.hook_rot_q": "head", "attn.hook_rot_k": "head"} if rotary else {}),
        "attn.hook_attn_scores": "pattern",
        "attn.hook_pattern": "pattern",
        "attn.hook_z": "head",
        "attn.hook_result": "fork",
        **norm_sites("ln1_post", present=sandwich),
        **({"hook_attn_gate": "residual"} if gated else {}),
        "hook_attn_out": "residual",
        **norm_sites("ln1", present=after),
        "hook_resid_mid": "residual",
        "hook_mlp_in": "residual",
        **norm_sites("ln2", present=before),
        "mlp.hook_pre": "neuron",
        "mlp.hook_post": "neuron",
        **norm_sites("ln2_post", present=sandwich),
        **({"hook_mlp_gate": "residual"} if gated else {}),
        "hook_mlp_out": "residual",
        **norm_sites("ln2", present=after),
        "hook_resid_post": "residual",
    }
    absent = {site for flag, names in OPTIONAL_SITES.items() if flag not in flags for site in names}
    return {name: kind for name, kind in sites.items() if name not in absent}
