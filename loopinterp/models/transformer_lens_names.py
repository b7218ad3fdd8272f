"""Names that TransformerLens' tools look up on a model, for a run of T loops.

They see an ordinary model of ``n_prelude + T * n_layers + n_coda`` layers with shared weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from loopinterp.core.boundary import checked
from loopinterp.core.errors import InputError
from loopinterp.models.config import OPTIONAL_SITES
from loopinterp.models.run import HookedRun
from loopinterp.models.transformer_lens_calls import DIRECT_WRITES, Needs
from loopinterp.models.weights import weights_of, with_weights

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor
    from transformer_lens import FactoredMatrix
    from transformer_lens.model_bridge.composition_scores import CompositionScores


_DIRECT_PATHS = Needs(
    "a stream that carries what a head writes, unchanged, to every later layer",
    "Use loopinterp.edges.path_patching, which goes through norms and injections.",
    {"norm": ("none", "pre"), "loop_norm": (False,), "state_code": (None,)},
).also(injection=("none", "input", "gated_output", "sublayer", "internal"))
_FROM_PRELUDE = _DIRECT_PATHS.also(injection=("none",), initial_state=("embedding",))
_EDGES = replace(
    _FROM_PRELUDE.also(positions=("none", "absolute", "relative", "rotary", "fire", "grid")),
    expected="a stream that is the sum of the token embedding and what heads and MLPs write",
    fix="Use loopinterp.edges.edge_study, or turn on one or two of the three flags.",
)


class _View:
    """A module of the block at one loop: shared weights, own hooks."""

    hook_out_is_single_residual_stream = True

    def __init__(self, model: Any, module: nn.Module, prefix: str) -> None:
        self._model, self._module, self._prefix = model, module, prefix

    @property
    def submodules(self) -> dict[str, Any]:
        config = self._model.config
        before = int(self._prefix.split(".")[1]) < config.n_prelude
        needs = _FROM_PRELUDE if before else _DIRECT_PATHS
        needs.check(config, "path patching by TransformerLens")
        return {name: getattr(self, name) for name in ("attn", "mlp")}

    def __getattr__(self, name: str) -> Any:
        full = f"{self._prefix}.{name}"
        if full in self._model.addresses().addresses:
            return self._model.hook_dict[full]
        inner = getattr(self._module, name)
        return _View(self._model, inner, full) if isinstance(inner, nn.Module) else inner

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._module(*args, **options)


def _flag(name: str) -> Callable[[Any, bool], None]:
    def set_flag(self: Any, use: bool) -> None:
        flags = self._flags | {name} if use else self._flags - {name}
        # TransformerLens' edge attribution and faithfulness turn all of them on together.
        if use and flags >= OPTIONAL_SITES.keys():
            _EDGES.check(self.config, "edges by TransformerLens")
        self._flags = flags

    sites = " and ".join(f"``{site}``" for site in OPTIONAL_SITES[name])
    set_flag.__doc__ = f"Add {sites} to every layer, or remove them; they cost time where hooked."
    return set_flag


class _NamedWeights:
    def __init__(self, call: Callable[..., Any], weights: Mapping[str, Callable[[], Tensor]]):
        self._call, self._weights = call, weights

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._weights[name]() if name in self._weights else getattr(self._call, name)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._call(*args, **options)


class _HeadLabels(list[str]):
    """Labels of heads; callable, as in earlier versions of TransformerLens."""

    def __call__(self) -> list[str]:
        return list(self)


def _stacked(part: str, name: str) -> property:
    def stacked(self: Any) -> Tensor:
        return torch.stack([getattr(getattr(block, part), name) for block in self.blocks])

    return property(stacked, doc=f"``{name}`` of all layers, the block's once for each loop.")


class TransformerLensNames(HookedRun):
    """Names for TransformerLens' caches, patching and attribution."""

    embedding: nn.Module
    position_embedding: nn.Embedding | None
    prelude: nn.ModuleList
    block: nn.ModuleList
    coda: nn.ModuleList
    unembedding: nn.Linear

    def cfg_options(self) -> dict[str, Any]:
        config = self.config
        norm = {"layernorm": "LN", "rmsnorm": "RMS"}[config.norm_type]
        return {
            "act_fn": config.act_fn,
            "eps": config.norm_eps,
            "normalization_type": None if config.norm == "none" else norm,
            "uses_rms_norm": config.norm_type == "rmsnorm",
            "positional_embedding_type": "rotary" if config.positions == "rotary" else "standard",
            "model_name": "loopinterp",
            **dict.fromkeys(self._flags, True),
        }

    @property
    def blocks(self) -> list[Any]:
        """A view of each layer at each loop."""
        layers: list[nn.Module] = [*self.prelude, *list(self.block) * self.n_loops, *self.coda]
        return [_View(self, layer, f"blocks.{k}") for k, layer in enumerate(layers)]

    @property
    def W_E(self) -> Float[Tensor, "d_vocab d_model"]:
        """Embedding of tokens or features."""
        weight = with_weights(self.embedding).weight
        assert isinstance(weight, torch.Tensor)
        return weight if self.config.token_input else weight.T

    @property
    def W_pos(self) -> Float[Tensor, "n_ctx d_model"]:
        if self.position_embedding is None:
            got, fix = self.config.positions, "Use positions='absolute'."
            raise InputError("W_pos", expected="learned positions", given=got, fix=fix)
        return with_weights(self.position_embedding).weight

    W_U = weights_of("unembedding", "weight.T", "Unembedding ``[d_model, d_vocab_out]``.")

    @property
    def b_U(self) -> Float[Tensor, " d_vocab_out"]:
        """Unembedding bias, zeros if there is none."""
        bias = with_weights(self.unembedding).bias
        return self.W_U.new_zeros(self.config.d_vocab_out) if bias is None else bias

    @property
    def unembed(self) -> _NamedWeights:
        return _NamedWeights(self.unembedding, {"W_U": lambda: self.W_U, "b_U": lambda: self.b_U})

    if not TYPE_CHECKING:  # to a type checker it stays the method of the protocol

        @property
        def embed(self) -> _NamedWeights:
            """:meth:`HookedRun.embed`, the injected input; also with ``W_E``."""
            return _NamedWeights(super().embed, {"W_E": lambda: self.W_E})

    @property
    def all_head_labels(self) -> _HeadLabels:
        """``L0H0``, ``L0H1``, … for all layers, loop after loop."""
        n_layers, n_heads = self.config.layers_total(self.n_loops), self.config.n_heads
        return _HeadLabels(
            f"L{layer}H{head}" for layer in range(n_layers) for head in range(n_heads)
        )

    @checked
    def all_composition_scores(self, mode: Literal["Q", "K", "V"]) -> CompositionScores:
        """Overlap of each head's output weights with a later head's input weights.

        ``||W_OV W|| / (||W_OV|| ||W||)`` with W the later head's ``W_QK`` (``mode="Q"``), its
        transpose (``"K"``) or its ``W_OV`` (``"V"``), as ``[layer, head, layer, head]``; zero
        unless the first is in an earlier layer. Norms and injections in between are ignored.

        Source: Elhage et al., A Mathematical Framework for Transformer Circuits (2021).
        """
        from transformer_lens.model_bridge.composition_scores import CompositionScores
        from transformer_lens.utilities.matrix import composition_scores

        reads = {"Q": self.QK, "K": self.QK.T, "V": self.OV}
        scores = composition_scores(self.OV, reads[mode], broadcast_dims=True)
        layers = torch.arange(len(scores), device=scores.device)
        # [layer, head, layer, head]: True where the first head is in an earlier layer.
        earlier = layers[:, None, None, None] < layers[:, None]
        later = scores.masked_fill(~earlier, 0.0)
        return CompositionScores(later, layers.tolist(), list(self.all_head_labels))

    def tokens_to_residual_directions(
        self, tokens: int | Tensor
    ) -> Float[Tensor, "*shape d_model"]:
        """The stream direction from which each output class is read."""
        if isinstance(tokens, str):
            self.to_tokens(tokens)  # which refuses text
        return self.W_U.T[torch.as_tensor(tokens, device=self.device)]

    def accumulated_bias(
        self, layer: int, mlp_input: bool = False, include_mlp_biases: bool = True
    ) -> Float[Tensor, " d_model"]:
        """Sum of the output biases of all layers before ``layer``.

        ``mlp_input`` adds the attention bias of ``layer`` itself.
        """
        DIRECT_WRITES.check(self.config, "accumulated_bias")
        b_O = self.b_O
        total = b_O[:layer].sum(0)
        if include_mlp_biases:
            total = total + self.b_out[:layer].sum(0)
        return total + b_O[layer] if mlp_input else total

    def tl_named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.tl_parameters().items())

    def blocks_with(self, submodule: str) -> list[tuple[int, Any]]:
        return list(enumerate(self.blocks)) if submodule in ("ln1", "attn", "ln2", "mlp") else []

    def tl_parameters(self) -> dict[str, Tensor]:
        """Weights by TransformerLens name; the block's once per loop."""
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
        """``W_Q W_K^T`` of each head ``[layer, head, d_model, d_model]``, factored.

        As in TransformerLens, without norm, biases and positions.
        """
        from transformer_lens import FactoredMatrix

        return FactoredMatrix(self.W_Q, self.W_K.mT)

    @property
    def OV(self) -> FactoredMatrix:
        """``W_V W_O`` of each head ``[layer, head, d_model, d_model]``, factored."""
        from transformer_lens import FactoredMatrix

        return FactoredMatrix(self.W_V, self.W_O)

    set_use_split_qkv_input = _flag("use_split_qkv_input")
    set_use_attn_result = _flag("use_attn_result")
    set_use_hook_mlp_in = _flag("use_hook_mlp_in")

    def set_use_attn_in(self, use: bool) -> None:
        """Raise if ``use``: each of q, k and v has its own copy of the stream."""
        if use:
            expected, fix = "False", "Call set_use_split_qkv_input(True), and hook all three."
            raise InputError("use_attn_in", expected=expected, given="True", fix=fix)
