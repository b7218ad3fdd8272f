r"""Nanbeige4.2: Llama's layers, applied twice, with a norm after each loop.

Source: ``modeling_nanbeige.py`` beside the published weights (Nanbeige4.2-3B: 22 layers, 2 loops).
"""

from __future__ import annotations

from typing import Any

from loopinterp.adapters.llama_loops import LlamaLoops
from loopinterp.core.errors import InputError

_ROTARY = "layers.0.self_attn.rotary_emb"
_OFF = (  # settings of the published code that the released model leaves off
    *("enable_double_loop_split", "skip_loop_final_norm", "enable_hyper_connection"),
    *("enable_depth_attention", "qk_layernorm", "loop_share_kv", "emb_neighbor_num"),
)


class NanbeigeAdapter(LlamaLoops):
    """Nanbeige4.2 (``NanbeigeForCausalLM``) with our addresses; ``model.norm`` is the loop norm.

    Raises:
        InputError: If the model has one of the code's further options, or the angles of positions
            were lost in loading.
    """

    needs = (
        "model.embed_tokens",
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.layers.0.input_layernorm",
        "model.layers.0.post_attention_layernorm",
        "model.ngram_layer_fusion",
        "model._get_num_loops",
        "model.norm",
        "lm_head",
    )

    def __init__(self, published: Any) -> None:
        config, inner = published.config, published.model
        on = [name for name in _OFF if getattr(config, name, None)]
        if getattr(inner.get_submodule(_ROTARY), "scaling_factor", 1.0) != 1.0:
            on.append("rope_scaling")
        if on:
            expected, got = "the options of Nanbeige4.2-3B", f"{', '.join(on)} as well"
            fix = "Pass repeat='model.layers' and inputs= for a generic adapter."
            raise InputError("model", expected=expected, given=got, fix=fix)
        n_loops = int(inner._get_num_loops())  # by num_loops, or by the weights of their losses
        super().__init__(published, f"model.{_ROTARY}", n_loops=n_loops, closing={})
