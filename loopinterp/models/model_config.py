"""Every axis along which looped transformers differ, in one frozen, validated dataclass."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from loopinterp.errors import ConfigError, unknown_name

Positions = Literal["none", "absolute", "relative", "abacus", "rotary"]
Norm = Literal["none", "pre", "post", "sandwich"]
NormType = Literal["layernorm", "rmsnorm"]
Injection = Literal["none", "input", "gated_output", "sublayer", "concat", "internal"]
InitialState = Literal["embedding", "zeros", "noise"]
Activation = Literal["relu", "gelu", "gelu_new", "silu"]
AbacusTarget = Literal["input", "qk"]

_CHOICES: dict[str, tuple[str, ...]] = {
    "positions": get_args(Positions),
    "norm": get_args(Norm),
    "norm_type": get_args(NormType),
    "injection": get_args(Injection),
    "initial_state": get_args(InitialState),
    "act_fn": get_args(Activation),
    "abacus_target": get_args(AbacusTarget),
}


@dataclass(frozen=True, kw_only=True)
class LoopedTransformerConfig:
    """Configuration of a :class:`~loopinterp.models.LoopedTransformer`.

    ``n_loops=1`` with ``n_layers=4`` and absolute positions is an ordinary transformer:
    baselines are configurations, not classes.

    Attributes:
        d_model: Width of the residual stream.
        n_heads: Attention heads in each layer.
        d_vocab_out: Output classes at each position.
        d_vocab: Input tokens; exactly one of ``d_vocab`` and ``d_features`` is set.
        d_features: Width of input feature vectors, embedded by a linear map.
        n_loops: Loops of a run that does not say how many it wants.
        n_layers: Depth of the tied block.
        n_prelude: Untied layers before the loop, run once.
        n_coda: Untied layers after the loop, run once per readout.
        d_head: Width of a head; ``d_model // n_heads`` if None.
        d_mlp: Neurons of each MLP; ``4 * d_model`` if None.
        act_fn: Activation of the MLP (``gelu_new`` is GPT-2's tanh form).
        causal: Whether a position attends to itself and earlier ones only.
        attention_window: Hard window: a query attends to keys at most this far away; None for
            no window.
        positions: ``none`` (NoPE), ``absolute`` (learned), ``relative`` (a bias per head and
            distance, clamped to ``relative_window``), ``abacus`` (index of a digit within its
            number) or ``rotary``.
        n_ctx: Length of the learned position table (``absolute``, ``abacus``).
        relative_window: Distance at which the relative bias is clamped.
        abacus_target: Whether abacus positions are added to the input or to queries and keys.
        abacus_max_offset: Random offsets in training are drawn from 0 to this number.
        digit_tokens: Tokens that count as digits for abacus positions.
        rotary_base: Base of the rotary frequencies.
        norm: Where the norm of each sublayer sits; ``sandwich`` (peri) norms its input and
            its output.
        norm_type: LayerNorm or RMSNorm.
        norm_eps: Added to the variance.
        loop_norm: Whether the state is normed at the end of each loop (outer norm).
        injection: Where the embedding ``e`` enters each loop. ``input``: f(h + e).
            ``gated_output``: f(h) + gate * e with a learned scalar gate. ``sublayer``: e is added
            to the normed input of each sublayer. ``concat``: f(W_h h + W_e e), external recall.
            ``internal``: each sublayer reads W_h norm(h) + W_e e, internal recall.
        injection_gate: Initial gate of ``gated_output``.
        initial_state: ``embedding`` (h_0 = e), ``zeros``, or seeded ``noise``.
        noise_std: Standard deviation of a ``noise`` start.
        noise_seed: Seed of a ``noise`` start: the same shape gets the same noise.
        final_norm: Whether the readout norms the state first.
        tie_unembed: Whether the unembedding is the transposed token embedding.
        unembed_bias: Whether the unembedding has a bias.
        init_std: Standard deviation of initial weights; PyTorch's own initialisation if None.

    Raises:
        ConfigError: If a value is unknown, out of range, in conflict, or without effect.

    Example:
        >>> config = LoopedTransformerConfig(d_model=64, n_heads=4, d_vocab=6, d_vocab_out=2)
        >>> config.head_width, config.mlp_width
        (16, 256)
    """

    d_model: int
    n_heads: int
    d_vocab_out: int
    d_vocab: int | None = None
    d_features: int | None = None
    n_loops: int = 1
    n_layers: int = 1
    n_prelude: int = 0
    n_coda: int = 0
    d_head: int | None = None
    d_mlp: int | None = None
    act_fn: Activation = "gelu"
    causal: bool = True
    attention_window: int | None = None
    positions: Positions = "none"
    n_ctx: int | None = None
    relative_window: int | None = None
    abacus_target: AbacusTarget = "input"
    abacus_max_offset: int = 99
    digit_tokens: tuple[int, ...] = ()
    rotary_base: float = 10_000.0
    norm: Norm = "pre"
    norm_type: NormType = "layernorm"
    norm_eps: float = 1e-5
    loop_norm: bool = False
    injection: Injection = "none"
    injection_gate: float = 0.1
    initial_state: InitialState = "embedding"
    noise_std: float = 1.0
    noise_seed: int = 0
    final_norm: bool = True
    tie_unembed: bool = False
    unembed_bias: bool = True
    init_std: float | None = None

    def __post_init__(self) -> None:
        self._check_types()
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise unknown_name(name, str(value), choices, ConfigError)
        object.__setattr__(self, "digit_tokens", tuple(self.digit_tokens))
        for name in ("d_model", "n_heads", "d_vocab_out", "n_loops", "n_layers"):
            self._at_least(name, 1)
        for name in ("n_prelude", "n_coda", "abacus_max_offset"):
            self._at_least(name, 0)
        for name in ("d_vocab", "d_features", "d_head", "d_mlp", "n_ctx"):
            if getattr(self, name) is not None:
                self._at_least(name, 1)
        for name in ("norm_eps", "noise_std", "rotary_base"):
            if not getattr(self, name) > 0:
                raise self._error(name, "a number > 0", f"Set {name} above 0.")
        self._check_input()
        self._check_attention()
        self._check_effects()

    @property
    def head_width(self) -> int:
        """``d_head``, or ``d_model // n_heads`` where it is not set."""
        return self.d_head if self.d_head is not None else self.d_model // self.n_heads

    @property
    def mlp_width(self) -> int:
        """``d_mlp``, or ``4 * d_model`` where it is not set."""
        return self.d_mlp if self.d_mlp is not None else 4 * self.d_model

    @property
    def token_input(self) -> bool:
        """Whether the model reads tokens (else feature vectors)."""
        return self.d_vocab is not None

    def layers_total(self, n_loops: int) -> int:
        """Layers of a run unrolled over its loops: ``n_prelude + n_loops * n_layers + n_coda``."""
        return self.n_prelude + n_loops * self.n_layers + self.n_coda

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form; :meth:`from_dict` reads it back."""
        return {**dataclasses.asdict(self), "digit_tokens": list(self.digit_tokens)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LoopedTransformerConfig:
        """Build from a mapping, refusing names that do not exist.

        Raises:
            ConfigError: If a name is unknown, a needed one is missing, or a value is wrong.
        """
        fields = {f.name: f for f in dataclasses.fields(cls)}
        for name in values:
            if name not in fields:
                raise unknown_name("model setting", str(name), fields, ConfigError)
        needed = [n for n, f in fields.items() if f.default is dataclasses.MISSING]
        missing = [n for n in needed if n not in values]
        if missing:
            raise ConfigError(
                "model settings",
                expected=f"at least {', '.join(needed)}",
                given=f"none for {', '.join(missing)}",
                fix=f"Set {missing[0]}.",
            )
        return cls(**values)

    def replace(self, **changes: Any) -> LoopedTransformerConfig:
        """A copy with some fields changed, validated again."""
        return dataclasses.replace(self, **changes)

    def _check_types(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type == "bool" and not isinstance(value, bool):
                raise self._error(field.name, "true or false", f"Set {field.name} to one of them.")
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if field.type in ("float", "float | None") and not number and value is not None:
                raise self._error(field.name, "a number", f"Set {field.name} to a number.")

    def _check_input(self) -> None:
        if (self.d_vocab is None) == (self.d_features is None):
            raise ConfigError(
                "model input",
                expected="exactly one of d_vocab (tokens) and d_features (feature vectors)",
                given=f"d_vocab={self.d_vocab}, d_features={self.d_features}",
                fix="Set one of them and leave the other None.",
            )
        if self.tie_unembed and (
            self.d_vocab is None or self.d_vocab != self.d_vocab_out or self.unembed_bias
        ):
            raise ConfigError(
                "tie_unembed",
                expected="d_vocab equal to d_vocab_out, and unembed_bias=False",
                given=f"d_vocab={self.d_vocab}, d_vocab_out={self.d_vocab_out}, "
                f"unembed_bias={self.unembed_bias}",
                fix="A tied unembedding is the transposed token embedding, without bias.",
            )

    def _check_attention(self) -> None:
        if self.d_head is None and self.d_model % self.n_heads:
            raise self._error(
                "n_heads",
                f"a divisor of d_model={self.d_model}",
                "Change n_heads, or set d_head explicitly.",
            )
        if self.attention_window is not None:
            self._at_least("attention_window", 0)
        if self.positions in ("absolute", "abacus") and self.n_ctx is None:
            raise self._error(
                "n_ctx", f"a table length for positions={self.positions!r}", "Set n_ctx."
            )
        if self.positions == "relative":
            if self.relative_window is None:
                raise self._error(
                    "relative_window", "a window for positions='relative'", "Set relative_window."
                )
            self._at_least("relative_window", 0)
        if self.positions == "rotary" and self.head_width % 2:
            raise self._error("d_head", "an even number for rotary positions", "Change d_head.")
        if self.positions == "abacus":
            if not (self.digit_tokens and self.token_input):
                raise self._error(
                    "digit_tokens",
                    "the tokens that are digits, and token input, for positions='abacus'",
                    "Set digit_tokens and d_vocab.",
                )
            if self.abacus_target == "qk" and self.n_heads * self.head_width != self.d_model:
                raise self._error(
                    "abacus_target",
                    "n_heads * d_head = d_model for 'qk'",
                    "Change d_head, or use abacus_target='input'.",
                )

    def _check_effects(self) -> None:
        """An option that has no effect here is an error, not a silent surprise."""
        without_effect = [
            ("n_ctx", self.positions not in ("absolute", "abacus"), None),
            ("relative_window", self.positions != "relative", None),
            ("digit_tokens", self.positions != "abacus", ()),
            ("abacus_target", self.positions != "abacus", "input"),
            ("injection_gate", self.injection != "gated_output", 0.1),
            ("noise_std", self.initial_state != "noise", 1.0),
            ("noise_seed", self.initial_state != "noise", 0),
            ("rotary_base", self.positions != "rotary", 10_000.0),
        ]
        for name, idle, default in without_effect:
            if idle and getattr(self, name) != default:
                raise self._error(
                    name,
                    f"{default!r}, because it has no effect with positions={self.positions!r}, "
                    f"injection={self.injection!r}, initial_state={self.initial_state!r}",
                    f"Leave {name} out.",
                )
        if self.injection == "none" and self.initial_state != "embedding":
            raise self._error(
                "injection",
                f"an injection with initial_state={self.initial_state!r}",
                "Without injection the input only enters through the initial state: "
                "use initial_state='embedding'.",
            )

    def _at_least(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self._error(name, f"an integer >= {least}", f"Set {name} to {least} or more.")

    def _error(self, name: str, expected: str, fix: str) -> ConfigError:
        return ConfigError(name, expected=expected, given=repr(getattr(self, name)), fix=fix)
