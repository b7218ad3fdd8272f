"""GPT-2 in TransformerLens' bridge, with the weights of a looped model in every layer.

Its bridge has what that of the native model lacks: a copy of the stream for each head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformer_lens.config import TransformerBridgeConfig
from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module
from transformers import GPT2Config, GPT2LMHeadModel

from tests.models.peers.gpt2 import NAMES, PLAIN

if TYPE_CHECKING:
    from torch import Tensor
    from transformer_lens.model_bridge import TransformerBridge

    from loopinterp.models import LoopedTransformer


def bridged_gpt2(looped: LoopedTransformer, n_loops: int) -> TransformerBridge:
    """A GPT-2 of ``n_loops * n_layers`` layers; the looped model has to be one that loops it."""
    config = looped.config
    assert (config.positions, config.norm, config.injection) == ("absolute", "pre", "none")
    assert (config.act_fn, config.loop_norm, config.unembed_bias) == ("gelu_new", False, False)
    n_layers = config.layers_total(n_loops)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=config.d_vocab_out,
            n_positions=config.n_ctx or 0,
            n_embd=config.d_model,
            n_layer=n_layers,
            n_head=config.n_heads,
            n_inner=config.mlp_width,
            layer_norm_epsilon=config.norm_eps,
            tie_word_embeddings=False,
            **PLAIN,
        )
    )
    ours = looped.state_dict()
    weights: dict[str, Tensor] = {
        "transformer.wte.weight": ours["embedding.weight"],
        "transformer.wpe.weight": ours["position_embedding.weight"],
        "transformer.ln_f.weight": ours["ln_final.weight"],
        "transformer.ln_f.bias": ours["ln_final.bias"],
        "lm_head.weight": ours["unembedding.weight"],
    }
    blocks = [*looped.prelude, *list(looped.block) * n_loops, *looped.coda]
    for number, layer in enumerate(blocks):
        for mine, theirs in NAMES.items():
            for kind in ("weight", "bias"):
                weight = layer.state_dict()[f"{mine}.{kind}"]
                weight = weight.T if weight.dim() == 2 else weight
                weights[f"transformer.h.{number}.{theirs}.{kind}"] = weight
    model.load_state_dict(weights)
    tl_config = TransformerBridgeConfig(
        d_model=config.d_model,
        d_head=config.head_width,
        n_heads=config.n_heads,
        n_layers=n_layers,
        n_ctx=config.n_ctx or 0,
        d_mlp=config.mlp_width,
        d_vocab=config.d_vocab or 0,
        d_vocab_out=config.d_vocab_out,
        act_fn="gelu_new",
        normalization_type="LN",
        eps=config.norm_eps,
        architecture="GPT2LMHeadModel",
    )
    bridge: Any = build_bridge_from_module(
        model.eval(), architecture="GPT2LMHeadModel", tl_config=tl_config, model_name="looped-gpt2"
    )
    bridge.to_tokens = lambda tokens: tokens  # its own wants a tokenizer even for tokens
    return bridge.eval()
