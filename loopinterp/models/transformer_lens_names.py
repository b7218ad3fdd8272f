"""What TransformerLens' own tools ask of a model, answered for a run of T loops.

To them a looped model is an ordinary one of ``n_prelude + T * n_layers + n_coda`` layers whose
weights happen to be the same, for its default number of loops T.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from loopinterp.errors import InputError
from loopinterp.models.component_sites import OPTIONAL_SITES
from loopinterp.models.looped_network import LoopedNetwork
from loopinterp.models.model_config import LoopedTransformerConfig
from loopinterp.models.plain_layers import with_weights

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor
    from transformer_lens import FactoredMatrix
    from transformer_lens.config import TransformerBridgeConfig

_NORM_TYPES = {"layernorm": "LN", "rmsnorm": "RMS"}


class _View:
    """A module of the shared block at one loop: its weights, and the hooks of that loop."""

    hook_out_is_single_residual_stream = True

    def __init__(self, model: Any, module: nn.Module, prefix: str) -> None:
        self._model, self._module, self._prefix = model, module, prefix

    def __getattr__(self, name: str) -> Any:
        full = f"{self._prefix}.{name}"
        if full in self._model.addresses().addresses:
            return self._model.hook_dict[full]
        inner = getattr(self._module, name)
        return _View(self._model, inner, full) if isinstance(inner, nn.Module) else inner

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._module(*args, **options)


def _flag(name: str) -> Callable[[Any, bool], None]:
    """A setter of one of TransformerLens' flags, which adds sites to every layer."""

    def set_flag(self: Any, use: bool) -> None:
        self._flags = self._flags | {name} if use else self._flags - {name}

    sites = " and ".join(f"``{site}``" for site in OPTIONAL_SITES[name])
    set_flag.__doc__ = f"Have {sites} in every layer, or not; they cost where somebody looks."
    return set_flag


def _stacked(part: str, name: str) -> property:
    """Weights of all layers under TransformerLens' name, layers of the loop once for each loop."""

    def stacked(self: Any) -> Tensor:
        return torch.stack([getattr(getattr(block, part), name) for block in self.blocks])

    doc = f"``{name}`` of all ``cfg.n_layers`` layers in a row, the block's once for each loop."
    return property(stacked, doc=doc)


@dataclass(frozen=True)
class Needs:
    """What a method of TransformerLens needs of a model to say what it seems to say.

    Attributes:
        expected: The same in words.
        fix: What to do without it.
        settings: The values that a setting of the model may have.
    """

    expected: str
    fix: str
    settings: Mapping[str, tuple[Any, ...]]

    def check(self, config: Any, method: str) -> None:
        """Raise unless a model has every one of the settings."""
        if not isinstance(config, LoopedTransformerConfig):
            raise InputError(
                method,
                expected=self.expected,
                given="an adapter, which knows the weights of a published model by no such names",
                fix="Use the lenses of loopinterp, or read the activations themselves.",
            )
        given = {name: getattr(config, name) for name in self.settings}
        wrong = [f"{k}={value!r}" for k, value in given.items() if value not in self.settings[k]]
        if wrong:
            raise InputError(method, expected=self.expected, given=", ".join(wrong), fix=self.fix)


DIRECT_WRITES = Needs(
    "heads, neurons and biases that reach the stream without a norm or gate between",
    "Read what a sublayer writes from hook_attn_out and hook_mlp_out, or use a model with "
    "norm='pre' or 'none'.",
    {"norm": ("none", "pre")},
)


