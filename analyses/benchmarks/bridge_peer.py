"""TransformerLens' bridge: of its own untied model with looped weights, and of published models."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from torch import nn
from transformer_lens.config import TransformerBridgeConfig
from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module
from transformer_lens.model_bridge.sources.native import NativeModel

if TYPE_CHECKING:
    from torch import Tensor
    from transformer_lens.model_bridge import TransformerBridge

    from loopinterp.models import LoopedTransformer


def untied_bridge(
    looped: LoopedTransformer, n_loops: int, *, tied: bool = False
) -> TransformerBridge:
    """A bridge of ``n_loops * n_layers`` layers; ``tied`` makes its layers share parameters.

    The looped model must be one that TransformerLens can say: learned absolute positions, causal,
    pre-norm, a final norm, no injection, no loop norm, no bias of the unembedding.
    """
    config = looped.config
    assert (config.positions, config.norm, config.injection) == ("absolute", "pre", "none")
    assert config.causal and config.final_norm and not config.loop_norm
    assert not config.unembed_bias
    cfg = TransformerBridgeConfig(
        d_model=config.d_model,
        d_head=config.head_width,
        n_heads=config.n_heads,
        n_layers=config.layers_total(n_loops),
        n_ctx=config.n_ctx or 0,
        d_mlp=config.mlp_width,
        d_vocab=config.d_vocab or 0,
        d_vocab_out=config.d_vocab_out,
        act_fn=config.act_fn,
        normalization_type="LN" if config.norm_type == "layernorm" else "RMS",
        eps=config.norm_eps,
        architecture="TransformerLensNative",
    )
    native = NativeModel(cfg)
    blocks = list(looped.block) * n_loops
    weights: dict[str, Tensor] = {}
    for number, layer in enumerate([*looped.prelude, *blocks, *looped.coda]):
        weights |= _layer_weights(layer, f"layers.{number}")
    state = looped.state_dict()
    for theirs, ours in (
        ("tok_embed", "embedding"),
        ("pos", "position_embedding"),
        ("ln_out", "ln_final"),
        ("head", "unembedding"),
    ):
        for kind in ("weight", "bias"):
            if f"{ours}.{kind}" in state:
                weights[f"{theirs}.{kind}"] = state[f"{ours}.{kind}"]
    native.load_state_dict(weights)
    if tied:
        _tie(list(native.layers))
    return build_bridge_from_module(
        native.eval(), architecture="TransformerLensNative", tl_config=cfg, model_name="untied"
    ).eval()


def published_bridge(published: Any) -> TransformerBridge:
    """The bridge of a model of ``transformers``; of a copy, as it changes what it takes."""
    taken = copy.deepcopy(published)
    return build_bridge_from_module(
        taken, architecture=type(taken).__name__, hf_config=taken.config, model_name="published"
    ).eval()


def bridge_residuals(bridge: TransformerBridge) -> list[str]:
    """Names of the residual stream after each layer; those of a loop fire once per loop."""
    lists = ("prelude", "blocks", "core_block", "L_blocks", "H_blocks", "coda")
    return [
        f"{name}.{layer}.hook_resid_post"
        for name in lists
        if hasattr(bridge, name)
        for layer in range(len(getattr(bridge, name)))
    ]


def _layer_weights(layer: nn.Module, prefix: str) -> dict[str, Tensor]:
    weights = {}
    for name, weight in layer.state_dict().items():
        if name.startswith("attn.qkv."):
            for part, chunk in zip("qkv", weight.chunk(3)):
                weights[f"{prefix}.attn.{part}.{name.split('.')[-1]}"] = chunk
        else:
            weights[f"{prefix}.{name.replace('attn.out', 'attn.o')}"] = weight
    return weights


def _tie(layers: list[nn.Module]) -> None:
    for layer in layers[1:]:
        for (_, first), (_, other) in zip(layers[0].named_modules(), layer.named_modules()):
            for name, parameter in first.named_parameters(recurse=False):
                setattr(other, name, parameter)
