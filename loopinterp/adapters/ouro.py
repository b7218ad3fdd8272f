r"""Ouro: a looped stack of sandwich-norm layers, with a norm and a gate after each loop.

Source: arXiv 2510.25741, and the published ``modeling_ouro.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from loopinterp.adapters.llama_loops import LlamaLoops
from loopinterp.core.errors import InputError
from loopinterp.models.placement import call
from loopinterp.models.positions import AttentionContext
from loopinterp.models.taps import NO_TAPS, Taps

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


class OuroAdapter(LlamaLoops):
    """Ouro (``OuroForCausalLM``) with our addresses; ``model.norm`` is the loop norm.

    Raises:
        InputError: If a layer attends within a sliding window, or the angles of positions were
            lost in loading.
    """

    sandwich = True

    needs = (
        "model.embed_tokens",
        "model.layers.0.input_layernorm_2",
        "model.layers.0.post_attention_layernorm_2",
        "model.early_exit_gate",
        "model.norm",
        "model.rotary_emb.inv_freq",
        "lm_head",
    )

    def __init__(self, published: Any) -> None:
        if "sliding_attention" in (getattr(published.config, "layer_types", None) or ()):
            fix = "Load it with use_sliding_window=False, as published."
            got = "layer_types = sliding_attention"
            raise InputError("model", expected="full attention", given=got, fix=fix)
        super().__init__(
            published,
            "model.rotary_emb",
            n_loops=int(published.model.total_ut_steps),
            closing={"hook_exit_gate": "scale"},
        )

    def exit_probability(
        self, state: Float[Tensor, "*loop batch pos d_state"]
    ) -> Float[Tensor, "*loop batch pos"]:
        """``sigmoid(early_exit_gate(h))``: to stop at a loop, if it has not stopped before."""
        return call(self.published.model.early_exit_gate, state).sigmoid().squeeze(-1)

    def run_loop(
        self, h: Tensor, e: Tensor, context: AttentionContext, taps: Taps = NO_TAPS, loop: int = 0
    ) -> Tensor:
        h, tap = super().run_loop(h, e, context, taps, loop), taps.at("block", loop)
        if tap.listens("hook_exit_gate"):
            tap("hook_exit_gate", self.exit_probability(h)[..., None])  # [batch, pos, 1]
        return h