class TransformerLensNames(LoopedNetwork):
    """Names that TransformerLens' caches, patching and attribution look up on a model."""

    @property
    def cfg(self) -> TransformerBridgeConfig:
        """TransformerLens' configuration of a run: ``n_layers`` counts every loop."""
        from transformer_lens.config import TransformerBridgeConfig

        config = self.config
        flags: dict[str, Any] = dict.fromkeys(self._flags, True)
        return TransformerBridgeConfig(
            d_model=config.d_model,
            d_head=config.head_width,
            n_heads=config.n_heads,
            n_layers=config.layers_total(self.n_loops),
            n_ctx=config.n_ctx or 2048,
            d_mlp=config.mlp_width,
            d_vocab=config.d_vocab or 1,
            d_vocab_out=config.d_vocab_out,
            act_fn=config.act_fn,
            eps=config.norm_eps,
            normalization_type=None if config.norm == "none" else _NORM_TYPES[config.norm_type],
            uses_rms_norm=config.norm_type == "rmsnorm",
            attention_dir="causal" if config.causal else "bidirectional",
            positional_embedding_type="rotary" if config.positions == "rotary" else "standard",
            device=str(self.device),
            dtype=self.dtype,
            model_name="loopinterp",
            **flags,
        )

    @property
    def blocks(self) -> list[Any]:
        """A view of each layer at each loop: weights shared, hooks its own."""
        layers: list[nn.Module] = [*self.prelude, *list(self.block) * self.n_loops, *self.coda]
        return [_View(self, layer, f"blocks.{k}") for k, layer in enumerate(layers)]

    @property
    def W_E(self) -> Float[Tensor, "d_vocab d_model"]:
        """Embedding weights: of tokens, or of features."""
        weight = with_weights(self.embedding).weight
        assert isinstance(weight, torch.Tensor)
        return weight if self.config.token_input else weight.T

    @property
    def W_pos(self) -> Float[Tensor, "n_ctx d_model"]:
        """Learned position embedding."""
        if self.position_embedding is None:
            raise AttributeError("W_pos: this model learns no position embedding")
        return with_weights(self.position_embedding).weight

    @property
    def W_U(self) -> Float[Tensor, "d_model d_vocab_out"]:
        """Unembedding weights."""
        return with_weights(self.unembedding).weight.T

    @property
    def b_U(self) -> Float[Tensor, " d_vocab_out"]:
        """Unembedding bias; zeros where there is none."""
        bias = with_weights(self.unembedding).bias
        return self.W_U.new_zeros(self.config.d_vocab_out) if bias is None else bias

    @property
    def unembed(self) -> nn.Linear:
        """The unembedding under TransformerLens' name."""
        return self.unembedding

    def to_tokens(self, tokens: Any, *_: Any, **__: Any) -> Tensor:
        """Tokens are given as they are: there is no tokenizer, and text is refused."""
        if isinstance(tokens, torch.Tensor):
            return tokens
        raise InputError(
            "tokens",
            expected="token indices as a tensor or an integer: there is no tokenizer",
            given=repr(tokens),
            fix="Use the sampler of the task, which gives token tensors.",
        )

    to_single_token = to_tokens

    def tokens_to_residual_directions(
        self, tokens: int | Tensor
    ) -> Float[Tensor, "*shape d_model"]:
        """The direction of the residual stream that each output class is read from.

        Args:
            tokens: Output classes, of any shape.
        """
        if isinstance(tokens, str):
            self.to_tokens(tokens)
        return self.W_U.T[torch.as_tensor(tokens, device=self.device)]

    def accumulated_bias(
        self, layer: int, mlp_input: bool = False, include_mlp_biases: bool = True
    ) -> Float[Tensor, " d_model"]:
        """Sum of the output biases of all layers before ``layer``, loop after loop.

        Args:
            layer: Layer, counted as TransformerLens counts.
            mlp_input: Add the attention bias of ``layer`` itself.
            include_mlp_biases: Whether MLP biases count.

        Raises:
            InputError: If a norm stands between the biases and the stream.
        """
        DIRECT_WRITES.check(self.config, "accumulated_bias")
        b_O = self.b_O
        total = b_O[:layer].sum(0)
        if include_mlp_biases:
            total = total + self.b_out[:layer].sum(0)
        return total + b_O[layer] if mlp_input else total

    def blocks_with(self, submodule: str) -> list[tuple[int, Any]]:
        """Number and view of every layer that has a part of this name: all layers, or none."""
        parts = ("ln1", "attn", "ln2", "mlp")
        return list(enumerate(self.blocks)) if submodule in parts else []

    def tl_parameters(self) -> dict[str, Tensor]:
        """Weights under TransformerLens' names, those of the tied block once for each loop."""
        named = {"embed.W_E": self.W_E, "unembed.W_U": self.W_U, "unembed.b_U": self.b_U}
        parts = {
            "attn": ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O"),
            "mlp": ("W_in", "b_in", "W_out", "b_out"),
        }
        if self.config.norm != "none":
            norm = ("w", "b") if self.config.norm_type == "layernorm" else ("w",)
            parts |= {"ln1": norm, "ln2": norm}
        for number, block in enumerate(self.blocks):
            for part, names in parts.items():
                for name in names:
                    named[f"blocks.{number}.{part}.{name}"] = getattr(getattr(block, part), name)
        return named

    W_Q, b_Q = _stacked("attn", "W_Q"), _stacked("attn", "b_Q")
    W_K, b_K = _stacked("attn", "W_K"), _stacked("attn", "b_K")
    W_V, b_V = _stacked("attn", "W_V"), _stacked("attn", "b_V")
    W_O, b_O = _stacked("attn", "W_O"), _stacked("attn", "b_O")
    W_in, b_in = _stacked("mlp", "W_in"), _stacked("mlp", "b_in")
    W_out, b_out = _stacked("mlp", "W_out"), _stacked("mlp", "b_out")

    @property
    def QK(self) -> FactoredMatrix:
        """``W_Q W_K^T`` of each layer and head ``[layer, head, d_model, d_model]``, factored.

        As in TransformerLens, without the norm before it, biases and positions.
        """
        from transformer_lens import FactoredMatrix

        return FactoredMatrix(self.W_Q, self.W_K.mT)

    @property
    def OV(self) -> FactoredMatrix:
        """``W_V W_O`` of each layer and head ``[layer, head, d_model, d_model]``, factored."""
        from transformer_lens import FactoredMatrix

        return FactoredMatrix(self.W_V, self.W_O)

    set_use_split_qkv_input = _flag("use_split_qkv_input")
    set_use_attn_result = _flag("use_attn_result")
    set_use_hook_mlp_in = _flag("use_hook_mlp_in")

    def set_use_attn_in(self, use: bool) -> None:
        """Raise where ``use`` is True: there is one copy of the stream for each of q, k and v."""
        if use:
            raise InputError(
                "use_attn_in",
                expected="False: queries, keys and values have a copy of the stream each",
                given="True",
                fix="Call set_use_split_qkv_input(True), and hook all three.",
            )
